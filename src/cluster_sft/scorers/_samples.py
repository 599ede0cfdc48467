"""Scores that stage embed has measured on its way: a column of samples.parquet."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from cluster_sft import costs
from cluster_sft.artifacts import read_table
from cluster_sft.score_files import write_scored


def write_column(column: str, *, embeddings: Path, out: Path) -> None:
    """Score every embedded row by a column of samples.parquet.

    Raises:
        UserError: samples.parquet is missing or damaged.
    """
    meter = costs.start()
    samples = read_table(embeddings, "samples.parquet", ["id", column])
    write_scored(out, samples.select("id", score=pl.col(column)), meter=meter)
