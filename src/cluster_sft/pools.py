"""Read the rows that a strategy chooses from: their clusters, distances and scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

from cluster_sft.artifacts import GROUPS, SUMMARY, read_json, read_scores, read_table
from cluster_sft.errors import UserError
from cluster_sft.strategies import Pool

CLUSTERS = "clusters.parquet"


def read_pool(leaf: Path, name: str) -> tuple[Pool, int]:
    """Return the rows of clusters.parquet, and K; one cluster for a table without clusters.

    Raises:
        UserError: a cluster without rows, or a value that is none.
    """
    if name != CLUSTERS:
        n_rows = len(read_table(leaf, name, ["id"]))
        labels, distances = np.zeros(n_rows, np.int32), np.zeros(n_rows, np.float32)
        zero = np.zeros(n_rows, bool)
    else:
        table = read_table(leaf, name, ["cluster", "distance"])
        _check_clusters(leaf, table)
        labels, distances = (table[c].to_numpy() for c in ("cluster", "distance"))
        summary = read_json(leaf / SUMMARY) if (leaf / SUMMARY).is_file() else {}
        zero = np.zeros(len(table), bool)
        if zero_rows := summary.get("zero_rows"):
            zero = read_table(leaf, name, ["id"])["id"].is_in(zero_rows).to_numpy()
    k = int(labels.max()) + 1 if len(labels) else 0
    if k == 0 or np.bincount(labels, minlength=k).min() == 0:
        raise UserError(f"{leaf}: every cluster must hold a row, one is empty")
    return Pool(labels, distances, zero), k


def with_scores(pool: Pool, leaf: Path, name: str, scores: Path | None) -> Pool:
    """Return the pool with the scores of its rows, joined by id.

    Args:
        pool: of the table `name` in `leaf`.
        leaf: where the rows' ids are.
        name: of their table.
        scores: leaf of stage score.

    Raises:
        UserError: no scores, or an id twice in them.
    """
    if scores is None:
        raise UserError("a strategy that chooses by scores needs the leaf of its score")
    ids, frame = read_table(leaf, name, ["id"]), read_scores(scores)
    if not frame["id"].equals(ids["id"]):
        frame = ids.join(frame, on="id", how="left", maintain_order="left")
    if len(frame) != len(ids):
        raise UserError(f"{scores / 'scores.parquet'}: every id must be there once, one is twice")
    score = frame["score"].fill_null(np.nan).to_numpy()
    columns = {"score": np.where(np.isfinite(score), score, np.nan)}
    columns |= {c: frame[c].fill_null(-1).to_numpy() for c in GROUPS if c in frame.columns}
    return replace(pool, scores=columns)


def _check_clusters(leaf: Path, table: pl.DataFrame) -> None:
    """Check the columns of clusters that another program may have written."""
    wrong = table.select(
        cluster=pl.col("cluster").is_null() | (pl.col("cluster") < 0),
        distance=pl.col("distance").is_null() | ~pl.col("distance").is_finite(),
    )
    for column in wrong.columns:
        if (row := wrong[column].arg_max()) is not None and wrong[column][row]:
            raise UserError(
                f"{leaf / CLUSTERS}, row {row}: {column!r} must be a number of at least 0, got "
                f"{table[column][row]}; correct it or run cluster again"
            )
