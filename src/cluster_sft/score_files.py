"""What the last step of every scorer writes: scores.parquet and its summary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from cluster_sft.artifacts import SUMMARY, write_json, write_scores
from cluster_sft.costs import Meter

NON_FINITE = "non_finite"


def write_scored(
    out: Path,
    frame: pl.DataFrame,
    *,
    meter: Meter,
    facts: Mapping[str, Any] | None = None,
    forward_passes: int = 0,
    backward_passes: int = 0,
    tokens: int = 0,
    peak_memory_bytes: int | None = None,
    earlier_seconds: float = 0.0,
) -> None:
    """Write scores.parquet, sorted by id, and summary.json.

    A row with a reason, or with a score that is not finite, is excluded: its score is null, and the
    reason of the latter is `non_finite`.

    Args:
        out: folder of the payload.
        frame: id and score; reason, where rows are excluded; source and group, where there are.
        meter: started with the work.
        facts: what else the summary says.
        forward_passes: as in `Meter.stop`.
        backward_passes: as in `Meter.stop`.
        tokens: as in `Meter.stop`.
        peak_memory_bytes: as in `Meter.stop`.
        earlier_seconds: as in `Meter.stop`.
    """
    if "reason" not in frame.columns:
        frame = frame.with_columns(reason=pl.lit(None, pl.String))
    score = pl.col("score").cast(pl.Float64)
    usable = score.is_finite().fill_null(False) & pl.col("reason").is_null()
    frame = frame.with_columns(
        score=pl.when(usable).then(score),
        reason=pl.when(~usable).then(pl.col("reason").fill_null(NON_FINITE)),
    ).sort("id")
    write_scores(out, frame)
    excluded = frame.drop_nulls("reason").group_by("reason").len().sort("reason")
    score_N = frame["score"].drop_nulls()
    cost = meter.stop(
        out,
        forward_passes=forward_passes,
        backward_passes=backward_passes,
        tokens=tokens,
        peak_memory_bytes=peak_memory_bytes,
        earlier_seconds=earlier_seconds,
    )
    summary = {
        "scored": len(score_N),
        "excluded": dict(excluded.iter_rows()),
        "lowest": score_N.min(),
        "median": score_N.median(),
        "highest": score_N.max(),
        **(facts or {}),
        "cost": cost,
    }
    write_json(out / SUMMARY, summary)
