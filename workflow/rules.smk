"""One rule a stage. The work is in the package; a rule names its leaf, its inputs and its cores.

The only output is the stamp: Snakemake deletes outputs before a job and after a failure, and must
never delete a result. Heavy stages take the threads that `launch.threads` asks for.
"""


rule prepare:
    input:
        upstream("prepare"),
    output:
        "results/{name}/prepare/key-{key}",
    log:
        "work/logs/{name}/prepare/{key}.log",
    params:
        files=files,
    threads: THREADS
    shell:
        RUN


rule embed:
    input:
        upstream("embed"),
    output:
        "results/{name}/embed/key-{key}",
    log:
        "work/logs/{name}/embed/{key}.log",
    params:
        files=files,
    threads: THREADS
    shell:
        RUN


rule cluster:
    input:
        upstream("cluster"),
    output:
        "results/{name}/cluster/{slugs}/key-{key}",
    log:
        "work/logs/{name}/cluster/{slugs}/{key}.log",
    params:
        files=files,
    threads: THREADS
    shell:
        RUN


rule select:
    input:
        upstream("select"),
    output:
        "results/{name}/select/{slugs}/key-{key}",
    log:
        "work/logs/{name}/select/{slugs}/{key}.log",
    params:
        files=files,
    threads: 1
    shell:
        RUN


rule train:
    input:
        upstream("train"),
    output:
        "results/{name}/train/{slugs}/key-{key}",
    log:
        "work/logs/{name}/train/{slugs}/{key}.log",
    params:
        files=files,
    threads: THREADS
    shell:
        RUN


rule evaluate:
    input:
        upstream("evaluate"),
    output:
        "results/{name}/evaluate/{slugs}/key-{key}",
    log:
        "work/logs/{name}/evaluate/{slugs}/{key}.log",
    params:
        files=files,
    threads: THREADS
    shell:
        RUN


rule report:
    input:
        upstream("report"),
    output:
        "results/{name}/report/key-{key}",
    log:
        "work/logs/{name}/report/{key}.log",
    params:
        files=files,
    threads: 1
    shell:
        RUN


rule study:
    input:
        upstream("studies"),
    output:
        "results/{name}/studies/{slugs}/key-{key}",
    log:
        "work/logs/{name}/studies/{slugs}/{key}.log",
    params:
        files=files,
    threads: 1
    shell:
        RUN
