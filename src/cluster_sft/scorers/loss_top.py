"""Step loss-top of score: the loss of every row, which stage embed has measured on its way."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from cluster_sft import costs
from cluster_sft.artifacts import read_table
from cluster_sft.score_files import write_scored

if TYPE_CHECKING:
    from cluster_sft.params import Launch, Section


def run(params: Section, *, embeddings: Path, out: Path, scratch: Path, launch: Launch) -> None:
    """Score every embedded row by its mean negative log-likelihood, in nats per supervised token.

    Raises:
        UserError: samples.parquet is missing or damaged.
    """
    meter = costs.start()
    samples = read_table(embeddings, "samples.parquet", ["id", "nll"])
    write_scored(out, samples.select("id", score=pl.col("nll")), meter=meter)
