"""The rows that a run trains on: read, joined by id, planned into batches, padded into tensors.

Legend: N selected rows in the order of their ids, K clusters.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster_sft.artifacts import read_table
from cluster_sft.batching import BatchPlan, Step, batch_plan
from cluster_sft.errors import UserError

if TYPE_CHECKING:
    from cluster_sft.params import TrainParams

PAD = 0  # any id does: padding is told from the mask
IGNORED = -100


@dataclass(frozen=True)
class Selection:
    """What decides the batches: ids (ascending), clusters (N,) int64 and weights (K,) float64."""

    ids: list[str]
    clusters_N: NDArray[np.int64]
    weights_K: NDArray[np.float64]


@dataclass(frozen=True)
class TrainingRows:
    """A selection with its tokens.

    Attributes:
        selection: the rows' ids, clusters and weights.
        input_ids: N arrays of int32.
        labels: N arrays of int32, -100 where nothing is supervised.
        lengths_N: int64, tokens of every row.
        n_tokens_N: int64, supervised tokens that a position predicts.
    """

    selection: Selection
    input_ids: list[NDArray[np.int32]]
    labels: list[NDArray[np.int32]]
    lengths_N: NDArray[np.int64]
    n_tokens_N: NDArray[np.int64]

    def describe(self, step: Step) -> dict[str, Any]:
        """Return a step's counts: rows, tokens, supervised tokens and rows of every cluster."""
        rows = np.concatenate([positions for positions, _ in step])
        counts = np.bincount(
            self.selection.clusters_N[rows], minlength=len(self.selection.weights_K)
        )
        return {
            "rows": len(rows),
            "tokens": int(self.lengths_N[rows].sum()),
            "supervised_tokens": int(self.n_tokens_N[rows].sum()),
            "cluster_counts": counts.tolist(),
        }


def read_selection(dataset: Path, subset: Path, *, weights: str) -> Selection:
    """Read which rows are trained on, with what weights, and check that the dataset has them.

    Args:
        dataset: a prepared leaf.
        subset: a selected leaf.
        weights: "cluster" for the subset's weights, "none" for 1.

    Raises:
        UserError: no rows, an id twice or unknown to the dataset, or weights that are not one
            number a cluster.
    """
    frame = read_table(subset, "subset.parquet", ["id", "cluster", "weight"]).sort("id")
    where = subset / "subset.parquet"
    if frame.is_empty():
        raise UserError(f"{where}: holds no rows; select some")
    if twice := frame.filter(pl.col("id").is_duplicated())["id"].to_list():
        raise UserError(f"{where}: row {twice[0]} is there twice; every id must be once")
    known = read_table(dataset, "dataset.parquet", ["id"])
    if lost := frame.join(known, on="id", how="anti")["id"].to_list():
        raise UserError(
            f"{where}: row {lost[0]} is not in {dataset / 'dataset.parquet'} ({len(lost)} such); "
            "select from this dataset"
        )
    if not (frame["cluster"] >= 0).fill_null(False).all():
        raise UserError(f"{where}: every row needs a cluster of 0 or more")
    clusters_N = frame["cluster"].to_numpy().astype(np.int64)
    weights_K = _cluster_weights(frame, clusters_N, where, weights=weights)
    return Selection(frame["id"].to_list(), clusters_N, weights_K)


def read_rows(dataset: Path, subset: Path, *, weights: str) -> TrainingRows:
    """Read the selected rows with their tokens.

    Raises:
        UserError: as `read_selection`, or a row that supervises nothing.
    """
    selection = read_selection(dataset, subset, weights=weights)
    tokens = read_table(dataset, "dataset.parquet", ["id", "input_ids", "labels"])
    frame = pl.DataFrame({"id": selection.ids}).join(
        tokens, on="id", how="left", maintain_order="left"
    )
    input_ids = _arrays(frame["input_ids"])
    labels = _arrays(frame["labels"])
    n_tokens_N = np.array([int((row[1:] != IGNORED).sum()) for row in labels], dtype=np.int64)
    if (n_tokens_N == 0).any():
        raise UserError(
            f"{dataset / 'dataset.parquet'}: row {selection.ids[int(np.argmin(n_tokens_N))]} "
            "supervises no token; leave it out of the subset"
        )
    lengths_N = np.array([len(row) for row in input_ids], dtype=np.int64)
    return TrainingRows(selection, input_ids, labels, lengths_N, n_tokens_N)


def make_plan(selection: Selection, params: TrainParams) -> BatchPlan:
    """Return the run's batches.

    Raises:
        UserError: batches that cannot be made, or no step at all.
    """
    if params.batches == "auto":
        raise UserError("train.batches must be stratified or random once a strategy is known")
    plan = batch_plan(
        selection.clusters_N,
        selection.weights_K,
        workers=params.workers,
        global_batch_size=params.global_batch_size,
        epochs=params.epochs,
        seed=params.seed,
        batches=params.batches,
        drop_last=params.drop_last,
    )
    if not len(plan):
        raise UserError(
            f"train: {len(selection.ids)} rows fill no step of {params.global_batch_size} and "
            "train.drop_last drops the rest; lower train.global_batch_size"
        )
    return plan


def collate(
    rows: TrainingRows, positions: NDArray[np.int64], *, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return input_ids, attention_mask and labels, int64 (b, T), padded on the right."""
    shape = (len(positions), int(rows.lengths_N[positions].max()))
    ids = torch.full(shape, PAD, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORED, dtype=torch.int64)
    for i, position in enumerate(positions):
        length = rows.lengths_N[position]
        ids[i, :length] = torch.from_numpy(rows.input_ids[position])
        mask[i, :length] = 1
        labels[i, :length] = torch.from_numpy(rows.labels[position])
    return ids.to(device), mask.to(device), labels.to(device)


def _cluster_weights(
    frame: pl.DataFrame, clusters_N: NDArray[np.int64], where: Path, *, weights: str
) -> NDArray[np.float64]:
    size_K = np.bincount(clusters_N)
    if weights == "none":
        return np.ones(len(size_K))
    if weights != "cluster":
        raise UserError(f"train.weights must be cluster or none here, got {weights!r}")
    if (size_K == 0).any():
        raise UserError(
            f"{where}: cluster {int(np.argmin(size_K))} has no row, so its weight is undefined; "
            "set train.weights to none"
        )
    weight_N = frame["weight"].to_numpy()
    weight_K = weight_N[np.unique(clusters_N, return_index=True)[1]]
    if not (np.isfinite(weight_K).all() and (weight_K >= 0).all()):
        raise UserError(f"{where}: weights must be finite and 0 or more")
    odd = np.flatnonzero(weight_N != weight_K[clusters_N])
    if odd.size:
        raise UserError(
            f"{where}: rows of cluster {clusters_N[odd[0]]} differ in weight "
            f"({weight_K[clusters_N[odd[0]]]} and {weight_N[odd[0]]}); a cluster has one weight"
        )
    return weight_K


def _arrays(lists: pl.Series) -> list[NDArray[np.int32]]:
    """Return a list column as arrays that may be written to."""
    return [np.array(row, dtype=np.int32) for row in lists]
