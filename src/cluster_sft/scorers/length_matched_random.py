"""Step length-matched-random of score: the response tokens of every row."""

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
    """Score every embedded row by the number of its supervised tokens.

    Raises:
        UserError: samples.parquet is missing or damaged.
    """
    meter = costs.start()
    samples = read_table(embeddings, "samples.parquet", ["id", "n_tokens"])
    write_scored(out, samples.select("id", score=pl.col("n_tokens")), meter=meter)
