"""Step length-matched-random of score: the response tokens of every row."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cluster_sft.scorers._samples import write_column

if TYPE_CHECKING:
    from cluster_sft.params import Launch, Section


def run(params: Section, *, embeddings: Path, out: Path, scratch: Path, launch: Launch) -> None:
    """Score every embedded row by the number of its supervised tokens.

    Raises:
        UserError: samples.parquet is missing or damaged.
    """
    write_column("n_tokens", embeddings=embeddings, out=out)
