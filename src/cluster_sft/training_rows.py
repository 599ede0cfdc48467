"""The rows that a run trains on: read, joined by id, planned into batches, padded into tensors.

Legend: N selected rows in the order of their ids, K clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster_sft.artifacts import SUBSET, SUMMARY, read_json, read_table, write_json, write_table
from cluster_sft.batching import BatchPlan, Step, batch_plan, cluster_weights
from cluster_sft.errors import UserError
from cluster_sft.heads import IGNORED

if TYPE_CHECKING:
    from cluster_sft.stage_params import TrainParams

PAD = 0  # any id does: padding is told from the mask


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
        weights: "cluster" for w_c = (n_c / N) / (s_c / S), whatever strategy chose the rows, with
            the n_c that the subset's summary states; "none" for 1.

    Raises:
        UserError: no rows, an id twice or unknown to the dataset, or a cluster of which no row is
            selected although rows are to be weighted by cluster.
    """
    frame = read_table(subset, "subset.parquet", ["id", "cluster"]).sort("id")
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
    size_K = np.array([c["size"] for c in read_json(subset / SUMMARY)["clusters"]], dtype=np.int64)
    if not frame["cluster"].is_between(0, len(size_K) - 1).fill_null(False).all():
        raise UserError(f"{where}: every row needs a cluster below {len(size_K)}")
    clusters_N = frame["cluster"].to_numpy().astype(np.int64)
    weights_K = _weights(clusters_N, size_K, where, weights=weights)
    return Selection(frame["id"].to_list(), clusters_N, weights_K)


def write_subset(folder: Path, ids: Sequence[str]) -> None:
    """Write rows that no strategy selected as a selected leaf, all in one cluster of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    frame = pl.DataFrame(
        {"id": ids, "cluster": 0, "distance": 0.0, "weight": 1.0, "rank": range(len(ids))},
        schema_overrides=SUBSET,
    )
    write_table(folder, "subset.parquet", frame)
    write_json(folder / SUMMARY, {"clusters": [{"size": len(ids)}]})


def plain_settings(
    *,
    model: str,
    epochs: int,
    learning_rate: float,
    batch_size: int,
    warmup_ratio: float,
    precision: str,
    seed: int,
) -> dict[str, Any]:
    """Return settings of `training.fit` for ordinary full fine-tuning on random batches.

    AdamW without weight decay, a linear schedule and clipping at 1, as Transformers' Trainer has
    them by default. The number of processes changes no forward pass.
    """
    return {
        "workers": None,
        "weights": "none",
        "batches": "random",
        "global_batch_size": batch_size,
        "epochs": epochs,
        "drop_last": False,
        "optimizer": "adamw",
        "learning_rate": learning_rate,
        "weight_decay": 0.0,
        "scheduler": "linear",
        "warmup_steps": None,
        "warmup_ratio": warmup_ratio,
        "loss_reduction": "sequence",
        "precision": precision,
        "max_grad_norm": 1.0,
        "lora_rank": None,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "lora_targets": [],
        "cosine_every": 0,
        "seed": seed,
        "model": model,
        "strategy": "full",
    }


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


def _weights(
    clusters_N: NDArray[np.int64], size_K: NDArray[np.int64], where: Path, *, weights: str
) -> NDArray[np.float64]:
    if weights == "none":
        return np.ones(len(size_K))
    if weights != "cluster":
        raise UserError(f"train.weights must be cluster or none here, got {weights!r}")
    try:
        return cluster_weights(size_K, np.bincount(clusters_N, minlength=len(size_K)))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _arrays(lists: pl.Series) -> list[NDArray[np.int32]]:
    """Return a list column as arrays that may be written to."""
    return [np.array(row, dtype=np.int32) for row in lists]
