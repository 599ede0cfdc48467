"""Which rows the steps of an epoch would hold, cut at random or stratified by cluster."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster_sft.batching import Batches, batch_plan

BATCH_ROWS = 64
MIN_STEPS = 4


def nominal_batch(rows: int, k: int) -> int:
    """Return the rows of a step by which batches are judged, a multiple of k.

    The least that is not below 64, or less, down to k, where `rows` then would not fill 4 steps.
    Training may take another size: that a stratified step has less variance does not depend on it.
    """
    return k * max(1, min(-(-BATCH_ROWS // k), rows // (MIN_STEPS * k)))


def epoch_steps(
    label_S: NDArray[np.integer], k: int, *, batch: int, seed: int, batches: Batches
) -> list[NDArray[np.int64]] | None:
    """Return the row positions of every step of one epoch.

    None for stratified steps that cannot hold a row of every cluster.

    Args:
        label_S: the cluster of every row, in range(k).
        k: number of clusters.
        batch: rows of a full step.
        seed: of the order.
        batches: "random" or "stratified".
    """
    if batches == "stratified" and batch < k:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of K not dividing B; the training itself says it
        plan = batch_plan(
            label_S,
            np.ones(k),
            workers=1,
            global_batch_size=batch,
            epochs=1,
            seed=seed,
            batches=batches,
        )
    return [rows for [(rows, _)] in plan]


def step_counts(
    steps: Sequence[NDArray[np.int64]], label_S: NDArray[np.integer], k: int
) -> NDArray[np.int64]:
    """Return the rows of every cluster in every step, (steps, k)."""
    return np.array([np.bincount(label_S[rows], minlength=k) for rows in steps], dtype=np.int64)


def describe_counts(counts: NDArray[np.int64]) -> dict[str, float]:
    """Return how far steps are from the epoch's shares of the clusters.

    `deviation` is the mean over steps of the total variation distance between the step's shares
    and the epoch's; `absent` the share of (step, cluster) pairs without a row.
    """
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    epoch = counts.sum(axis=0) / max(int(counts.sum()), 1)
    return {
        "steps": len(counts),
        "deviation": float(np.abs(shares - epoch).sum(axis=1).mean() / 2),
        "absent": float((counts == 0).mean()),
    }
