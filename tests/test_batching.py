"""The batch plan: exact order, equal shares, every row once an epoch."""

from __future__ import annotations

import warnings
from fractions import Fraction

import numpy as np
import pytest

from cluster_sft.batching import _argsort_rationals, batch_plan, cluster_weights


def plan_of(clusters, *, k=None, workers=2, batch=4, epochs=1, seed=0, **options):
    k = k or int(np.max(clusters)) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return batch_plan(
            clusters,
            np.arange(1.0, k + 1),
            workers=workers,
            global_batch_size=batch,
            epochs=epochs,
            seed=seed,
            **options,
        )


def rows_of(step):
    return np.concatenate([positions for positions, _ in step])


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("batches", ["stratified", "random"])
def test_plan_any_sizes_holds_every_row_once_an_epoch(seed, batches):
    rng = np.random.default_rng([seed, len(batches)])
    sizes = rng.integers(0, 18, rng.integers(1, 6))
    sizes[rng.integers(len(sizes))] += 1
    workers, per_worker, drop_last = rng.integers(1, 5), rng.integers(1, 5), seed % 2 == 0
    batch = int(workers * per_worker * len(sizes))
    clusters = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    plan = plan_of(
        clusters,
        k=len(sizes),
        workers=int(workers),
        batch=batch,
        batches=batches,
        drop_last=drop_last,
    )
    seen = np.concatenate([np.zeros(0, int), *(rows_of(step) for step in plan)])
    kept = len(clusters) // batch * batch if drop_last else len(clusters)
    assert len(seen) == len(set(seen)) == kept
    assert len(plan) == len(list(plan))
    for step in plan:
        counts = [len(positions) for positions, _ in step]
        assert len(counts) == workers
        assert max(counts) - min(counts) <= (0 if sum(counts) == batch else 1)
        for positions, weights in step:
            assert positions.dtype == np.int64 and weights.dtype == np.float64
            assert np.array_equal(weights, clusters[positions] + 1.0)


@pytest.mark.parametrize("seed", range(40))
def test_plan_equal_clusters_gives_each_its_share_of_every_step(seed):
    size, k, extra = np.random.default_rng(seed).integers([1, 1, 0], [31, 7, 8]).tolist()
    batch = k + extra
    plan = plan_of(np.tile(np.arange(k), size), workers=1, batch=batch, seed=seed)
    for step in plan:
        counts = np.bincount(plan._clusters[rows_of(step)], minlength=k)
        assert counts.max() - counts.min() <= 1


def test_plan_unequal_clusters_gives_shares_in_proportion():
    clusters = np.repeat([0, 1, 2], [60, 30, 10])
    for step in plan_of(clusters, workers=1, batch=10, seed=3):
        counts = np.bincount(clusters[rows_of(step)], minlength=3)
        assert np.abs(counts - [6, 3, 1]).max() <= 1


def test_plan_indivisible_batch_rotates_the_extra_row():
    clusters = np.tile(np.arange(3), 40)
    plan = plan_of(clusters, workers=1, batch=4)
    extra = [np.bincount(clusters[rows_of(step)]).argmax() for step in plan]
    assert sorted(extra[:3]) == sorted(extra[3:6]) == [0, 1, 2]


@pytest.mark.parametrize(("k", "per_worker"), [(4, {1}), (8, {2}), (2, {1})])
def test_plan_workers_get_contiguous_clusters(k, per_worker):
    clusters = np.tile(np.arange(k), 16)
    for step in plan_of(clusters, workers=4, batch=16):
        owned = [set(clusters[positions]) for positions, _ in step]
        assert {len(ids) for ids in owned} == per_worker
        assert [min(ids) for ids in owned] == sorted(min(ids) for ids in owned)
        if k >= 4:
            assert sum(len(ids) for ids in owned) == k


def test_plan_short_last_step_is_cut_as_equally_as_possible():
    plan = plan_of(np.zeros(10, int), workers=4, batch=8)
    assert [len(positions) for positions, _ in plan[1]] == [1, 1, 0, 0]
    positions, weights = plan[1][3]
    assert positions.dtype == np.int64 and weights.dtype == np.float64


