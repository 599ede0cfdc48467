"""Assignment under capacities: against linear_sum_assignment, a slow twin, and its certificate."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from cluster_sft import transport
from cluster_sft.assignment import solve
from cluster_sft.clustering import assign

KINDS = ("uniform", "ties", "duplicates", "scales", "skewed", "equal columns", "offset", "negative")


def _cost(kind, n_rows, k, rng):
    cost = rng.random((n_rows, k))
    return {
        "uniform": lambda: cost,
        "ties": lambda: rng.integers(0, 3, (n_rows, k)).astype(float),
        "duplicates": lambda: rng.random((4, k))[rng.integers(0, 4, n_rows)],
        "scales": lambda: cost * 10.0 ** rng.integers(-9, 9, (n_rows, k)),
        "skewed": lambda: cost + np.arange(k),
        "equal columns": lambda: np.repeat(cost[:, :1], k, axis=1),
        "offset": lambda: 1e6 + 1e-3 * cost,
        "negative": lambda: -cost * 1e-5,
    }[kind]()


def _capacity(n_rows, k, rng):
    """Return alpha = 1, alpha = 1.2, exact or loose capacities per cluster, zeros among them."""
    least = -(-n_rows // k)
    rule = rng.integers(4)
    if rule < 2:
        return np.full(k, least if rule == 0 else max(int(1.2 * n_rows / k), least))
    exact = np.bincount(rng.integers(0, rng.integers(1, k + 1), n_rows), minlength=k)
    return exact if rule == 2 else exact + rng.integers(0, 3, k)


def _problem(trial, rng, most_rows=40):
    n_rows, k = int(rng.integers(1, most_rows)), int(rng.integers(1, 9))
    return _cost(KINDS[trial % len(KINDS)], n_rows, k, rng), _capacity(n_rows, k, rng)


def _optimum(cost, capacity):
    """Return the least total cost: each cluster is as many columns as it has room."""
    columns = np.repeat(np.arange(cost.shape[1]), np.minimum(capacity, len(cost)))
    rows, taken = linear_sum_assignment(cost[:, columns])
    return cost[rows, columns[taken]].sum()


def _slow_assign(cost, capacity):
    """Return optimal labels of integer costs: any feasible ones, then cancel negative cycles.

    Nodes are the clusters and the sink; the sink lends a cluster's free room.
    """
    n_rows, k = cost.shape
    labels = np.repeat(np.arange(k), capacity)[:n_rows]
    while (cycle := _negative_cycle(cost, capacity, labels)) is not None:
        for row, to in cycle:
            labels[row] = to
    return labels


def _negative_cycle(cost, capacity, labels):
    """Return the moves (row, to) of a cycle that lowers the cost, by Bellman-Ford, or None."""
    k = len(capacity)
    arcs = []
    for i in range(k):
        held = np.flatnonzero(labels == i)
        for j in range(k):
            if i != j and held.size:
                gain = cost[held, j] - cost[held, i]
                arcs.append((i, j, int(gain.min()), int(held[gain.argmin()])))
        if held.size < capacity[i]:
            arcs.append((i, k, 0, None))
        if held.size:
            arcs.append((k, i, 0, None))
    dist, came = [0] * (k + 1), [None] * (k + 1)
    for _ in range(k + 1):
        last = None
        for arc in arcs:
            if dist[arc[0]] + arc[2] < dist[arc[1]]:
                dist[arc[1]], came[arc[1]], last = dist[arc[0]] + arc[2], arc, arc[1]
    if last is None:
        return None
    for _ in range(k + 1):
        last = came[last][0]
    cycle, at = [], last
    while not cycle or at != last:
        cycle.append(came[at])
        at = came[at][0]
    return [(row, j) for _, j, _, row in cycle if row is not None]


def _objective(cost, labels):
    return cost[np.arange(len(cost)), labels].sum()


def test_assign_random_problems_reaches_the_optimum_within_capacity():
    rng = np.random.default_rng(0)
    for trial in range(2000):
        cost, capacity = _problem(trial, rng)
        labels = assign(cost, capacity)
        assert (np.bincount(labels, minlength=len(capacity)) <= capacity).all()
        optimum = _optimum(cost, capacity)
        assert abs(_objective(cost, labels) - optimum) <= 1e-9 * abs(optimum), (trial, optimum)


def test_assign_integer_costs_equals_cycle_cancelling_twin():
    rng = np.random.default_rng(1)
    for _ in range(100):
        n_rows, k = int(rng.integers(1, 30)), int(rng.integers(1, 6))
        cost = rng.integers(-5, 6, (n_rows, k))
        capacity = _capacity(n_rows, k, rng)
        twin = _objective(cost, _slow_assign(cost, capacity))
        assert _objective(cost, assign(cost, capacity)) == twin


def test_assign_thousands_of_rows_reaches_the_optimum():
    rng = np.random.default_rng(2)
    cost = rng.random((1500, 7)) + np.arange(7)
    labels = assign(cost, 215)
    assert _objective(cost, labels) == pytest.approx(_optimum(cost, np.full(7, 215)), rel=1e-12)


def test_assign_one_huge_cost_keeps_the_digits_of_the_rest():
    rng = np.random.default_rng(3)
    cost = rng.random((60, 3))
    cost[7, 1] = 1e18
    cost[9] = [1e30, 2e30, 0.5]
    capacity = np.full(3, 20)
    assert _objective(cost, assign(cost, capacity)) == pytest.approx(
        _optimum(cost, capacity), rel=1e-9
    )


def test_assign_largest_floats_does_not_overflow():
    cost = np.array([[-1.7e308, 1.7e308], [-1.7e308, 1.6e308]])
    assert assign(cost, 1).tolist() == [0, 1]


@pytest.mark.parametrize("scale", [1e-300, 1e-200])
def test_assign_tiny_costs_reaches_the_optimum(scale):
    rng = np.random.default_rng(7)
    for _ in range(50):
        cost, capacity = rng.random((13, 4)) * scale, np.full(4, 4)
        labels = assign(cost, capacity)
        assert _objective(cost, labels) <= _optimum(cost, capacity) * (1 + 1e-9)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint64"])
def test_assign_capacity_of_any_integer_type_is_taken(dtype):
    cost = np.random.default_rng(0).random((300, 3))
    capacity = np.array([127, 100, 90])
    assert (assign(cost, capacity.astype(dtype)) == assign(cost, capacity)).all()


def test_assign_scalar_capacity_equals_capacity_per_cluster():
    cost = np.random.default_rng(4).random((50, 4), dtype=np.float32)
    assert (assign(cost, 13) == assign(cost, [13, 13, 13, 13])).all()


def test_assign_free_capacity_takes_the_lowest_cluster_of_least_cost():
    labels = assign(np.array([[2.0, 1.0, 1.0], [0.0, 0.0, 5.0]]), 10**12)
    assert labels.dtype == np.int32
    assert labels.tolist() == [1, 0]


def test_assign_no_rows_returns_no_labels():
    labels = assign(np.empty((0, 3)), 0)
    assert (labels.shape, labels.dtype) == ((0,), np.int32)


@pytest.mark.parametrize(
    ("cost", "capacity", "words"),
    [
        (np.zeros((5, 2)), 2, "5 rows exceed the total capacity 4"),
        (np.zeros((1, 0)), 2, "1 rows exceed the total capacity 0"),
        (np.array([[0.0, np.nan]]), 1, "must be finite, got nan at [0, 1]"),
        (np.array([[0.0, np.inf]]), 1, "must be finite, got inf"),
        (np.zeros((2, 2)), [3, -1], "must not be negative, got -1"),
        (np.zeros((2, 2)), [1, 1, 1], "got shape (3,)"),
        (np.zeros((2, 2)), 1.5, "of float64"),
        (np.zeros(4), 4, "got shape (4,)"),
    ],
)
def test_assign_wrong_argument_is_one_line(cost, capacity, words):
    with pytest.raises(ValueError) as caught:
        assign(cost, capacity)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_solve_chain_of_warm_starts_stays_optimal():
    """An empty cluster's negative price, fed back raw, gave wrong labels a few solves later."""
    rng = np.random.default_rng(5)
    for chain in range(300):
        n_rows, k = int(rng.integers(1, 60)), int(rng.integers(2, 9))
        alpha = (1.0, 1.2, 4.0)[chain % 3]
        capacity = np.full(k, min(n_rows, max(int(alpha * n_rows / k), -(-n_rows // k))))
        points, centers = rng.standard_normal((n_rows, 2)), rng.standard_normal((k, 2))
        prices = rng.random(k) * 3 if chain % 2 else None
        for _ in range(8):
            cost = ((points[:, None] - centers) ** 2).sum(axis=2)
            labels, prices = solve(cost, capacity, prices, additive=True)
            assert (np.bincount(labels, minlength=k) <= capacity).all()
            cold = _objective(cost, assign(cost, capacity))
            assert _objective(cost, labels) == pytest.approx(cold, rel=1e-10, abs=1e-12)
            centers = centers + 0.5 * rng.standard_normal((k, 2))


def test_solve_prices_certify_the_labels():
    rng = np.random.default_rng(6)
    for trial in range(200):
        cost, capacity = _problem(trial % 3, rng, most_rows=80)
        labels, prices = solve(cost, np.minimum(capacity, len(cost)))
        sizes = np.bincount(labels, minlength=len(capacity))
        priced = cost + prices
        own = priced[np.arange(len(cost)), labels]
        assert (own <= priced[:, sizes > 0].min(axis=1) + 1e-12).all()
        assert (sizes[prices > 0] == capacity[prices > 0]).all()


def test_transport_heaps_of_two_entries_equal_whole_heaps():
    """A heap that holds only its cheapest rows must notice when a row left out is cheaper."""
    rng = np.random.default_rng(7)
    for trial in range(300):
        cost, capacity = _problem(trial % 3, rng, most_rows=80)
        cost = np.floor(cost * 2**20)
        found = []
        for keep in (2, 0):
            base, labels = np.empty(len(cost)), np.empty(len(cost), np.int32)
            clamp = transport.row_minima(cost, base)
            prices = np.zeros(len(capacity), np.int64)
            limits = np.minimum(capacity, len(cost))
            kept = np.full(len(cost), -1, np.int32)
            assert transport.solve(cost, base, clamp, 1.0, limits, prices, labels, kept, keep) >= 0
            found.append(_objective(cost, labels))
        assert found[0] == found[1]


def test_solve_equally_good_labels_keep_the_previous_ones():
    cost = np.tile([0.1, 0.3, 0.2], (12, 1))
    previous = np.random.default_rng(8).permutation(np.repeat([0, 1, 2], 4)).astype(np.int32)
    labels, _ = solve(cost, np.full(3, 4), previous=previous)
    np.testing.assert_array_equal(labels, previous)
