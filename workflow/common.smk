"""The plan of the parameter files that Snakemake was given, and what rules ask of it."""

import os
import re
import shlex
import sys
from pathlib import Path

from cluster_sft import plan
from cluster_sft.computing import gpus_of
from cluster_sft.errors import UserError
from cluster_sft.params_files import load

PARAMS = [
    Path(p) for p in dict.fromkeys(["params.yaml", *map(str, workflow.configfiles)])
]

FILES = shlex.join(map(str, PARAMS))  # as the command line takes them

if workflow.config_settings.config:
    sys.exit(
        "cluster-sft: --config reaches Snakemake alone, not what its rules run; put "
        f"{', '.join(workflow.config_settings.config)} into a file: --configfile params.yaml FILE"
    )

try:
    PARAMETERS = load(PARAMS)
    TARGET = plan.target(PARAMETERS)
    NODES = plan.ancestry(TARGET)
except UserError as error:
    sys.exit(f"cluster-sft: {error}")

# GPUs of the machine, `resources: gpu: N` in a profile; None where nobody states them.
GPUS = workflow.global_resources.get("gpu").value


def setting(leaf, name):
    """Return a number of the `launch:` section that a leaf belongs to, or of its variable."""
    told = os.environ.get(f"CLUSTER_SFT_{name.upper()}", "")
    if told.isdecimal():  # what is no number is reported by the command that reads it
        return int(told)
    return plan.configuration_of(leaf, PARAMETERS)["launch"][name]


# `tee` shows progress and keeps it; pipefail, which Snakemake sets, keeps the exit status. Slurm
# tells all processes of a job that its time is up: the shells wait while training saves its state.
RUN = (
    "trap : TERM;"
    " cluster-sft run $(dirname {output}) --expect {wildcards.key} --params {params.arguments}"
    " 2>&1 | (trap '' TERM; exec tee {log})"
)

for node in NODES.values() if GPUS else ():
    if (needed := gpus_of(node, setting(node.leaf, "processes"))) > GPUS:
        sys.exit(
            f"cluster-sft: {node.leaf}: needs {needed} GPUs, one a process, but Snakemake was told "
            f"of {GPUS}; lower launch.processes, or raise `gpu` in --resources or in the profile"
        )

# Stage and strategy of the empty leaves that strategies without scores have in place of scores.
UNSCORED = "scorers.none"
EMPTY = [n.leaf.split("/", 2)[2] for n in NODES.values() if n.module == UNSCORED]


wildcard_constraints:
    name="[A-Za-z0-9.-]+",
    slugs="[A-Za-z0-9._/-]+",
    key="[0-9a-f]{12}",
    empty="|".join(map(re.escape, EMPTY)) or "(?!)",


def node_of(stage, wildcards):
    """Return the node that a job of a stage makes."""
    slugs = [wildcards.slugs] if hasattr(wildcards, "slugs") else []
    place = getattr(wildcards, "empty", stage)
    parts = ["results", wildcards.name, place, *slugs, f"key-{wildcards.key}"]
    return NODES["/".join(parts)]


def gpus(stage):
    """Return the function of a stage's resource `gpu`, for rules that compute on GPUs.

    It is unset unless the machine's GPUs are stated: `cluster-sft run` waits for its GPUs anyway,
    a stated number only keeps Snakemake from starting jobs that would wait.
    """

    def count(wildcards):
        node = node_of(stage, wildcards)
        return gpus_of(node, setting(node.leaf, "processes")) if GPUS else None

    return count


def cores(stage):
    """Return the function of a heavy stage's threads: launch.threads, or all cores.

    Where the machine's GPUs are stated, a job on some of them takes that share of the cores, so
    that jobs on the others run beside it.
    """

    def count(wildcards):
        node = node_of(stage, wildcards)
        if threads := setting(node.leaf, "threads"):
            return threads
        taken = gpus_of(node, setting(node.leaf, "processes")) if GPUS else 0
        # Not stated on Slurm, where a profile has the threads of its rules.
        cores = workflow.cores or 1
        return max(1, cores * taken // GPUS) if taken else cores

    return count


def upstream(stage):
    """Return the input function of a stage: the stamps of what its leaf is made of.

    `ancient`, because a stamp's name holds the key: what is upstream of a changed key has another
    name, and a stamp that exists is never out of date.
    """

    def stamps(wildcards):
        return [ancient(parent.stamp) for parent in node_of(stage, wildcards).parents]

    return stamps


def arguments(wildcards, output, threads):
    """Return the parameter files, machines and threads of a job as the command line takes them.

    A profile may give the rule of training machines. The other rules are told as well, to take of
    the processes those that fall on one. It may also give a rule more cores than `launch.threads`,
    on which rounding may depend.
    """
    asked = workflow.get_rule("train").resources.get("nodes")
    nodes = getattr(asked, "value", None) or PARAMETERS["launch"]["nodes"]
    taken = min(threads, setting(NODES[output[0]].leaf, "threads") or threads)
    return f"{FILES} --nodes {nodes} --threads {taken}"
