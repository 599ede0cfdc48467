"""Write dvc.yaml and workflow/dvc.yaml from the table of stages: `python workflow/dvc_yaml.py`.

A stage lists every code file that it imports, so that DVC sees an edit of any of them; no hand
keeps such lists true. tests/test_engines.py holds the files equal to what this writes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cluster_sft import strategies, suites
from cluster_sft.digests import PACKAGE, closure
from cluster_sft.stages import BASE, CHAIN, SCORES, STAGES, spec_of

ROOT = Path(__file__).parents[1]
RESULTS = "results/${name}"
HEADER = """\
# Written by `python workflow/dvc_yaml.py` from src/cluster_sft/stages.py: edit there.
"""
PIPELINE = """\
# The same DAG as the Snakefile, for tracking, sharing and serial runs: `dvc repro`, `dvc push`,
# `dvc pull`. Each stage has one output, its leaf; `persist`, since `cluster-sft run` itself swaps
# results in and keeps what was there.
"""
SCORING = """\
# The steps of stage score. In a file of their own, so that `dvc repro` at the root runs only those
# that a strategy of params.yaml needs; a strategy without scores has an empty leaf.
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


def leaf(stage: str, step: str = "") -> str:
    """Return a stage's leaf with DVC's templates for its axes."""
    if stage == "score":
        return f"{RESULTS}/score/{step or '${item.strategy}'}"
    slugs = [STAGES[s].slug for s in CHAIN[stage]]
    slugs = [
        s.replace("{strategy}", "{item.strategy}").replace("{suite}", "{item.suite}") for s in slugs
    ]
    return "/".join([RESULTS, stage, *(re.sub(r"\{", "${", s) for s in slugs)])


def code(*modules: str) -> list[str]:
    """Return the package's files that modules import; registries of members by name as a folder."""
    files = [f"src/cluster_sft/{p.relative_to(PACKAGE).as_posix()}" for p in closure(modules)]
    for registry in ("strategies", "suites"):
        folder = f"src/cluster_sft/{registry}"
        files = sorted({folder if f.startswith(f"{folder}/") else f for f in files})
    return files


def keys(stage: str, step: str = "") -> list[str]:
    """Return the keys of params.yaml that a stage reads, those in its path included."""
    spec = spec_of(stage, step)
    named = {p: k for p, k in spec.keys.items() if k != "strategy" and p not in spec.files}
    found = set(named.values())
    if stage == "cluster":
        found.add("train.workers")  # K, where k is auto
    if "score.s2l.model" in found:
        found.add("model.name")  # the proxy, where it is auto
    return sorted(found)


def entry(
    name: str,
    out: str,
    deps: list[str],
    params: list[str],
    *,
    matrix: dict[str, str] | None = None,
    wdir: str = "",
) -> str:
    """Return one stage as YAML."""
    lines = [f"  {name}:"]
    if wdir:
        lines.append(f"    wdir: {wdir}")
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
    per_strategy = {"strategy": "select.strategies"}
    suite = "data/suites/${item.suite}"
    for stage, spec in STAGES.items():
        reads = [leaf(maker) for maker in spec.reads.values()]
        modules = [spec.module]
        matrix = per_strategy if stage in ("select", "train", "diagnose") else None
        params = keys(stage)
        if stage == "prepare":
            reads = ["${data.source}"]
        if stage == "select":
            modules += [f"strategies.{s}" for s in strategies.names()]
        if stage == "evaluate":
            matrix = {**per_strategy, "suite": "evaluate.suites"}
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


def scoring() -> str:
    """Return workflow/dvc.yaml: every step of score, and the empty leaf of every other strategy."""
    found = []
    for step in [*SCORES, *sorted(set(strategies.names()) - set(SCORES))]:
        spec = spec_of("score", step)
        reads = [leaf("score", m) if m in SCORES else leaf(m) for m in spec.reads.values()]
        reads += [f"${{{spec.keys[name]}}}" for name in spec.files]
        deps = reads + code(spec.module)
        out = leaf("score", step)
        found.append(entry(f"score-{step}", out, deps, keys("score", step), wdir=".."))
    stages = "\n".join(found)
    return f"{HEADER}{SCORING}vars:\n- ../params.yaml\n\nstages:\n{stages}"


FILES = {"dvc.yaml": pipeline, "workflow/dvc.yaml": scoring}


if __name__ == "__main__":
    for name, text in FILES.items():
        (ROOT / name).write_text(text())
        print(f"wrote {name}", file=sys.stderr)