def test_plan_indexing_matches_iteration_in_any_order():
    plan = plan_of(np.tile(np.arange(4), 9), epochs=3)
    steps = [rows_of(step).tolist() for step in plan]
    assert [rows_of(plan[s]).tolist() for s in reversed(range(len(plan)))] == steps[::-1]
    assert [rows_of(step).tolist() for step in plan[5:9]] == steps[5:9]
    assert rows_of(plan[-1]).tolist() == steps[-1]
    with pytest.raises(IndexError):
        plan[len(plan)]


@pytest.mark.parametrize("batches", ["stratified", "random"])
def test_plan_epochs_and_seeds_differ_but_repeat(batches):
    def orders(seed):
        plan = plan_of(np.tile(np.arange(2), 20), epochs=2, seed=seed, batches=batches)
        return [rows_of(step).tolist() for step in plan]

    steps = orders(0)
    assert steps == orders(0)
    assert steps != orders(1)
    assert steps[: len(steps) // 2] != steps[len(steps) // 2 :]


def test_plan_same_rows_whatever_the_workers():
    clusters = np.random.default_rng(0).integers(0, 4, 50)
    one, four = (plan_of(clusters, workers=w, batch=8) for w in (1, 4))
    assert [rows_of(s).tolist() for s in one] == [rows_of(s).tolist() for s in four]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 3, "batch": 8}, "multiple of workers"),
        ({"batch": 2}, "number of clusters"),
        ({"workers": 0}, "at least 1"),
        ({"seed": -1}, "at least 0"),
        ({"batches": "sorted"}, "stratified or random"),
        ({"k": 2}, "one weight each"),
    ],
)
def test_plan_impossible_request_is_a_value_error(options, message):
    with pytest.raises(ValueError, match=message):
        plan_of(np.array([0, 1, 2]), **options)


def test_plan_clusters_not_dividing_the_batch_warns_once():
    arguments = {"workers": 1, "epochs": 2, "seed": 0}
    with pytest.warns(UserWarning, match="do not divide") as caught:
        list(batch_plan([0, 1, 2] * 5, np.ones(3), global_batch_size=4, **arguments))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch_plan([0, 1, 2] * 5, np.ones(3), global_batch_size=6, **arguments)
        batch_plan([0, 1, 2], np.ones(3), global_batch_size=4, batches="random", **arguments)


@pytest.mark.parametrize("seed", range(20))
def test_argsort_rationals_orders_as_fractions_do(seed):
    rng = np.random.default_rng(seed)
    pairs = rng.integers([0, 1], [[20, 1000, 10**6][seed % 3], 13], (40, 2)).tolist()
    expected = sorted(range(len(pairs)), key=lambda i: Fraction(*pairs[i]))
    numerators, denominators = (np.array([p[i] for p in pairs], dtype=np.int64) for i in (0, 1))
    assert _argsort_rationals(numerators, denominators).tolist() == expected


def test_argsort_rationals_separates_keys_that_floats_confuse():
    large = (1 << 30) - 1
    numerators = np.array([4095 * large - 1, 4095 * (large - 1) - 1], dtype=np.int64)
    denominators = np.array([large, large - 1], dtype=np.int64)
    assert np.unique(numerators / denominators).size == 1
    assert _argsort_rationals(numerators, denominators).tolist() == [1, 0]


def test_cluster_weights_balanced_rows_are_the_published_ones():
    assert np.array_equal(cluster_weights([60, 30, 10], [5, 5, 5]), [1.8, 0.9, 0.3])


def test_cluster_weights_all_rows_are_one():
    assert np.array_equal(cluster_weights([60, 30, 10], [60, 30, 10]), [1.0, 1.0, 1.0])


def test_cluster_weights_unequal_rows_average_to_one_over_them():
    selected = np.array([7, 2, 4])
    weights = cluster_weights([60, 30, 10], selected)
    assert np.isclose(weights @ selected / selected.sum(), 1.0, rtol=1e-15)


def test_cluster_weights_cluster_without_selected_rows_is_an_error():
    with pytest.raises(ValueError, match="cluster 1"):
        cluster_weights([6, 3], [2, 0])
    assert np.array_equal(cluster_weights([6, 0], [2, 0]), [1.0, 0.0])
