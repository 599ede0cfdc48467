"""The leaves that the diagnostics read, joined by id.

Legend: N embedded rows, H hidden size, K clusters, S selected rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from cluster_sft.artifacts import SUMMARY, read_embeddings, read_json, read_table
from cluster_sft.diagnostics.moments import Array
from cluster_sft.errors import UserError
from cluster_sft.token_batches import TokenStore


@dataclass(frozen=True)
class Clustered:
    """The embedded rows and their clusters, aligned.

    Attributes:
        dataset: leaf of prepare.
        ids: of the N rows.
        x: (N, H) float16, memory-mapped; unit rows, or zero ones.
        norm_N: float64, ||g(x)||.
        tokens_N: int64, supervised tokens.
        label_N: int64, clusters.
        distance_N: float32, to the centroid of the row's cluster.
        k: K.
        alpha: capacity factor of the clusters.
    """

    dataset: Path
    ids: pl.Series
    x: NDArray[np.float16]
    norm_N: Array
    tokens_N: NDArray[np.int64]
    label_N: NDArray[np.int64]
    distance_N: NDArray[np.float32]
    k: int
    alpha: float


@dataclass(frozen=True)
class Inputs(Clustered):
    """Clustered rows and a subset of them.

    Attributes:
        rows_S: positions of the selected rows, ascending.
        weight_S: float64, their weights.
        unknown: selected rows without an embedding, left out everywhere.
    """

    rows_S: NDArray[np.int64]
    weight_S: Array
    unknown: int

    @property
    def selected_N(self) -> NDArray[np.bool_]:
        """Mark the selected rows."""
        marks = np.zeros(len(self.label_N), dtype=bool)
        marks[self.rows_S] = True
        return marks


def read_clustered(dataset: Path, *, embeddings: Path, clusters: Path) -> Clustered:
    """Read and join the leaves of embed and cluster.

    Raises:
        UserError: rows without a cluster.
    """
    x, samples = read_embeddings(embeddings)
    frame = samples.with_row_index("row").join(
        read_table(clusters, "clusters.parquet"), on="id", how="left", maintain_order="left"
    )
    if frame["cluster"].null_count():
        lost = frame.filter(pl.col("cluster").is_null())["id"][0]
        raise UserError(
            f"{clusters / 'clusters.parquet'}: row {lost} of {embeddings} has no cluster; both "
            "must come from one run"
        )
    summary = read_json(clusters / SUMMARY)
    return Clustered(
        dataset=dataset,
        ids=frame["id"],
        x=x,
        norm_N=frame["proxy_norm"].to_numpy().astype(np.float64),
        tokens_N=frame["n_tokens"].to_numpy().astype(np.int64),
        label_N=frame["cluster"].to_numpy().astype(np.int64),
        distance_N=frame["distance"].to_numpy().astype(np.float32),
        k=int(summary["k"]),
        alpha=float(summary["alpha"]),
    )


def read_inputs(dataset: Path, *, embeddings: Path, clusters: Path, subset: Path) -> Inputs:
    """Read and join the leaves; clusters are the cluster leaf's, whatever the subset states.

    Raises:
        UserError: rows without a cluster, or no selected row that is embedded.
    """
    found = read_clustered(dataset, embeddings=embeddings, clusters=clusters)
    chosen = read_table(subset, "subset.parquet", ["id", "weight"])
    rows = pl.DataFrame({"id": found.ids}).with_row_index("row")
    joined = chosen.join(rows, on="id", how="inner").sort("row")
    if joined.is_empty():
        raise UserError(f"{subset / 'subset.parquet'}: no row of it is in {embeddings}")
    return Inputs(
        **vars(found),
        rows_S=joined["row"].to_numpy().astype(np.int64),
        weight_S=joined["weight"].to_numpy().astype(np.float64),
        unknown=len(chosen) - len(joined),
    )


def read_rows(inputs: Clustered, rows: NDArray[np.int64], columns: list[str]) -> pl.DataFrame:
    """Read columns of some embedded rows of dataset.parquet, in the order of `rows`.

    A row may be asked for twice: in a small cluster it is both near and far.

    Raises:
        UserError: the data are damaged or lack one of the rows.
    """
    path = inputs.dataset / "dataset.parquet"
    read_table(inputs.dataset, path.name, ["id"])  # checks the file
    wanted = pl.DataFrame({"id": inputs.ids[rows]})
    scan = pl.scan_parquet(path).select("id", *columns)
    found = scan.join(wanted.lazy(), on="id", how="semi").collect()
    if len(found) < wanted["id"].n_unique():
        raise UserError(f"{path}: lacks rows of the embeddings; both must come from one run")
    return wanted.join(found, on="id", how="left", maintain_order="left")


def read_tokens(inputs: Clustered, rows: NDArray[np.int64]) -> TokenStore:
    """Read the tokens of some embedded rows, in the order of `rows`."""
    frame = read_rows(inputs, rows, ["input_ids", "labels"])
    lengths = frame["input_ids"].list.len().to_numpy()
    return TokenStore(
        input_ids=frame["input_ids"].explode().to_numpy().astype(np.int32),
        labels=frame["labels"].explode().to_numpy().astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
    )


def instructions(messages: pl.Series) -> list[str]:
    """Return what the user says in each conversation, its turns joined by lines."""
    return [_said(turns, "user") for turns in messages]


def responses(messages: pl.Series) -> list[str]:
    """Return what the assistant says in each conversation, its turns joined by lines."""
    return [_said(turns, "assistant") for turns in messages]


def _said(turns: list[dict[str, str]], role: str) -> str:
    return "\n".join(turn["content"] or "" for turn in turns if turn["role"] == role)
