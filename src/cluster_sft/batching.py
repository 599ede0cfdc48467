"""Batch plan: which rows every logical worker sees at every optimizer step.

The plan is a pure function of (clusters, weights, workers, global batch size, epochs, seed). It
does not know how many processes will play the workers, so a run can change its process count, or
resume at step s, and see the same batches. Rows are named by position in the caller's row order.

Legend: N rows, K clusters, W logical workers, B rows of a full step.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cluster_sft.errors import UserError

Batches = Literal["stratified", "random"]
Slice = tuple[NDArray[np.int64], NDArray[np.float64]]
Step = list[Slice]

_DIGIT_BITS = 30  # of a key's binary expansion, taken at a time; a cluster must have fewer rows


class BatchPlan(Sequence[Step]):
    """Steps of a whole training run, computed one epoch at a time.

    A step is a list of W pairs (positions int64 (b,), weights float64 (b,)). Every row appears once
    an epoch, unless `drop_last` drops an epoch's short last step.
    """

    def __init__(
        self,
        clusters: NDArray[np.int64],
        weights: NDArray[np.float64],
        *,
        workers: int,
        global_batch_size: int,
        epochs: int,
        seed: int,
        batches: Batches,
        drop_last: bool,
    ) -> None:
        self.workers = workers
        self.global_batch_size = global_batch_size
        self.epochs = epochs
        whole, rest = divmod(len(clusters), global_batch_size)
        self.steps_per_epoch = whole if drop_last or rest == 0 else whole + 1
        self._clusters = clusters
        self._weights = weights
        self._seed = seed
        self._batches = batches
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return self.steps_per_epoch * self.epochs

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> list[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | list[Step]:
        """Return one step, or a list of steps for a slice; IndexError outside the run."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        step = range(len(self))[index]
        epoch, offset = divmod(step, self.steps_per_epoch)
        start = offset * self.global_batch_size
        rows = self._epoch_order(epoch)[start : start + self.global_batch_size]
        if self._batches == "stratified":
            rows = rows[np.argsort(self._clusters[rows], kind="stable")]
        return [(part, self._row_weights(part)) for part in np.array_split(rows, self.workers)]

    def epoch_of(self, step: int) -> int:
        """Return the 0-based epoch that a step belongs to."""
        return step // self.steps_per_epoch

    def _row_weights(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return self._weights[self._clusters[rows]]

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            rng = np.random.default_rng([self._seed, epoch])
            if self._batches == "stratified":
                order = _stratified_order(self._clusters, len(self._weights), rng)
            else:
                order = rng.permutation(len(self._clusters)).astype(np.int64)
            self._order = (epoch, order)
        return self._order[1]


def batch_plan(
    clusters: ArrayLike,
    weights: ArrayLike,
    *,
    workers: int,
    global_batch_size: int,
    epochs: int,
    seed: int,
    batches: Batches = "stratified",
    drop_last: bool = False,
) -> BatchPlan:
    """Plan every step of a training run (CluSTER's stratified batches, or plain random ones).

    stratified: row j of cluster c, in an order drawn from (seed, epoch), has the key
    (j + u_c) / s_c with u_c = (pi(c) + 1/2) / K, s_c the rows of cluster c and pi a permutation of
    the clusters drawn from (seed, epoch). Rows sorted by key are cut into steps of B, so that every
    step holds s_c B / N rows of cluster c up to rounding. Inside a step rows are sorted by cluster
    and cut into W contiguous slices: with K = W every worker has its own cluster.
    random: a permutation drawn from (seed, epoch), cut into steps and slices.

    Args:
        clusters: (N,) int, the cluster of every row, in range(K).
        weights: (K,) float, the loss weight of every cluster's rows.
        workers: W, logical data-parallel workers.
        global_batch_size: B, a multiple of W; every worker has B / W rows of a full step.
        epochs: passes over the rows.
        seed: of the orders; together with the epoch's number it decides them.
        batches: "stratified" or "random".
        drop_last: drop the short last step of every epoch.

    Returns:
        A sequence of steps; a step is a list of W pairs (positions int64, weights float64).

    Raises:
        ValueError: W, B, epochs or a cluster id out of range, W not dividing B, or B < K for
            stratified batches.
    """
    cluster_N, weight_K = _checked_arrays(clusters, weights)
    _check_sizes(workers, global_batch_size, epochs, seed)
    if batches not in ("stratified", "random"):
        raise UserError(f"batches must be stratified or random, got {batches!r}")
    if batches == "stratified":
        _check_strata(len(weight_K), global_batch_size)
    return BatchPlan(
        cluster_N,
        weight_K,
        workers=workers,
        global_batch_size=global_batch_size,
        epochs=epochs,
        seed=seed,
        batches=batches,
        drop_last=drop_last,
    )


def cluster_weights(sizes: ArrayLike, selected: ArrayLike) -> NDArray[np.float64]:
    """Return the loss weight of every cluster's rows, w_c = (n_c / N) / (s_c / S).

    Balanced rows (every s_c equal) give CluSTER's n_c K / N; all rows give 1. The mean of the
    weights over the selected rows is 1.

    Args:
        sizes: (K,) int, n_c, rows of every cluster before any selection.
        selected: (K,) int, s_c, rows of every cluster that are trained on.

    Returns:
        (K,) float64; 0 for a cluster that is empty before selection.

    Raises:
        ValueError: shapes differ, a count is negative, or s_c = 0 for a cluster that has rows.
    """
    size_K = np.asarray(sizes, dtype=np.int64)
    selected_K = np.asarray(selected, dtype=np.int64)
    if size_K.ndim != 1 or size_K.shape != selected_K.shape:
        raise UserError(
            f"cluster weights need one size and one count per cluster, got shapes {size_K.shape} "
            f"and {selected_K.shape}"
        )
    if (size_K < 0).any() or (selected_K < 0).any():
        raise UserError("cluster weights need counts of 0 or more, got a negative one")
    lost = np.flatnonzero((selected_K == 0) & (size_K > 0))
    if lost.size:
        raise UserError(
            f"no row of cluster {lost[0]} is selected, but {size_K[lost[0]]} of its rows count in "
            "the full data: its weight is undefined; select at least one row per cluster or set "
            "weights: none"
        )
    numerator = size_K * float(selected_K.sum())
    denominator = np.maximum(selected_K, 1) * float(max(size_K.sum(), 1))
    return numerator / denominator


def _stratified_order(
    cluster_N: NDArray[np.int64], n_clusters: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    phase_K = rng.permutation(n_clusters)
    shuffled = rng.permutation(len(cluster_N))
    grouped = shuffled[np.argsort(cluster_N[shuffled], kind="stable")]
    size_K = np.bincount(cluster_N, minlength=n_clusters)
    first_K = np.cumsum(size_K) - size_K
    rank_N = np.empty(len(cluster_N), dtype=np.int64)
    rank_N[grouped] = np.arange(len(cluster_N)) - first_K[cluster_N[grouped]]
    # Keys times 2K are rationals with integer terms: (j + u_c) / s_c * 2K = (2Kj + 2 pi + 1) / s_c.
    numerator_N = 2 * n_clusters * rank_N + 2 * phase_K[cluster_N] + 1
    return _argsort_rationals(numerator_N, size_K[cluster_N])


def _argsort_rationals(
    numerator_N: NDArray[np.int64], denominator_N: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Sort non-negative rationals exactly and stably.

    Two different fractions with denominators below 2^30 differ by more than 2^-60, so the whole
    part and 60 binary digits order them, and equal ones agree in both. Floats would not do: two
    different keys can round to the same float.
    """
    assert denominator_N.max(initial=1) < 1 << _DIGIT_BITS
    whole, rest = np.divmod(numerator_N, denominator_N)
    high, rest = np.divmod(rest << _DIGIT_BITS, denominator_N)
    low = (rest << _DIGIT_BITS) // denominator_N
    return np.lexsort((high << _DIGIT_BITS | low, whole)).astype(np.int64)


def _checked_arrays(
    clusters: ArrayLike, weights: ArrayLike
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    cluster_N = np.asarray(clusters)
    weight_K = np.asarray(weights, dtype=np.float64)
    if cluster_N.ndim != 1 or (cluster_N.size and cluster_N.dtype.kind not in "iu"):
        raise UserError(
            f"clusters must be a 1-D integer array, got {cluster_N.dtype} {cluster_N.shape}"
        )
    if weight_K.ndim != 1 or not np.isfinite(weight_K).all():
        raise UserError(f"weights must be a 1-D array of finite numbers, got {weight_K.tolist()}")
    if cluster_N.size and not (cluster_N.min() >= 0 and cluster_N.max() < len(weight_K)):
        raise UserError(
            f"clusters must lie in 0..{len(weight_K) - 1}, one weight each, got "
            f"{cluster_N.min()}..{cluster_N.max()}"
        )
    return cluster_N.astype(np.int64), weight_K.copy()


def _check_sizes(workers: int, global_batch_size: int, epochs: int, seed: int) -> None:
    if workers < 1 or global_batch_size < 1 or epochs < 0 or seed < 0:
        raise UserError(
            "workers and global_batch_size must be at least 1, epochs and seed at least 0, got "
            f"{workers}, {global_batch_size}, {epochs} and {seed}"
        )
    if global_batch_size % workers:
        raise UserError(
            f"global_batch_size must be a multiple of workers, got {global_batch_size} "
            f"and {workers}"
        )


def _check_strata(n_clusters: int, global_batch_size: int) -> None:
    if global_batch_size < n_clusters:
        raise UserError(
            f"global_batch_size must be at least the number of clusters for stratified batches, "
            f"got {global_batch_size} < {n_clusters}"
        )
    if n_clusters and global_batch_size % n_clusters:
        warnings.warn(
            f"{n_clusters} clusters do not divide a global batch of {global_batch_size}: a step "
            "holds one row more of some clusters than of others, a bias that averages to zero over "
            "the epoch; choose a multiple to remove it",
            stacklevel=3,
        )
