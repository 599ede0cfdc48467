"""CluSTER, end to end: prepare, embed, cluster, select, train, evaluate, report.

`snakemake --cores N` makes the report of params.yaml; `--configfile params.yaml sweeps/NAME.yaml`
a study. `snakemake fetch --cores 1`, with the same files, brings what a run needs from a network.
What has to run is decided by stamps in the leaves (see src/cluster_sft/plan.py), so that neither
file times nor `.snakemake/` matter.
"""

from snakemake.utils import min_version

min_version("9.0")


configfile: "params.yaml"


include: "workflow/common.smk"
include: "workflow/rules.smk"


localrules:
    all,
    fetch,


rule all:
    default_target: True
    input:
        TARGET.stamp,


rule fetch:
    log:
        "work/logs/fetch.log",
    conda:
        "workflow/envs/cluster-sft.yaml"
    params:
        files=FILES,
    shell:
        "cluster-sft fetch --params {params.files} 2>&1 | tee {log}"
