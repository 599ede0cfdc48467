"""Step less of score: the influence of every training row on the target examples (LESS).

With unit features t_i of a training row and q_i of a target at checkpoint i, which counts eta_i,
the score is the largest over subtasks of the mean over their targets of sum_i eta_i <t_i, q_i>
(Xia et al., 2024). Targets without a subtask are one. Their features are kept in targets/.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster_sft import costs
from cluster_sft.artifacts import SUMMARY, read_array, read_json, read_table
from cluster_sft.errors import UserError
from cluster_sft.score_files import write_scored
from cluster_sft.scorers._less_targets import write_targets

if TYPE_CHECKING:
    from cluster_sft.params import Launch
    from cluster_sft.stage_params import LessParams

BLOCK_ROWS = 1024
SPENT = ("forward_passes", "backward_passes", "tokens", "peak_memory_bytes")
SAME = ("projection_dim", "projection_seed", "parameters", "warmup")


def run(
    params: LessParams,
    *,
    dataset: Path,
    warmup: Path,
    gradients: Path,
    out: Path,
    scratch: Path,
    launch: Launch,
) -> None:
    """Take the targets' gradients and score every training row that has one.

    Raises:
        UserError: a defect of the targets' file, or gradients of another warm-up or projection.
    """
    targets = out / "targets"
    targets.mkdir()
    write_targets(params, dataset, warmup=warmup, out=targets, scratch=scratch, launch=launch)
    meter = costs.start()  # the targets have a clock of their own
    facts, theirs = read_json(gradients / SUMMARY), read_json(targets / SUMMARY)
    if other := [key for key in SAME if facts[key] != theirs[key]]:
        raise UserError(
            f"{gradients} and the targets differ in {', '.join(other)} and cannot be compared; "
            "run less-gradients again with the same parameters"
        )
    rows = read_table(gradients, "gradients.parquet")
    examples = read_table(targets, "gradients.parquet")
    names = examples["subtask"].fill_null("").to_numpy()
    usable = examples["reason"].is_null().to_numpy()
    subtasks = sorted(set(names[usable]))
    scores = np.zeros((len(rows), len(subtasks)))
    for number, weight in enumerate(facts["weights"], start=1):
        found = read_array(targets / f"features-{number}.npy", ndim=2, dtype=np.float16)
        # A mean of cosines is the cosine with a mean, since the features have unit length.
        means = np.stack(
            [found[usable & (names == name)].mean(axis=0, dtype=np.float64) for name in subtasks]
        )
        features = read_array(gradients / f"features-{number}.npy", ndim=2, dtype=np.float16)
        for start in range(0, len(rows), BLOCK_ROWS):
            part = slice(start, start + BLOCK_ROWS)
            scores[part] += weight * (features[part].astype(np.float64) @ means.T)
    write_scored(
        out,
        rows.select("id", "reason").with_columns(score=scores.max(axis=1)),
        meter=meter,
        facts=_facts(subtasks, scores, rows["reason"].is_null().to_numpy()),
        **{name: theirs["cost"][name] for name in SPENT},
        earlier_seconds=theirs["cost"]["seconds"],
    )


def _facts(subtasks: list[str], scores: np.ndarray, scored: np.ndarray) -> Mapping[str, Any]:
    """Return for how many rows each subtask is the one that counts."""
    best = np.bincount(scores[scored].argmax(axis=1), minlength=len(subtasks))
    return {"subtasks": dict(zip(subtasks, best.tolist(), strict=True))}
