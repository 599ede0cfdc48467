"""Compiled solver: rows to clusters at least total cost, no cluster above its capacity.

It is a min-cost flow rows -> clusters -> sink, solved by successive shortest augmenting paths. A
residual path enters a row from its present cluster i and leaves to another j at cost
cost[row, j] - cost[row, i]; rows carry no other residual arc, so the residual graph contracts to
K + 1 nodes (the clusters and the sink) with arc i -> j the cheapest such row. Costs are integers,
hence no rounding in the argument, and the prices that come out certify the optimum: every row sits
where cost + price is least, and only full clusters have a positive price. The prices are a valid
start for the next, similar problem.

All of it stands in one file: Numba's cache does not notice a change in another.

Legend: N rows, K clusters, R room of one heap. Heap (i, j) orders the rows of cluster i by the
cost of moving to j. It holds only the cheapest ones; `bound` is the least key that was left out.
Entries of rows that left cluster i are stale and dropped when they reach the top.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

INFINITE = np.int64(1) << np.int64(61)
# Typed, since Numba compiles a function anew for every literal it is called with.
NONE, FIRST = np.int64(-1), np.int64(0)

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Labels = NDArray[np.int32]
Integer = int | np.int64


class Problem(NamedTuple):
    """The integer cost of (row, j) is round(min(cost - base, clamp) * scale), on the fly.

    Clusters other than the row's previous one cost 1 more, which is below the rounding: of equally
    good labels a row keeps its own, or copies of a row change places after all else converged.
    """

    cost: Floats  # (N, K)
    base: Floats  # (N,)
    clamp: float
    scale: float
    label: Labels  # (N,)
    previous: Labels  # (N,), -1 for none


class Heaps(NamedTuple):
    """The heaps of every pair of clusters, and the cheapest row of each."""

    key: Integers  # (K, K, R)
    row: Integers  # (K, K, R)
    size: Integers  # (K, K)
    bound: Integers  # (K, K)
    top_key: Integers  # (K, K)
    top_row: Integers  # (K, K)
    built: NDArray[np.bool_]  # (K,)
    keep: Integer  # entries of a heap when it is filled


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with Numba at the first call, without the interpreter lock, cached where possible.

    The cache lies beside the source or in the user's cache folder; where neither can be written,
    Numba refuses `cache=True` outright, and the function is compiled anew by every process.
    """
    try:
        return njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:
        return njit(nogil=True, error_model="numpy")(function)


@compiled
def row_minima(cost: Floats, out: Floats) -> float:
    """Write the least cost of each row; return the largest excess of any cost over its row's."""
    spread = 0.0
    for row in range(cost.shape[0]):
        low = cost[row, 0]
        high = low
        for j in range(1, cost.shape[1]):
            low = min(low, cost[row, j])
            high = max(high, cost[row, j])
        out[row] = low
        spread = max(spread, high - low)
    return spread


@compiled
def excess_of(cost: Floats, base: Floats, label: Labels) -> float:
    """Return the sum over rows of the cost of the label above the row's least cost."""
    total = 0.0
    for row in range(label.size):
        total += cost[row, label[row]] - base[row]
    return total


@compiled
def _cost(problem: Problem, row: int, j: int) -> Integer:
    excess = min(problem.cost[row, j] - problem.base[row], problem.clamp)
    return np.int64(excess * problem.scale + 0.5) + np.int64(problem.previous[row] != j)


@compiled
def _gain(problem: Problem, row: int, i: int, j: int) -> Integer:
    return _cost(problem, row, j) - _cost(problem, row, i)


@compiled
def _less(key_a: int, row_a: int, key_b: int, row_b: int) -> bool:
    return key_a < key_b or (key_a == key_b and row_a < row_b)


