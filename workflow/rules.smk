"""One rule a stage. The work is in the package; a rule names its leaf, its inputs and its cores.

The only output is the stamp: Snakemake deletes outputs before a job and after a failure, and must
never delete a result. Heavy stages take `cores`, and those that compute on GPUs `gpus`. Rules that
take seconds run where Snakemake runs, on a cluster too, where a job takes longer to start.
"""


localrules:
    unscored,
    select,
    report,
    study,


ruleorder: unscored > scorer > features > score


rule prepare:
    input:
        upstream("prepare"),
    output:
        "results/{name}/prepare/key-{key}",
    log:
        "work/logs/{name}/prepare/{key}.log",
    conda:
        "envs/cluster-sft.yaml"
    threads: cores("prepare")
    params:
        arguments=arguments,
    shell:
        RUN


rule embed:
    input:
        upstream("embed"),
    output:
        "results/{name}/embed/key-{key}",
    log:
        "work/logs/{name}/embed/{key}.log",
    conda:
        "envs/cluster-sft.yaml"
    threads: cores("embed")
    resources:
        gpu=gpus("embed"),
    params:
        arguments=arguments,
    shell:
        RUN


rule cluster:
    input:
        upstream("cluster"),
    output:
        "results/{name}/cluster/{slugs}/key-{key}",
    log:
        "work/logs/{name}/cluster/{slugs}/{key}.log",
    conda:
        "envs/cluster-sft.yaml"
    threads: cores("cluster")
    params:
        arguments=arguments,
    shell:
        RUN


rule select:
    input:
        upstream("select"),
    output:
        "results/{name}/select/{slugs}/key-{key}",
    log:
        "work/logs/{name}/select/{slugs}/{key}.log",
    conda:
        "envs/cluster-sft.yaml"
    threads: 1
    params:
        arguments=arguments,
    shell:
        RUN


rule train:
    input:
        upstream("train"),
    output:
        "results/{name}/train/{slugs}/key-{key}",
    log:
        "work/logs/{name}/train/{slugs}/{key}.log",
    conda:
        "envs/cluster-sft.yaml"
    threads: cores("train")
    resources:
        gpu=gpus("train"),
    params:
        arguments=arguments,
    shell:
        RUN


rule evaluate:
    input:
        upstream("evaluate"),
    output:
        "results/{name}/evaluate/{slugs}/key-{key}",
    log:
        "work/logs/{name}/evaluate/{slugs}/{key}.log",
    conda:
        "envs/cluster-sft.yaml"
    threads: cores("evaluate")
    resources:
        gpu=gpus("evaluate"),
    params:
        arguments=arguments,
    shell:
        RUN


rule scorer:
    input:
        upstream("scorer"),
    output:
        "results/{name}/scorer/{slugs}/key-{key}",
    log:
        "work/logs/{name}/scorer/{slugs}/{key}.log",
    conda:
        "envs/cluster-sft.yaml"
    threads: cores("scorer")
    resources:
        gpu=gpus("scorer"),
    params:
        arguments=arguments,
    shell:
        RUN


rule features:
    input:
        upstream("features"),
    output:
        "results/{name}/features/{slugs}/key-{key}",
    log:
        "work/logs/{name}/features/{slugs}/{key}.log",
    conda:
        "envs/cluster-sft.yaml"
    threads: cores("features")
    resources:
        gpu=gpus("features"),
    params:
        arguments=arguments,
    shell:
        RUN


rule score:
    input:
        upstream("score"),
    output:
        "results/{name}/score/{slugs}/key-{key}",
    log:
        "work/logs/{name}/score/{slugs}/{key}.log",
    conda:
        "envs/cluster-sft.yaml"
    threads: cores("score")
    resources:
        gpu=gpus("score"),
    params:
        arguments=arguments,
    shell:
        RUN


rule unscored:
    input:
        upstream("unscored"),
    output:
        "results/{name}/{empty}/key-{key}",
    log:
        "work/logs/{name}/{empty}/{key}.log",
    conda:
        "envs/cluster-sft.yaml"
    params:
        arguments=arguments,
    shell:
        RUN


rule validate:
    input:
        upstream("validate"),
    output:
        "results/{name}/validate/{slugs}/key-{key}",
    log:
        "work/logs/{name}/validate/{slugs}/{key}.log",
    conda:
        "envs/cluster-sft.yaml"
    threads: cores("validate")
    resources:
        gpu=gpus("validate"),
    params:
        arguments=arguments,
    shell:
        RUN


rule diagnose:
    input:
        upstream("diagnose"),
    output:
        "results/{name}/diagnose/{slugs}/key-{key}",
    log:
        "work/logs/{name}/diagnose/{slugs}/{key}.log",
    conda:
        "envs/cluster-sft.yaml"
    threads: cores("diagnose")
    params:
        arguments=arguments,
    shell:
        RUN


rule report:
    input:
        upstream("report"),
    output:
        "results/{name}/report/key-{key}",
    log:
        "work/logs/{name}/report/{key}.log",
    conda:
        "envs/cluster-sft.yaml"
    threads: 1
    params:
        arguments=arguments,
    shell:
        RUN


rule study:
    input:
        upstream("studies"),
    output:
        "results/{name}/studies/{slugs}/key-{key}",
    log:
        "work/logs/{name}/studies/{slugs}/{key}.log",
    conda:
        "envs/cluster-sft.yaml"
    threads: 1
    params:
        arguments=arguments,
    shell:
        RUN
