"""Compiled passes over the rows of a table of features: distances to centroids, sums of rows.

Each kernel works on the rows (or columns) it is given, so that threads can share a pass. The result
of a row does not depend on the other rows of the call, and sums add rows in the order given: the
same bits come out for any number of threads and any block size.

Products are accumulated in float64. At few centroids a pass still waits for memory, and no data
need centring: float32 values resolve squared distances to 2^-48 of the squared norm, float64 to
2^-53. float16 is read as uint16 and widened in registers, since Numba has no float16 on the CPU.

All compiled code of this module calls only functions of this file: Numba's cache does not notice a
change in another.

Legend: N rows, H features, K clusters, P = K rounded up to a multiple of TILE.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Labels = NDArray[np.int32]

TILE = 4  # rows x centroids held in registers at a time
CHUNK = 32  # rows that share a panel of centroids
PANEL_VALUES = 65536  # centroid values of a panel: 512 KiB, which stay in the second-level cache
SUMMATION = {
    "reassoc",
    "contract",
    "nsz",
}  # lets a sum run in vector lanes; NaN and inf still count


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with Numba at the first call, without the interpreter lock, cached where possible."""
    try:
        return njit(nogil=True, cache=True, error_model="numpy", fastmath=SUMMATION)(function)
    except RuntimeError:  # neither the source's nor the user's cache folder can be written
        return njit(nogil=True, error_model="numpy", fastmath=SUMMATION)(function)


def _widen(_context: Any, value: Any) -> tuple[Any, Callable[..., Any]]:
    """Return a stored value as float64; uint16 holds the bits of a float16."""

    def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        number = arguments[0]
        if value == types.uint16:
            number = builder.bitcast(number, ir.HalfType())
        return number if value == types.float64 else builder.fpext(number, ir.DoubleType())

    return types.float64(value), generate


_widened: Any = intrinsic(_widen)


@compiled
def square_norms(x: NDArray[Any], rows: Integers, out: Floats) -> None:
    """Write out[row] = sum of x[row]^2 for each of `rows`."""
    for at in range(rows.size):
        row = x[rows[at]]
        total = 0.0
        for j in range(row.size):
            value = _widened(row[j])
            total += value * value
        out[rows[at]] = total


_madvise: Any = types.ExternalFunction(
    "madvise", types.int32(types.uintp, types.uintp, types.int32)
)
WILL_NEED = 3  # MADV_WILLNEED, on Linux and macOS alike


@compiled
def prefetch(x: NDArray[Any], rows: Integers, page: int) -> None:
    """Ask the system to read the pages of `rows` (ascending) of a mapped x, without waiting.

    Scattered rows then arrive in parallel; page faults alone fetch them one after the other, which
    takes 16 times as long.
    """
    start, end = 0, 0
    for at in range(rows.size + 1):
        first, last = end, end
        if at < rows.size:
            address = x.ctypes.data + rows[at] * x.strides[0]
            first = address // page * page
            last = address + x.shape[1] * x.itemsize
        if at == rows.size or first > end:
            if end > start:
                _madvise(start, end - start, WILL_NEED)
            start = first
        end = last


@compiled
def _tile_products(
    x0: NDArray[Any],
    x1: NDArray[Any],
    x2: NDArray[Any],
    x3: NDArray[Any],
    c0: Floats,
    c1: Floats,
    c2: Floats,
    c3: Floats,
    out: Floats,
) -> None:
    """Add the products of 4 rows with 4 centroids to out (4, 4)."""
    a00 = a01 = a02 = a03 = 0.0
    a10 = a11 = a12 = a13 = 0.0
    a20 = a21 = a22 = a23 = 0.0
    a30 = a31 = a32 = a33 = 0.0
    for j in range(c0.size):
        y0, y1, y2, y3 = c0[j], c1[j], c2[j], c3[j]
        value = _widened(x0[j])
        a00 += value * y0
        a01 += value * y1
        a02 += value * y2
        a03 += value * y3
        value = _widened(x1[j])
        a10 += value * y0
        a11 += value * y1
        a12 += value * y2
        a13 += value * y3
        value = _widened(x2[j])
        a20 += value * y0
        a21 += value * y1
        a22 += value * y2
        a23 += value * y3
        value = _widened(x3[j])
        a30 += value * y0
        a31 += value * y1
        a32 += value * y2
        a33 += value * y3
    out[0, 0] += a00
    out[0, 1] += a01
    out[0, 2] += a02
    out[0, 3] += a03
    out[1, 0] += a10
    out[1, 1] += a11
    out[1, 2] += a12
    out[1, 3] += a13
    out[2, 0] += a20
    out[2, 1] += a21
    out[2, 2] += a22
    out[2, 3] += a23
    out[3, 0] += a30
    out[3, 1] += a31
    out[3, 2] += a32
    out[3, 3] += a33