@compiled
def _sift_down(key: Integers, row: Integers, size: int, at: int) -> None:
    k, r = key[at], row[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and _less(key[child + 1], row[child + 1], key[child], row[child]):
            child += 1
        if not _less(key[child], row[child], k, r):
            break
        key[at], row[at] = key[child], row[child]
        at = child
    key[at], row[at] = k, r


@compiled
def _sift_up(key: Integers, row: Integers, at: int) -> None:
    k, r = key[at], row[at]
    while at > 0:
        parent = (at - 1) // 2
        if not _less(k, r, key[parent], row[parent]):
            break
        key[at], row[at] = key[parent], row[parent]
        at = parent
    key[at], row[at] = k, r


@compiled
def _members(label: Labels, i: int) -> Integers:
    """Return the rows of cluster i, ascending."""
    out = np.empty(label.size, np.int64)
    size = 0
    for row in range(label.size):
        out[size] = row
        size += label[row] == i
    return out[:size]


@compiled
def _select(values: Integers, rank: int) -> int:
    """Return the value of the given rank, 0 the least; reorders `values` (Hoare's selection).

    Replaces np.partition, whose compilation alone takes 5 seconds.
    """
    low, high = 0, values.size - 1
    while low < high:
        pivot = values[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while values[i] < pivot:
                i += 1
            while values[j] > pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if rank <= j:
            high = j
        elif rank >= i:
            low = i
        else:
            break
    return values[rank]


@compiled
def _keep_cheapest(key: Integers, row: Integers, keep: Integer) -> Integer:
    """Move the `keep` cheapest entries to the front, in order; return the least key left out."""
    limit = _select(key.copy(), keep)
    below = 0
    for at in range(key.size):
        below += key[at] < limit
    ties = keep - below
    size = 0
    for at in range(key.size):
        if key[at] < limit or (key[at] == limit and ties > 0):
            ties -= key[at] == limit
            key[size], row[size] = key[at], row[at]
            size += 1
    return limit


@compiled
def _fill(problem: Problem, heaps: Heaps, members: Integers, i: int, j: int) -> None:
    """Refill heap (i, j) with the cheapest rows of cluster i."""
    key, row = heaps.key[i, j], heaps.row[i, j]
    keep = heaps.keep
    limit = INFINITE
    size = np.int64(0)
    for m in range(members.size):
        gain = _gain(problem, members[m], i, j)
        if gain < limit:
            key[size], row[size] = gain, members[m]
            size += 1
            if size == key.size:
                limit = _keep_cheapest(key, row, keep)
                size = keep
    if size > keep:
        limit = _keep_cheapest(key[:size], row[:size], keep)
        size = keep
    for at in range(size // 2 - 1, -1, -1):
        _sift_down(key, row, size, at)
    heaps.size[i, j] = size
    heaps.bound[i, j] = limit


@compiled
def _refresh(problem: Problem, heaps: Heaps, i: int, j: int) -> None:
    """Bring the cheapest row of heap (i, j) to `top_key` and `top_row`."""
    key, row = heaps.key[i, j], heaps.row[i, j]
    size = heaps.size[i, j]
    while size > 0 and problem.label[row[0]] != i:
        size -= 1
        key[0], row[0] = key[size], row[size]
        if size > 0:
            _sift_down(key, row, size, FIRST)
    heaps.size[i, j] = size
    bound = heaps.bound[i, j]
    if bound < INFINITE and (size == 0 or key[0] > bound):
        _fill(problem, heaps, _members(problem.label, i), i, j)
        size = heaps.size[i, j]
    heaps.top_key[i, j] = key[0] if size > 0 else INFINITE
    heaps.top_row[i, j] = row[0] if size > 0 else -1


@compiled
def _build(problem: Problem, heaps: Heaps, i: int) -> None:
    """Build every heap of cluster i from its present rows."""
    members = _members(problem.label, i)
    for j in range(heaps.built.size):
        if j != i:
            _fill(problem, heaps, members, i, j)
            _refresh(problem, heaps, i, j)
    heaps.built[i] = True


@compiled
def _push(problem: Problem, heaps: Heaps, row: int, i: int) -> None:
    """Enter a row that has just joined cluster i into the heaps of i."""
    if not heaps.built[i]:
        return
    for j in range(heaps.built.size):
        if j == i:
            continue
        gain = _gain(problem, row, i, j)
        if gain >= heaps.bound[i, j]:
            continue
        size = heaps.size[i, j]
        if size == heaps.key.shape[2]:
            _fill(problem, heaps, _members(problem.label, i), i, j)
            _refresh(problem, heaps, i, j)
            continue
        heaps.key[i, j, size], heaps.row[i, j, size] = gain, row
        heaps.size[i, j] = size + 1
        _sift_up(heaps.key[i, j], heaps.row[i, j], size)
        if _less(gain, row, heaps.top_key[i, j], heaps.top_row[i, j]):
            heaps.top_key[i, j], heaps.top_row[i, j] = gain, row


@compiled
def _move(problem: Problem, heaps: Heaps, i: int, j: int) -> None:
    """Move the cheapest row of cluster i to cluster j."""
    row = heaps.top_row[i, j]
    problem.label[row] = j
    for k in range(heaps.built.size):
        if k != i and heaps.top_row[i, k] == row:
            _refresh(problem, heaps, i, k)
    _push(problem, heaps, row, j)


@compiled
def _shortest_path(
    problem: Problem,
    heaps: Heaps,
    source: int,
    flow: Integers,
    excess: Integers,
    capacity: Integers,
    potential: Integers,
    dist: Integers,
    came: Integers,
) -> Integer:
    """Run Dijkstra from `source`; return the nearest node in deficit, or -1. Updates potentials."""
    n_clusters = capacity.size
    done = np.zeros(n_clusters + 1, np.bool_)
    for v in range(n_clusters + 1):
        dist[v] = INFINITE
    dist[source] = 0
    found = NONE
    while True:
        u = NONE
        for v in range(n_clusters + 1):
            if not done[v] and dist[v] < INFINITE and (u < 0 or dist[v] < dist[u]):
                u = v
        if u < 0:
            return NONE
        if excess[u] < 0:
            found = u
            break
        done[u] = True
        if u < n_clusters and not heaps.built[u]:
            _build(problem, heaps, u)
        for v in range(n_clusters + 1):
            arc = INFINITE
            if done[v]:
                continue
            if u == n_clusters:
                arc = np.int64(0) if flow[v] > 0 else INFINITE
            elif v == n_clusters:
                arc = np.int64(0) if flow[u] < capacity[u] else INFINITE
            else:
                arc = heaps.top_key[u, v]
            if arc < INFINITE and dist[u] + arc + potential[u] - potential[v] < dist[v]:
                dist[v] = dist[u] + arc + potential[u] - potential[v]
                came[v] = u
    for v in range(n_clusters + 1):
        potential[v] += min(dist[v], dist[found])
    return found


@compiled
def _augment(
    problem: Problem, heaps: Heaps, source: int, target: int, flow: Integers, came: Integers
) -> None:
    """Send one unit from `source` to `target` along the path found."""
    sink = flow.size
    v = target
    while v != source:
        u = came[v]
        if v == sink:
            flow[u] += 1
        elif u == sink:
            flow[v] -= 1
        else:
            _move(problem, heaps, u, v)
        v = u


@compiled
def _start(
    problem: Problem, capacity: Integers, price: Integers, flow: Integers, excess: Integers
) -> None:
    """Label rows by their least cost + price, the lowest cluster on ties; set the pseudo-flow."""
    n_clusters = capacity.size
    count = np.zeros(n_clusters, np.int64)
    for row in range(problem.label.size):
        best, at = _cost(problem, row, FIRST) + price[0], FIRST
        for j in range(1, n_clusters):
            value = _cost(problem, row, j) + price[j]
            if value < best:
                best, at = value, j
        problem.label[row] = at
        count[at] += 1
    excess[n_clusters] = -problem.label.size
    for j in range(n_clusters):
        flow[j] = capacity[j] if price[j] > 0 else min(count[j], capacity[j])
        excess[j] = count[j] - flow[j]
        excess[n_clusters] += flow[j]


@compiled
def _heaps(n_clusters: int, keep: Integer) -> Heaps:
    table = np.zeros((4, n_clusters, n_clusters), np.int64)
    return Heaps(
        np.empty((n_clusters, n_clusters, 2 * keep), np.int64),
        np.empty((n_clusters, n_clusters, 2 * keep), np.int64),
        table[0],
        table[1],
        table[2],
        table[3],
        np.zeros(n_clusters, np.bool_),
        keep,
    )


@compiled
def solve(
    cost: Floats,
    base: Floats,
    clamp: float,
    scale: float,
    capacity: Integers,
    price: Integers,
    label: Labels,
    previous: Labels,
    keep: Integer,
) -> Integer:
    """Write the optimal labels and prices; return the number of augmentations, or -1.

    Args:
        cost: (N, K), see `Problem`.
        base: (N,), see `Problem`.
        clamp: see `Problem`; clamp x scale must stay below INFINITE / (8 (K + 2)).
        scale: see `Problem`.
        capacity: (K,) int64, at most N each, N at most their sum (else -1).
        price: (K,) int64, not negative; the start, overwritten by the optimal prices.
        label: (N,) int32, overwritten.
        previous: (N,) int32, see `Problem`; not `label` itself.
        keep: entries of a heap when it is built; 0 chooses by the overflow.
    """
    n_clusters = capacity.size
    problem = Problem(cost, base, clamp, scale, label, previous)
    flow = np.empty(n_clusters, np.int64)
    excess = np.empty(n_clusters + 1, np.int64)
    _start(problem, capacity, price, flow, excess)
    overflow = np.int64(0)
    for v in range(n_clusters + 1):
        overflow += max(excess[v], 0)
    if keep == 0:
        most = max(256, 4194304 // (n_clusters * n_clusters))
        keep = min(max(256, overflow // n_clusters), most)
    heaps = _heaps(n_clusters, keep)
    potential = np.zeros(n_clusters + 1, np.int64)
    for j in range(n_clusters):
        potential[j] = -price[j]
    dist = np.empty(n_clusters + 1, np.int64)
    came = np.empty(n_clusters + 1, np.int64)
    augmentations = 0
    for source in range(n_clusters + 1):
        while excess[source] > 0:
            target = _shortest_path(
                problem, heaps, source, flow, excess, capacity, potential, dist, came
            )
            if target < 0:
                return -1
            _augment(problem, heaps, source, target, flow, came)
            excess[source] -= 1
            excess[target] += 1
            augmentations += 1
    for j in range(n_clusters):
        price[j] = potential[n_clusters] - potential[j]
    return augmentations
