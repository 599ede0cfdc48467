"""Step loss-top of score: the loss of every row, which stage embed has measured on its way."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cluster_sft.scorers._samples import write_column

if TYPE_CHECKING:
    from cluster_sft.params import Launch, Section


def run(params: Section, *, embeddings: Path, out: Path, scratch: Path, launch: Launch) -> None:
    """Score every embedded row by its mean negative log-likelihood, in nats per supervised token.

    Raises:
        UserError: samples.parquet is missing or damaged.
    """
    write_column("nll", embeddings=embeddings, out=out)