@compiled
def square_distances(
    x: NDArray[Any],
    rows: Integers,
    norms: Floats,
    centers: Floats,
    center_norms: Floats,
    out: Floats,
) -> None:
    """Write out[row, k] = |x[row] - centers[k]|^2 for each of `rows` and k < K.

    Args:
        x: (N, H) uint16 (the bits of float16), float32 or float64.
        rows: (R,) int64.
        norms: (N,) float64, squared norms of x.
        centers: (P, H) float64, rows K and up are padding.
        center_norms: (K,) float64, squared.
        out: (N, K) float64.
    """
    n_clusters = center_norms.size
    width = centers.shape[1]
    panel = max(512, PANEL_VALUES // centers.shape[0] // 64 * 64)
    products = np.empty((CHUNK, centers.shape[0]))
    last = rows.size - 1
    for chunk in range(0, rows.size, CHUNK):
        size = min(CHUNK, rows.size - chunk)
        products[:] = 0.0
        for low in range(0, width, panel):
            high = min(low + panel, width)
            for k in range(0, centers.shape[0], TILE):
                for t in range(0, size, TILE):
                    at = chunk + t
                    _tile_products(
                        x[rows[at], low:high],
                        x[rows[min(at + 1, last)], low:high],
                        x[rows[min(at + 2, last)], low:high],
                        x[rows[min(at + 3, last)], low:high],
                        centers[k, low:high],
                        centers[k + 1, low:high],
                        centers[k + 2, low:high],
                        centers[k + 3, low:high],
                        products[t : t + TILE, k : k + TILE],
                    )
        for t in range(size):
            row = rows[chunk + t]
            for k in range(n_clusters):
                out[row, k] = max(norms[row] + center_norms[k] - 2.0 * products[t, k], 0.0)


@compiled
def move_rows(
    x: NDArray[Any],
    rows: Integers,
    source: Labels,
    target: Labels,
    low: int,
    high: int,
    sums: Floats,
) -> None:
    """Take each row from the sum of its source and add it to that of its target, in order.

    Args:
        x: (N, H), see `square_distances`.
        rows: (R,) int64.
        source: (R,) int32, -1 for none.
        target: (R,) int32.
        low: first column to work on.
        high: last column, plus 1.
        sums: (K, H) float64, updated.
    """
    for at in range(rows.size):
        row = x[rows[at], low:high]
        if source[at] >= 0:
            total = sums[source[at], low:high]
            for j in range(row.size):
                total[j] -= _widened(row[j])
        total = sums[target[at], low:high]
        for j in range(row.size):
            total[j] += _widened(row[j])


@compiled
def nearest(cost: Floats, prices: Floats, low: int, high: int, out: Labels) -> None:
    """Write out[row] = the lowest k of least cost + price, for rows low to high."""
    for row in range(low, high):
        best, at = cost[row, 0] + prices[0], 0
        for k in range(1, prices.size):
            value = cost[row, k] + prices[k]
            if value < best:
                best, at = value, k
        out[row] = at


@compiled
def uncertain(
    cost: Floats,
    read_at: Labels,
    travel: Floats,
    prices: Floats,
    slack: float,
    labels: Labels,
    low: int,
    high: int,
    out: NDArray[np.bool_],
) -> None:
    """Write out[row] = whether the label may be wrong after the centroids moved, low <= row < high.

    A centroid that travelled by t since the row was read is at a distance within t of the old one.
    The label is certain if its cost + price is least for all distances in these intervals: then
    labels and prices satisfy the optimality conditions for the true costs. It is the bound of
    Hamerly ("Making k-means even faster", SDM 2010) with prices.

    Args:
        cost: (N, K) float64, squared distances when the row was read.
        read_at: (N,) int32, the iteration at which it was.
        travel: (T, K) float64, path lengths of the centroids up to each iteration; the last is now.
        prices: (K,) float64.
        slack: margin asked for on top.
        labels: (N,) int32.
        low: first row to work on.
        high: last row, plus 1.
        out: (N,) bool.
    """
    now = travel.shape[0] - 1
    for row in range(low, high):
        out[row] = False
        then = read_at[row]
        if then == now:
            continue
        own = labels[row]
        most = np.sqrt(cost[row, own]) + travel[now, own] - travel[then, own]
        most = most * most + prices[own] + slack
        for k in range(prices.size):
            least = max(np.sqrt(cost[row, k]) - (travel[now, k] - travel[then, k]), 0.0)
            if k != own and least * least + prices[k] < most:
                out[row] = True
