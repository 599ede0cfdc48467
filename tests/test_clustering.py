"""Capacity-constrained K-means: against a NumPy twin, and its promises one by one."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy.optimize import linear_sum_assignment

from cluster_sft import artifacts, clustering, kmeans
from cluster_sft.assignment import solve
from cluster_sft.clustering import capacity_of, constrained_kmeans
from cluster_sft.params import Launch
from cluster_sft.passes import Table
from cluster_sft.stage_params import ClusterParams


def _mixture(n_rows=400, width=12, *, parts=6, seed=0, dtype=np.float32):
    """Return rows of a mixture on the sphere with one dominant part."""
    rng = np.random.default_rng(seed)
    share = np.r_[0.5, np.full(parts - 1, 0.5 / (parts - 1))]
    x = rng.standard_normal((parts, width))[rng.choice(parts, n_rows, p=share)]
    x = x + 0.4 * rng.standard_normal((n_rows, width))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(dtype)


def _square_distances(x, centers):
    return ((x[:, None].astype(np.float64) - centers) ** 2).sum(axis=2)


def _slow_lloyd(x, centers, capacity, max_iter):
    """Return labels and means: the definition, with the assignment by linear_sum_assignment."""
    k, labels = len(centers), None
    for _ in range(max_iter):
        before, cost = labels, _square_distances(x, centers)
        columns = np.repeat(np.arange(k), capacity)
        labels = columns[linear_sum_assignment(cost[:, columns])[1]]
        centers = np.stack([x[labels == c].astype(np.float64).mean(axis=0) for c in range(k)])
        if before is not None and (labels == before).all():
            break
    return labels, centers


def _lloyd(x, centers, *, capacity, max_iter=100, tolerance=0.0, **table):
    with Table(x, **table) as rows:
        start = kmeans.Lloyd(rows, centers, capacity=capacity, prices=np.zeros(len(centers)))
        return start.run(max_iter=max_iter, tolerance=tolerance)


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 4])
def test_lloyd_from_given_centers_equals_numpy_twin(alpha):
    x = _mixture(200, 6)
    capacity = capacity_of(200, 4, alpha)
    centers = x[[3, 50, 100, 150]].astype(np.float64)
    labels, means = _slow_lloyd(x, centers, capacity, max_iter=30)
    fit = _lloyd(x, centers, capacity=capacity, max_iter=30)
    np.testing.assert_array_equal(fit.labels, labels)
    np.testing.assert_allclose(fit.centers, means, rtol=0, atol=1e-6)


class _ReadingAll(kmeans.Lloyd):
    """The iteration without bounds: every assignment reads every row."""

    def _assign(self):
        self._read(np.arange(self.table.n_rows))
        labels, self.prices = solve(
            self.cost, self.capacity, self.prices, previous=self.labels, additive=True
        )
        return labels


@pytest.mark.parametrize(("k", "alpha"), [(4, 1.0), (4, 1.2), (4, 1.5), (8, 1.0), (8, 1.2), (3, 9)])
def test_skipping_rows_gives_the_labels_of_reading_all(k, alpha):
    x = _mixture(3000, 16, seed=k)
    capacity = capacity_of(3000, k, alpha)
    centers = x[:: 3000 // k][:k].astype(np.float64)
    fits, shares = [], []
    for iteration in (kmeans.Lloyd, _ReadingAll):
        with Table(x) as table:
            lloyd = iteration(table, centers, capacity=capacity, prices=np.zeros(k))
            fits.append(lloyd.run(max_iter=100, tolerance=0.0))
            shares.append(lloyd.rows_read / (3000 * (fits[-1].n_iter + 1)))
    np.testing.assert_array_equal(fits[0].labels, fits[1].labels)
    assert fits[0].n_iter == fits[1].n_iter > 3
    assert shares[0] < 0.8 * shares[1]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("k", "alpha"), [(1, 1.0), (4, 1.0), (5, 1.2), (7, 99)])
def test_clustering_every_field_agrees_with_its_definition(dtype, k, alpha):
    x = _mixture(331, 10, dtype=dtype)
    found = constrained_kmeans(x, k=k, alpha=alpha, seed=1)
    sizes = np.bincount(found.labels, minlength=k)
    cost = _square_distances(x, found.centroids.astype(np.float64))
    own = cost[np.arange(331), found.labels]
    means = [x[found.labels == c].astype(np.float64).mean(axis=0) for c in range(k)]
    assert (found.labels.dtype, found.distances.dtype) == (np.int32, np.float32)
    assert (found.centroids.dtype, found.sizes.dtype) == (np.float32, np.int64)
    assert found.sizes.tolist() == sizes.tolist() == sorted(sizes, reverse=True)
    assert sizes.min() >= 1
    assert sizes.max() <= found.capacity == capacity_of(331, k, alpha)
    np.testing.assert_allclose(found.centroids, means, rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.distances, np.sqrt(own), rtol=1e-6)
    np.testing.assert_allclose(found.weights, sizes * k / 331, rtol=1e-15)
    assert found.inertia == pytest.approx(own.sum(), rel=1e-12)
    full = sizes == found.capacity
    nearer = full & (cost < own[:, None])
    assert found.displaced == np.count_nonzero(nearer.any(axis=1))


def test_capacity_reads_alpha_as_a_decimal():
    assert capacity_of(10, 4, 1.2) == 3
    assert capacity_of(1000, 3, 1.1) == 366
    assert capacity_of(100, 7, 1.0) == 15
    assert capacity_of(700, 70, 1.1) == 11
    assert capacity_of(10, 4, 4) == capacity_of(10, 4, 1e9) == capacity_of(10, 4, np.inf) == 10


@pytest.mark.parametrize("alpha", [1.0, 1.2, 4])
def test_inertia_never_rises_over_iterations(alpha):
    x = _mixture(900, 8, seed=3)
    steps = [
        constrained_kmeans(x, k=4, alpha=alpha, seed=2, n_init=1, max_iter=i, tol=0.0).inertia
        for i in range(1, 12)
    ]
    assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(steps))
    assert steps[-1] < steps[0]


def test_restarts_keep_the_least_inertia():
    x = _mixture(600, 5, parts=9, seed=4)
    by_count = [constrained_kmeans(x, k=9, seed=0, n_init=n).inertia for n in (1, 2, 8)]
    assert by_count == sorted(by_count, reverse=True)
    assert by_count[-1] < by_count[0]


def test_converged_labels_are_an_optimal_assignment_for_the_centroids():
    x = _mixture(1000, 8, seed=5)
    found = constrained_kmeans(x, k=5, alpha=1.0, seed=0, tol=0.0)
    cost = _square_distances(x, found.centroids.astype(np.float64))
    again = clustering.assign(cost, found.capacity)
    best = cost[np.arange(1000), again].sum()
    assert found.n_iter < 100
    assert found.inertia == pytest.approx(best, rel=1e-9)


def test_split_of_a_round_part_stops_when_labels_flow_without_a_gain(monkeypatch):
    """All directions are equally good: labels change for long, and the inertia stands still."""
    x = np.random.default_rng(11).standard_normal((16_000, 64)).astype(np.float32)
    short = constrained_kmeans(x, k=2, alpha=1.0, seed=0, n_init=1)
    monkeypatch.setattr(kmeans, "LEAST_FALL", 0.0)
    full = constrained_kmeans(x, k=2, alpha=1.0, seed=0, n_init=1, max_iter=400)
    assert short.n_iter < 0.5 * full.n_iter < 200
    assert short.inertia == pytest.approx(full.inertia, rel=2e-4)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_labels_are_bitwise_equal_for_any_threads_and_blocks(dtype, monkeypatch):
    monkeypatch.setattr(clustering, "SAMPLE_ROWS", 500)
    x = _mixture(3000, 70, seed=6, dtype=dtype)
    runs = [
        constrained_kmeans(x, k=5, alpha=1.1, seed=0, threads=threads, block_rows=rows)
        for threads, rows in ((1, None), (2, None), (3, None), (2, 64), (3, 1000))
    ]
    for other in runs[1:]:
        np.testing.assert_array_equal(other.labels, runs[0].labels)
        assert other.centroids.tobytes() == runs[0].centroids.tobytes()
        assert other.distances.tobytes() == runs[0].distances.tobytes()
        assert other.inertia == runs[0].inertia


def test_memory_mapped_read_only_file_equals_array_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(clustering, "SAMPLE_ROWS", 300)
    x = _mixture(2000, 20, seed=7, dtype=np.float16)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    in_memory = constrained_kmeans(x, k=4, seed=0)
    on_disk = constrained_kmeans(mapped, k=4, seed=0)
    np.testing.assert_array_equal(in_memory.labels, on_disk.labels)
    assert in_memory.centroids.tobytes() == on_disk.centroids.tobytes()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tensor_gives_the_labels_of_the_array(device, monkeypatch):
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    monkeypatch.setattr(clustering, "SAMPLE_ROWS", 500)
    x = _mixture(2000, 16, dtype=np.float16)
    expected = constrained_kmeans(x, k=5, alpha=1.1, seed=0)
    found = constrained_kmeans(torch.from_numpy(x).to(device), k=5, alpha=1.1, seed=0)
    np.testing.assert_array_equal(found.labels, expected.labels)
    np.testing.assert_allclose(found.centroids, expected.centroids, rtol=0, atol=1e-6)
    assert found.inertia == pytest.approx(expected.inertia, rel=1e-9)


def test_strided_table_equals_contiguous_one():
    x = _mixture(300, 12, dtype=np.float16)
    strided = np.repeat(x, 2, axis=1)[:, ::2]
    expected, found = (constrained_kmeans(t, k=3, seed=0) for t in (x, strided))
    assert not strided.flags.c_contiguous
    np.testing.assert_array_equal(found.labels, expected.labels)
    np.testing.assert_allclose(found.distances, expected.distances, rtol=1e-6)


def test_sample_start_reaches_the_optimum_of_a_start_on_all_rows(monkeypatch):
    x = _mixture(4000, 16, parts=4, seed=8)
    whole = constrained_kmeans(x, k=4, alpha=1.2, seed=0)
    monkeypatch.setattr(clustering, "SAMPLE_ROWS", 500)
    sampled = constrained_kmeans(x, k=4, alpha=1.2, seed=0)
    assert sampled.inertia == pytest.approx(whole.inertia, rel=1e-3)


def test_rows_far_from_the_origin_keep_their_clusters():
    """|x|^2 - 2 x.c + |c|^2 in float32 would lose everything: 1e7 against distances of 1."""
    x = _mixture(600, 8, seed=9) + np.float32(1024)
    found = constrained_kmeans(x, k=4, alpha=1.2, seed=0)
    cost = _square_distances(x, found.centroids.astype(np.float64))
    assert found.inertia == pytest.approx(cost[np.arange(600), found.labels].sum(), rel=1e-7)
    near = constrained_kmeans(x - np.float32(1024), k=4, alpha=1.2, seed=0)
    assert found.inertia == pytest.approx(near.inertia, rel=1e-3)


def test_zero_rows_and_duplicates_leave_no_cluster_empty():
    x = np.zeros((9, 4), np.float32)
    x[0] = 1.0
    found = constrained_kmeans(x, k=4, alpha=3.0, seed=0)
    assert found.sizes.sum() == 9
    assert found.sizes.min() >= 1
    assert found.inertia == 0


def test_one_row_per_cluster_has_no_inertia():
    x = _mixture(12, 5)
    found = constrained_kmeans(x, k=12, alpha=1.0, seed=0)
    assert found.sizes.tolist() == [1] * 12
    assert found.labels.tolist() == list(range(12))  # ties of size go by the lowest row
    assert found.distances.max() < 1e-6


def test_empty_cluster_takes_the_farthest_row_of_a_larger_one():
    x = np.array([[0.0], [1.0], [2.0], [50.0], [54.0]], np.float32)
    far = np.array([[1.0], [52.0], [1e6]])
    fit = _lloyd(x, far, capacity=5, max_iter=1)
    assert fit.labels.tolist() == [0, 0, 0, 2, 1]  # rows 3 and 4 are 2 away: the lower one moves
    assert fit.centers.ravel().tolist() == [1.0, 54.0, 50.0]


def test_same_seed_same_bits_other_seed_may_differ():
    x = _mixture(500, 9, seed=10)
    a, b = (constrained_kmeans(x, k=6, seed=3) for _ in range(2))
    np.testing.assert_array_equal(a.labels, b.labels)
    assert (a.seed, a.centroids.tobytes()) == (3, b.centroids.tobytes())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 0}, "k must be 1 to the number of rows, got k = 0 and 6 rows"),
        ({"k": 7}, "got k = 7 and 6 rows"),
        ({"alpha": 0.99}, "alpha must be a number of at least 1, got 0.99"),
        ({"alpha": float("nan")}, "alpha must be a number of at least 1, got nan"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"n_init": 0}, "n_init must be at least 1"),
        ({"max_iter": 0}, "max_iter must be at least 1"),
        ({"tol": -0.1}, "tol must not be negative"),
        ({"x": np.zeros(6, np.float32)}, "got shape (6,) of float32"),
        ({"x": np.zeros((6, 2), np.int64)}, "of int64"),
        ({"x": np.array([[0, 1], [2, np.nan], [3, 4]], np.float32)}, "row 1 is not"),
        ({"x": np.array([[0, 1], [2, 3], [-np.inf, 4]], np.float16)}, "row 2 is not"),
    ],
)
def test_wrong_argument_is_one_line(change, words):
    given = {"x": np.eye(6, dtype=np.float32), "k": 2, "seed": 0} | change
    with pytest.raises(ValueError) as caught:
        constrained_kmeans(given.pop("x"), **given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def _embed_leaf(leaf, x, norms=1.0):
    leaf.mkdir()
    np.save(leaf / "embeddings.npy", x)
    n = len(x)
    frame = pl.DataFrame({"id": [f"row{i:04d}" for i in range(n)]}).with_columns(
        n_tokens=pl.lit(1), nll=pl.lit(1.0), proxy_norm=pl.lit(norms)
    )
    artifacts.write_table(leaf, "samples.parquet", frame)
    return leaf


def _run(tmp_path, x, **params):
    out = tmp_path / "out"
    out.mkdir()
    clustering.run(
        ClusterParams(**params),
        embeddings=_embed_leaf(tmp_path / "embed", x),
        out=out,
        scratch=tmp_path,
        launch=Launch(),
    )
    return out


def test_stage_writes_clusters_in_the_order_of_the_embeddings(tmp_path, capsys):
    x = _mixture(240, 8, dtype=np.float16)
    out = _run(tmp_path, x, k=4, alpha=1.5, seed=5)
    expected = constrained_kmeans(x, k=4, alpha=1.5, seed=5)
    table = artifacts.read_table(out, "clusters.parquet")
    summary = json.loads((out / "summary.json").read_text())
    assert table["id"].to_list() == [f"row{i:04d}" for i in range(240)]
    np.testing.assert_array_equal(table["cluster"], expected.labels)
    np.testing.assert_array_equal(table["distance"], expected.distances)
    np.testing.assert_array_equal(np.load(out / "centroids.npy"), expected.centroids)
    assert summary["sizes"] == expected.sizes.tolist()
    assert summary["usage_at_r1"] == 4 * expected.sizes[-1] / 240
    assert (summary["k"], summary["n"], summary["capacity"]) == (4, 240, 90)
    assert "warning" not in capsys.readouterr().err


def test_stage_tells_selection_which_rows_have_no_direction(tmp_path):
    """Where rows agree a zero row is the farthest; selection keeps it last all the same."""
    from cluster_sft import selection
    from cluster_sft.stage_params import SelectParams

    x = np.float16([1, 0, 0]) + np.linspace(-0.1, 0.1, 40, dtype=np.float16)[:, None]
    x[7] = 0
    norms = np.where(np.arange(40) == 7, 0.0, 1.0)
    embed = _embed_leaf(tmp_path / "embed", x, pl.Series(norms))
    given = {"out": tmp_path / "out", "scratch": tmp_path, "launch": Launch()}
    given["out"].mkdir()
    clustering.run(ClusterParams(k=1, alpha=1.0), embeddings=embed, **given)
    found = artifacts.read_table(given["out"], "clusters.parquet")
    assert found["distance"].arg_max() == 7
    (tmp_path / "chosen").mkdir()
    subset = selection.select(
        SelectParams(ratio=0.975, downsample="strategy"),
        dataset=tmp_path,
        clusters=given["out"],
        out=tmp_path / "chosen",
    )
    assert set(found["id"]) - set(subset["id"]) == {"row0007"}


def test_stage_small_smallest_cluster_warns(tmp_path, capsys):
    x = np.zeros((100, 4), np.float16)
    x[:, 0] = 1
    x[0] = [0, 1, 0, 0]
    _run(tmp_path, x, k=2, alpha=2.0, seed=0)
    assert "the smallest of 2 clusters holds 1 of 100 rows" in capsys.readouterr().err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_memory_does_not_grow_with_width(tmp_path):
    """64 MiB of rows in a file: no copy of them may appear in anonymous memory."""
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float16, (8192, 4096))
    x[:] = np.random.default_rng(0).standard_normal(4096)
    x[::2, :64] += 1
    x.flush()
    code = """
import re, sys, threading, numpy as np
from cluster_sft import clustering
from cluster_sft.clustering import constrained_kmeans
clustering.SAMPLE_ROWS = 256
anonymous = lambda: int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])
x = np.load(sys.argv[1], mmap_mode="r")
constrained_kmeans(x[:600], k=4, seed=0)
before, most, done = anonymous(), [0], threading.Event()
def watch():
    while not done.wait(0.002):
        most[0] = max(most[0], anonymous())
watcher = threading.Thread(target=watch); watcher.start()
constrained_kmeans(x, k=4, seed=0); done.set(); watcher.join()
print((most[0] - before) // 1024)
"""
    source = Path(clustering.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.npy")],
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 24
