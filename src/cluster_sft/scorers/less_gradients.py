"""Step less-gradients of score: projected gradients of every training row, for LESS."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from cluster_sft import costs
from cluster_sft.artifacts import read_table
from cluster_sft.errors import UserError
from cluster_sft.scorers._less_features import write_features
from cluster_sft.token_batches import pack_tokens

if TYPE_CHECKING:
    from cluster_sft.params import Launch
    from cluster_sft.stage_params import LessGradientsParams


def run(
    params: LessGradientsParams,
    *,
    dataset: Path,
    warmup: Path,
    out: Path,
    scratch: Path,
    launch: Launch,
) -> None:
    """Compute the features of every prepared row at every checkpoint of the warm-up.

    Raises:
        UserError: no rows, no such model, or no row with a gradient.
    """
    meter = costs.start()
    ids = read_table(dataset, "dataset.parquet", ["id"])
    if ids.is_empty():
        raise UserError(f"{dataset}: dataset.parquet has no rows; there is nothing to score")
    pack_tokens(dataset / "dataset.parquet", scratch)
    write_features(
        params,
        ids.with_columns(subtask=pl.lit(None, pl.String)),
        label="less-gradients",
        gradient=params.gradient,
        tokens=scratch,
        warmup=warmup,
        out=out,
        scratch=scratch,
        launch=launch,
        meter=meter,
    )
