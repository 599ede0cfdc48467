"""Optimal assignment of rows to clusters under capacities, for costs of any scale.

The solver works on integers. Costs are first reduced by their row's minimum, which changes no
optimum, and scaled by a power of two so that the largest excess fills the integers that cannot
overflow. Where a few huge costs would swallow the digits of the rest, they are clamped to twice the
objective reached, which no optimal row can pay, and the problem is solved again.

Legend: N rows, K clusters.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cluster_sft import transport
from cluster_sft.errors import UserError

ACCURACY = 1e-11  # of the objective: what rounding to integers may add
MAX_EXPONENT = 1000  # of the scale, which must stay finite
TINY = 2.0**-500


def assign(cost: ArrayLike, capacity: ArrayLike) -> NDArray[np.int32]:
    """Return the labels of least total cost with at most `capacity` rows a cluster.

    Args:
        cost: (N, K) float, finite.
        capacity: rows a cluster may take: one int for all, or (K,) int.

    Returns:
        labels (N,) int32; the sum of cost[row, labels[row]] is optimal to float64 accuracy.

    Raises:
        UserError: a wrong shape, a cost that is not finite, a negative capacity, or N above the
            total capacity.
    """
    table = _checked_cost(cost)
    limits = _checked_capacity(capacity, n_rows=table.shape[0], n_clusters=table.shape[1])
    if not len(table):
        return np.empty(0, np.int32)
    largest = np.abs(table).max()
    if largest > 0.5 * np.finfo(float).max:
        table = table * 0.25  # differences of the largest floats overflow; the optimum is the same
    elif 0 < largest < TINY:
        table = table / TINY  # a power of two, and exact: tiny costs become integers as others do
    return solve(table, limits)[0]


def solve(
    cost: NDArray[np.float64],
    capacity: NDArray[np.int64],
    prices: NDArray[np.float64] | None = None,
    *,
    previous: NDArray[np.int32] | None = None,
    additive: bool = False,
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Return optimal labels (N,) and prices (K,); validation assumed.

    The prices certify the labels: each row sits where cost + price is least, and a price above 0
    means a full cluster. Any prices are a valid start; those of a similar problem are a fast one.

    Args:
        cost: (N, K), C-contiguous.
        capacity: (K,), at most N each and at least N together.
        prices: (K,) where to start; all 0 without.
        previous: (N,) labels that rows keep where others are no better.
        additive: whether the row minima belong to the objective to which accuracy is relative
            (costs that are not negative, such as squared distances).
    """
    n_rows, n_clusters = cost.shape
    base = np.empty(n_rows)
    clamp = float(transport.row_minima(cost, base))
    floor = float(base.sum()) if additive else 0.0
    labels = np.empty(n_rows, np.int32)
    kept = np.full(n_rows, -1, np.int32) if previous is None else previous
    start = np.zeros(n_clusters) if prices is None else prices
    while True:
        scale = _scale(clamp, n_clusters)
        whole = _whole_prices(start, clamp, scale, n_clusters)
        solved = transport.solve(cost, base, clamp, scale, capacity, whole, labels, kept, 0)
        assert solved >= 0, "the capacities admit no assignment"
        excess = float(transport.excess_of(cost, base, labels))
        start = whole / scale
        fine = 2 * n_rows / scale <= ACCURACY * (excess + floor)
        if fine or excess == 0 or 4 * excess >= clamp:
            return labels, start
        clamp = 2 * excess


def _scale(clamp: float, n_clusters: int) -> float:
    """Return the power of two by which a cost of `clamp` becomes an integer without overflow."""
    bits = 58 - math.ceil(math.log2(n_clusters + 2))
    exponent = math.frexp(clamp)[1] if clamp > 0 else 0
    return math.ldexp(1.0, min(bits - exponent, MAX_EXPONENT))


def _whole_prices(
    prices: NDArray[np.float64], clamp: float, scale: float, n_clusters: int
) -> NDArray[np.int64]:
    """Return prices as integers, not negative.

    An empty cluster may end with a negative price, which is no valid start: the pseudo-flow of the
    start would not be optimal for it. Raised to 0 the prices stay optimal.
    """
    return np.rint(np.clip(prices, 0.0, clamp * n_clusters) * scale).astype(np.int64)


def _checked_cost(cost: ArrayLike) -> NDArray[np.float64]:
    table = np.asarray(cost)
    if table.ndim != 2 or table.dtype.kind not in "fiub":
        raise UserError(
            f"assign: cost must be a table (N, K) of numbers, got shape {table.shape} "
            f"of {table.dtype}"
        )
    table = np.ascontiguousarray(table, dtype=np.float64)
    if not np.isfinite(table).all():
        row, cluster = np.argwhere(~np.isfinite(table))[0]
        raise UserError(
            f"assign: cost must be finite, got {table[row, cluster]} at [{row}, {cluster}]"
        )
    return table


def _checked_capacity(capacity: ArrayLike, *, n_rows: int, n_clusters: int) -> NDArray[np.int64]:
    limits = np.asarray(capacity)
    if limits.dtype.kind not in "iu" or limits.shape not in ((), (n_clusters,)):
        raise UserError(
            f"assign: capacity must be an int or K = {n_clusters} ints, got shape {limits.shape} "
            f"of {limits.dtype}"
        )
    if (limits < 0).any():
        raise UserError(f"assign: capacity must not be negative, got {limits.min()}")
    limits = np.minimum(limits.astype(np.uint64), n_rows).astype(np.int64)
    limits = np.broadcast_to(limits, n_clusters).copy()
    if limits.sum() < n_rows:
        raise UserError(
            f"assign: {n_rows} rows exceed the total capacity {limits.sum()} of {n_clusters} "
            "clusters; raise the capacity"
        )
    return limits
