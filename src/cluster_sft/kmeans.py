"""Capacity-constrained K-means: seeding, and Lloyd's iteration with optimal assignment steps.

Both halves of an iteration can only lower the inertia: the assignment is optimal for the centroids
under the capacities (`assignment.solve`), the means are optimal for the labels. Sums of clusters
follow the rows that changed label, so that an iteration reads the table once. The prices of one
assignment start the next.

Legend: N rows, H features, K clusters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster_sft import assignment, kernels
from cluster_sft.errors import UserError
from cluster_sft.passes import Table

STREAM_SHARE = 0.3  # of the rows: to read more, read the table in order, which disks do faster
LOOK_BACK = 10  # iterations over which the inertia must fall
LEAST_FALL = 0.1  # of the tolerance: the relative fall over LOOK_BACK iterations that is too little
ROUND_UP = 1 + 1e-9  # keeps bounds on distances safe from their own rounding


@dataclass(frozen=True)
class Fit:
    """Labels and the plain means of their rows.

    labels (N,) int32, centers (K, H) float64, prices (K,) float64 of the last assignment,
    cost (N, K) float64 squared distances to `centers`, inertia, n_iter assignment steps.
    """

    labels: NDArray[np.int32]
    centers: NDArray[np.float64]
    prices: NDArray[np.float64]
    cost: NDArray[np.float64]
    inertia: float
    n_iter: int


class Lloyd:
    """The state of an iteration over one table.

    Args:
        table: the rows.
        centers: (K, H) float64, where to start.
        capacity: rows a cluster may take.
        prices: (K,) float64, a guess at those of the first assignment.
    """

    def __init__(
        self,
        table: Table,
        centers: NDArray[np.float64],
        *,
        capacity: int,
        prices: NDArray[np.float64],
    ) -> None:
        n_clusters = len(centers)
        self.table = table
        self.centers = centers
        self.prices = prices
        self.capacity = np.full(n_clusters, min(capacity, table.n_rows), np.int64)
        self.norms = np.empty(table.n_rows)
        self.cost = np.empty((table.n_rows, n_clusters))
        self.labels = np.empty(table.n_rows, np.int32)
        self.sums = np.zeros((n_clusters, table.width))
        self.rows_read = table.n_rows
        self.inertias: list[float] = []
        self._price_move = 0.0
        self._travel = [np.zeros(n_clusters)]
        self._read_at = np.zeros(table.n_rows, np.int32)
        self._read_all()

    def _read_all(self) -> None:
        """Read the table for the first time: distances, and sums of the likely labels.

        The labels are those of the guessed prices; the first assignment corrects the sums where it
        differs, so that the first iteration too reads the table once.
        """
        for rows in self.table.blocks():
            self.table.square_norms(rows, self.norms)
            _check_finite(self.norms[rows], first=int(rows[0]))
            self.table.square_distances(rows, self.norms, self.centers, self.cost)
            kernels.nearest(self.cost, self.prices, rows[0], rows[-1] + 1, self.labels)
            likely = self.labels[rows]
            self.table.move_rows(rows, np.full_like(likely, -1), likely, self.sums)
        self._total = self.norms.sum()

    def step(self) -> int:
        """Assign, then move the centroids to their means; return the labels that changed."""
        labels = self._assign()
        if not np.bincount(labels, minlength=len(self.centers)).all():
            self._read(np.arange(self.table.n_rows))
            labels = self._assign()
            _fill_empty(labels, self.cost)
        changed = np.flatnonzero(labels != self.labels)
        self.table.move_rows(changed, self.labels[changed], labels[changed], self.sums)
        self.labels = labels
        counts = np.bincount(labels, minlength=len(self.centers))
        self._move_centers(self.sums / counts[:, None])
        spread = np.einsum("kh,kh->k", self.sums, self.centers).sum()
        self.inertias.append(float(self._total - spread))
        return changed.size

    def _assign(self) -> NDArray[np.int32]:
        """Return optimal labels for the present centroids, reading only rows that could matter.

        Rows whose label is certain whatever their exact distances keep their old ones. Which rows
        to read before solving is a guess; after solving it is checked, and the rows that fail are
        read and the problem solved again, so that the labels are optimal for the true distances.
        """
        self._read(self._uncertain(self.labels, slack=self._expected_price_move()))
        before = self.prices
        while True:
            labels, self.prices = assignment.solve(
                self.cost, self.capacity, self.prices, previous=self.labels, additive=True
            )
            rows = self._uncertain(labels, slack=0.0)
            if not rows.size:
                self._price_move = float(np.ptp(self.prices - before))
                return labels
            self._read(rows)

    def _expected_price_move(self) -> float:
        """Return how far prices may move: as last time, in proportion to the centroids."""
        if len(self._travel) < 3:
            return self._price_move
        moves = np.diff(self._travel[-3:], axis=0).max(axis=1)
        return self._price_move * float(moves[1] / moves[0]) if moves[0] > 0 else 0.0

    def _uncertain(self, labels: NDArray[np.int32], *, slack: float) -> NDArray[np.int64]:
        travel = np.array(self._travel)
        return self.table.uncertain(self.cost, self._read_at, travel, self.prices, slack, labels)

    def _read(self, rows: NDArray[np.int64]) -> None:
        """Measure rows against the present centroids; all rows where most are asked for."""
        if rows.size > STREAM_SHARE * self.table.n_rows:
            rows = np.arange(self.table.n_rows)
        self.rows_read += rows.size
        self.table.square_distances(rows, self.norms, self.centers, self.cost)
        self._read_at[rows] = len(self._travel) - 1

    def _move_centers(self, centers: NDArray[np.float64]) -> None:
        moved = np.sqrt(((centers - self.centers) ** 2).sum(axis=1)) * ROUND_UP
        self._travel.append(self._travel[-1] + moved)
        self.centers = centers

    def run(
        self, *, max_iter: int, tolerance: float, report: Callable[[str], None] | None = None
    ) -> Fit:
        """Iterate until at most `tolerance` x N labels change; measure against the last means.

        Also stop where labels keep changing to no effect, see `_has_stalled`. `report` is told
        after each iteration how many labels it changed.
        """
        n_iter = 1
        self.step()
        while n_iter < max_iter:
            n_iter += 1
            changed = self.step()
            if report:
                report(f"iteration {n_iter}, {changed / self.table.n_rows:.2%} of labels changed")
            if changed <= tolerance * self.table.n_rows or self._has_stalled(tolerance):
                break
        self._move_centers(self.centers.astype(np.float32).astype(np.float64))
        self._read(np.arange(self.table.n_rows))
        own = self.cost[np.arange(self.table.n_rows), self.labels]
        return Fit(self.labels, self.centers, self.prices, self.cost, float(own.sum()), n_iter)

    def _has_stalled(self, tolerance: float) -> bool:
        """Return whether the last iterations together hardly lowered the inertia.

        Where clusters split a part that is as wide in many directions, all splits are nearly as
        good, and Lloyd's iteration turns from one to the next as a power iteration without a gap
        does: labels change for hundreds of iterations, and the inertia falls in its sixth digit.
        """
        if len(self.inertias) <= LOOK_BACK:
            return False
        fall = self.inertias[-1 - LOOK_BACK] - self.inertias[-1]
        return fall < LEAST_FALL * tolerance * self.inertias[-1]


def seed_centers(table: Table, *, k: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return K rows as float64, drawn by greedy k-means++.

    Arthur and Vassilvitskii, "k-means++: the advantages of careful seeding", SODA 2007: each next
    row is drawn in proportion to its squared distance to the rows chosen so far; the best of
    2 + log K draws is kept. When all rows coincide with chosen ones, the lowest row not yet chosen
    is taken.
    """
    every = np.arange(table.n_rows)
    norms = np.empty(table.n_rows)
    table.square_norms(every, norms)
    _check_finite(norms, first=0)
    chosen = [int(rng.integers(table.n_rows))]
    nearest = np.empty((table.n_rows, 1))
    table.square_distances(every, norms, table.gather(np.array(chosen)).astype(np.float64), nearest)
    nearest = nearest[:, 0]
    n_draws = 2 + int(math.log(k))
    cost = np.empty((table.n_rows, n_draws))
    while len(chosen) < k:
        nearest[chosen] = 0.0  # rounding may leave a trace
        ladder = np.cumsum(nearest)
        if ladder[-1] <= 0:
            chosen.append(int(np.setdiff1d(every, chosen)[0]))
            continue
        drawn = np.searchsorted(ladder, rng.random(n_draws) * ladder[-1], side="right")
        drawn = np.minimum(drawn, np.flatnonzero(nearest)[-1])
        table.square_distances(every, norms, table.gather(drawn).astype(np.float64), cost)
        np.minimum(cost, nearest[:, None], out=cost)
        best = int(cost.sum(axis=0).argmin())
        chosen.append(int(drawn[best]))
        nearest = cost[:, best].copy()
    return table.gather(np.array(chosen)).astype(np.float64)


def _fill_empty(labels: NDArray[np.int32], cost: NDArray[np.float64]) -> None:
    """Give each empty cluster the row farthest from its centroid in a cluster of two or more."""
    counts = np.bincount(labels, minlength=cost.shape[1])
    if counts.all():
        return
    own = cost[np.arange(labels.size), labels]
    for empty in np.flatnonzero(counts == 0):
        row = int(np.where(counts[labels] > 1, own, -1.0).argmax())
        counts[labels[row]] -= 1
        counts[empty] += 1
        labels[row] = empty


def _check_finite(norms: NDArray[np.float64], *, first: int) -> None:
    if not np.isfinite(norms).all():
        row = first + int(np.flatnonzero(~np.isfinite(norms))[0])
        raise UserError(f"constrained_kmeans: x must be finite, row {row} is not; drop the row")
