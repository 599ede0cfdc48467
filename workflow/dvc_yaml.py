"""Write dvc.yaml from the table of stages: `python workflow/dvc_yaml.py`.

A stage lists every code file that it imports, so that DVC sees an edit of any of them; no hand
keeps such lists true. tests/test_engines.py holds the file equal to what this writes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cluster_sft import strategies, suites
from cluster_sft.digests import PACKAGE, closure
from cluster_sft.stages import (
    BASE,
    CHAIN,
    NO_STEP,
    PER_STRATEGY,
    SCORING,
    STAGE_OF,
    STAGES,
    STEPS,
    Stage,
)

ROOT = Path(__file__).parents[1]
RESULTS = "results/${name}"
ORDER = ["prepare", "embed", "cluster", *SCORING, *list(STAGES)[3:]]
HEADER = """\
# Written by `python workflow/dvc_yaml.py` from src/cluster_sft/stages.py: edit there.
"""
PIPELINE = """\
# The same DAG as the Snakefile, for tracking, sharing and serial runs: `dvc repro`, `dvc push`,
# `dvc pull`. Each stage has one output, its leaf; `persist`, since `cluster-sft run` itself swaps
# results in and keeps what was there.
"""
OUTPUTS = """\
metrics:
- results/${name}/report/metrics.json

plots:
- results/${name}/report/plots/loss: # a file a strategy; revisions lie over one another
    x: step
    y: loss
- results/${name}/report/plots/scores.csv:
    x: heldout_nll
    y: name
    template: bar_horizontal
- results/${name}/report/figures
"""


def leaf(stage: str) -> str:
    """Return a stage's leaf with DVC's templates for its axes."""
    if stage in SCORING:
        return f"{RESULTS}/{stage}/${{item.strategy}}"
    slugs = [STAGES[s].slug for s in CHAIN[stage]]
    slugs = [re.sub(r"\{(strategy|suite)\}", r"{item.\1}", s) for s in slugs]
    return "/".join([RESULTS, stage, *(s.replace("{", "${") for s in slugs)])


def code(*modules: str) -> list[str]:
    """Return the package's files that modules import; registries of members by name as a folder."""
    files = [f"src/cluster_sft/{p.relative_to(PACKAGE).as_posix()}" for p in closure(modules)]
    for registry in ("strategies", "suites"):
        folder = f"src/cluster_sft/{registry}"
        files = sorted({folder if f.startswith(f"{folder}/") else f for f in files})
    return files


def keys(stage: str) -> list[str]:
    """Return the keys of params.yaml that a stage reads, whatever the strategy."""
    found = {
        key
        for spec in specs(stage)
        for name, key in spec.keys.items()
        if key != "strategy" and name not in spec.files
    }
    if stage == "cluster":
        found.add("train.workers")  # K, where k is auto
    return sorted(found)


def specs(stage: str) -> list[Stage]:
    """Return a stage's entry of the table, or those of all steps that strategies take there."""
    if stage not in SCORING:
        return [STAGES[stage]]
    return [NO_STEP, *(STEPS[step] for step, at in STAGE_OF.items() if at == stage)]


def entry(
    name: str,
    out: str,
    deps: list[str],
    params: list[str],
    *,
    matrix: dict[str, str] | None = None,
) -> str:
    """Return one stage as YAML."""
    lines = [f"  {name}:"]
    if matrix:
        inner = ", ".join(f"{k}: '${{{v}}}'" for k, v in matrix.items())
        lines.append(f"    matrix: {{{inner}}}")
    lines.append(f"    cmd: cluster-sft run {out}")
    lines += ["    deps:", *(f"    - {d}" for d in deps)]
    if params:
        lines += ["    params:", *(f"    - {p}" for p in params)]
    lines += ["    outs:", f"    - {out}:", "        persist: true"]
    return "\n".join(lines) + "\n"


def pipeline() -> str:
    """Return dvc.yaml."""
    found = []
    suite = "data/suites/${item.suite}"
    for stage in ORDER:
        table = specs(stage)
        roles = SCORING.get(stage) or STAGES[stage].reads
        reads = [leaf(maker) for maker in roles.values()]
        modules = [spec.module for spec in table]
        matrix = {"strategy": "select.strategies"} if stage in PER_STRATEGY else {}
        params = keys(stage)
        reads += [f"${{{spec.keys[name]}}}" for spec in table for name in spec.files]
        if stage == "select":
            modules += [f"strategies.{s}" for s in strategies.names()]
        if stage == "evaluate":
            matrix["suite"] = "evaluate.suites"
            modules += [f"suites.{k}" for k in suites.kinds()]
            reads.append(suite)
            params = [k for k in params if k != "model.name"]  # the trained model is in its place
        found.append(entry(stage, leaf(stage), reads + code(*modules), params, matrix=matrix))
        if stage == "evaluate":
            base = f"{RESULTS}/evaluate/{BASE}/${{item.suite}}"
            reads = [leaf("prepare"), suite, *code(*modules)]
            matrix = {"suite": "evaluate.suites"}
            found.append(entry("evaluate-base", base, reads, keys(stage), matrix=matrix))
    reads = [f"{RESULTS}/evaluate", f"{RESULTS}/diagnose", *code("reporting")]
    sections = ["cluster", "data", "evaluate", "model", "score", "select", "train"]
    found.append(entry("report", f"{RESULTS}/report", reads, sections))
    stages = "\n".join(found)
    return f"{HEADER}{PIPELINE}vars:\n- params.yaml\n\nstages:\n{stages}\n{OUTPUTS}"


FILE = ROOT / "dvc.yaml"

if __name__ == "__main__":
    FILE.write_text(pipeline())
    print(f"wrote {FILE.name}", file=sys.stderr)
