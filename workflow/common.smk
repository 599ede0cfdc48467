"""The plan of the parameter files that Snakemake was given, and what rules ask of it."""

import re
import shlex
import sys
from pathlib import Path

from cluster_sft import plan
from cluster_sft.errors import UserError
from cluster_sft.params_files import load

PARAMS = [
    Path(p) for p in dict.fromkeys(["params.yaml", *map(str, workflow.configfiles)])
]

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

THREADS = PARAMETERS["launch"]["threads"] or workflow.cores or 1

# `tee` shows progress and keeps it; pipefail, which Snakemake sets, keeps the exit status.
RUN = (
    "cluster-sft run $(dirname {output}) --expect {wildcards.key} --params {params.files}"
    " 2>&1 | tee {log}"
)

# Stage and strategy of the empty leaves that strategies without scores have in place of scores.
EMPTY = [n.leaf.split("/", 2)[2] for n in NODES.values() if n.module == "scorers.none"]


wildcard_constraints:
    name="[A-Za-z0-9.-]+",
    slugs="[A-Za-z0-9._/-]+",
    key="[0-9a-f]{12}",
    empty="|".join(map(re.escape, EMPTY)) or "(?!)",


def upstream(stage):
    """Return the input function of a stage: the stamps of what its leaf is made of.

    `ancient`, because a stamp's name holds the key: what is upstream of a changed key has another
    name, and a stamp that exists is never out of date.
    """

    def stamps(wildcards):
        slugs = [wildcards.slugs] if hasattr(wildcards, "slugs") else []
        place = getattr(wildcards, "empty", stage)
        parts = ["results", wildcards.name, place, *slugs, f"key-{wildcards.key}"]
        return [ancient(parent.stamp) for parent in NODES["/".join(parts)].parents]

    return stamps


def files(wildcards):
    """Return the parameter files, and the machines of a training, as the command line takes them.

    A profile may give its rule machines. The other rules are told as well, to take of the processes
    those that fall on one.
    """
    asked = workflow.get_rule("train").resources.get("nodes")
    nodes = getattr(asked, "value", None) or PARAMETERS["launch"]["nodes"]
    return f"{shlex.join(map(str, PARAMS))} --nodes {nodes}"
