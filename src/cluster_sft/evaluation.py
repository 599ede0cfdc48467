"""Stage evaluate: score one model on one suite."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from cluster_sft import suites
from cluster_sft.artifacts import write_json

if TYPE_CHECKING:
    from cluster_sft.params import Launch
    from cluster_sft.stage_params import EvaluateParams


def run(
    params: EvaluateParams,
    *,
    suite: Path,
    dataset: Path,
    model: str,
    out: Path,
    scratch: Path,
    launch: Launch,
) -> None:
    """Run a suite and write `scores.json`, and `samples.jsonl` where the suite was run.

    A suite that cannot be run here without breaking a rule, such as model-written code without a
    sandbox, is written as "not run" with the reason; that is a result, not an error.

    Args:
        params: what can change the scores.
        suite: the suite's folder.
        dataset: leaf of the prepared data, for its held-out rows.
        model: name of the model, or the leaf of a trained one.
        out: empty folder for the payload.
        scratch: folder for what may be lost.
        launch: only `threads` is read, as the number of sandboxes at a time.

    Raises:
        UserError: the suite, the model or the data cannot be read, or a data set is out of reach.
    """
    spec = suites.read(suite)
    rule = suites.Rule(
        dtype=params.dtype,
        template=params.template,
        limit=params.limit,
        max_new_tokens=params.max_new_tokens,
        allow_code_execution=params.allow_code_execution,
    )
    evaluation = suites.Evaluation(
        suite, spec, rule, dataset, model, out, scratch, launch.threads or 1
    )
    scores = suites.get(spec["kind"]).run(evaluation)
    write_json(
        out / "scores.json",
        {
            "suite": suite.resolve().name,
            "kind": spec["kind"],
            "status": "run" if scores.reason is None else "not run",
            "reason": scores.reason,
            "metrics": [asdict(metric) for metric in scores.metrics],
            "details": dict(scores.details),
        },
    )
