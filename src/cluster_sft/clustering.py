"""Capacity-constrained K-means on embeddings, and the stage `cluster`.

Minimises sum |e_i - m_a(i)|^2 over assignments a and centroids m such that no cluster holds more
than cap rows (CluSTER: clusters of bounded skew, one per data-parallel worker). Restarts from
seeded k-means++ run on a sample of the rows; the best of them is refined on all rows.

Reads embeddings.npy and samples.parquet of the embed leaf; writes clusters.parquet, centroids.npy
and summary.json.

Legend: N rows, H hidden size, K clusters.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from numpy.typing import NDArray
from tqdm import tqdm

from cluster_sft import artifacts, costs
from cluster_sft.assignment import assign
from cluster_sft.errors import UserError
from cluster_sft.kmeans import Fit, Lloyd, seed_centers
from cluster_sft.passes import Table

if TYPE_CHECKING:
    import torch

    from cluster_sft.params import Launch
    from cluster_sft.stage_params import ClusterParams

__all__ = ["Clustering", "assign", "capacity_of", "constrained_kmeans", "run"]

SAMPLE_ROWS = 16384  # on which the restarts run; more gain nothing that one full pass does not
SAMPLE_BYTES = 256 << 20  # of the sample's copy, where rows are very wide
SAMPLE_ITERATIONS = 100
SAMPLE_TOLERANCE = 5e-4  # share of labels that still change when a restart stops
LOW_USAGE = 0.25


@dataclass(frozen=True, kw_only=True)
class Clustering:
    """Clusters of N rows; ids run from the largest cluster to the smallest.

    labels: (N,) int32.
    centroids: (K, H) float32, plain means of their rows.
    distances: (N,) float32, from each row to its own centroid (not squared).
    inertia: sum of squared distances.
    sizes: (K,) int64, falling; ties are ordered by the lowest row held.
    weights: (K,) float64, sizes x K / N: what balanced rows of a cluster stand for.
    n_iter: assignment steps on all rows.
    capacity: rows that a cluster could take at most.
    seed: of the k-means++ draws.
    displaced_rows: int64, ascending: rows that are not in their nearest cluster because it is full.
    """

    labels: NDArray[np.int32]
    centroids: NDArray[np.float32]
    distances: NDArray[np.float32]
    inertia: float
    sizes: NDArray[np.int64]
    weights: NDArray[np.float64]
    n_iter: int
    capacity: int
    seed: int
    displaced_rows: NDArray[np.int64]

    @property
    def displaced(self) -> int:
        """Return how many rows the capacity kept out of their nearest cluster."""
        return len(self.displaced_rows)


def capacity_of(n_rows: int, k: int, alpha: float) -> int:
    """Return max(floor(alpha N / K), ceil(N / K)), or N where alpha >= K switches the bound off.

    alpha is read as the decimal it prints as, so that 1.2 x 10 / 4 is exactly 3. The ceiling keeps
    alpha = 1 feasible when K does not divide N.

    Raises:
        UserError: alpha is no number of at least 1.
    """
    try:
        ratio = Fraction(str(alpha)) if alpha != float("inf") else Fraction(k)
    except (ValueError, TypeError):
        ratio = Fraction(0)
    if ratio < 1:
        raise UserError(f"constrained_kmeans: alpha must be a number of at least 1, got {alpha}")
    if ratio >= k:
        return n_rows
    return max(int(ratio * n_rows / k), -(-n_rows // k))


def constrained_kmeans(
    x: NDArray[np.floating] | torch.Tensor,
    *,
    k: int,
    alpha: float = 1.5,
    seed: int,
    n_init: int = 4,
    max_iter: int = 100,
    tol: float = 1e-4,
    threads: int | None = None,
    block_rows: int | None = None,
    progress: bool = False,
) -> Clustering:
    """Cluster rows into K clusters of at most `capacity_of(N, K, alpha)` rows each.

    `threads` and `block_rows` change no bit of it. Memory grows with N x K, not with N x H.

    Args:
        x: (N, H) float16 or float32, finite, in memory or memory-mapped; or a torch tensor, which
            is read on its device (labels are then equal up to rounding).
        k: clusters, 1 to N.
        alpha: capacity in units of N / K, at least 1.
        seed: of the k-means++ draws, not negative.
        n_init: restarts; the least inertia wins.
        max_iter: most assignment steps.
        tol: stop when at most this share of the rows changes label, or when ten iterations together
            lower the inertia by less than a tenth of this share of it: rows that lie evenly between
            clusters can change label for ever without a gain. 0 waits for the last label.
        threads: by default the processors that this process may use.
        block_rows: rows of a block of the first pass; by default 8 MiB of them.
        progress: show a progress bar on stderr.

    Raises:
        UserError: an argument is outside its range, or x is not finite.
    """
    x = _checked(x, k=k, seed=seed, n_init=n_init, max_iter=max_iter, tol=tol)
    capacity = capacity_of(len(x), k, alpha)
    size = _sample_size(x, k)
    whole = len(x) <= size
    bar = tqdm(total=n_init + (not whole), desc="cluster", unit="fit", disable=not progress)
    with bar, _table(x, threads=threads, block_rows=block_rows) as table:
        best = partial(_best_restart, k=k, alpha=alpha, seed=seed, n_init=n_init, bar=bar)
        if whole:
            fit = best(table, max_iter=max_iter, tol=tol)
        else:
            with table.subset(_sample_rows(len(x), size, seed=seed)) as sample:
                start = best(sample, max_iter=SAMPLE_ITERATIONS, tol=SAMPLE_TOLERANCE)
            del sample  # its rows
            lloyd = Lloyd(table, start.centers, capacity=capacity, prices=start.prices)
            fit = lloyd.run(max_iter=max_iter, tolerance=tol, report=bar.set_postfix_str)
            bar.update()
    return _canonical(fit, capacity=capacity, seed=seed)


def run(
    params: ClusterParams, *, embeddings: Path, out: Path, scratch: Path, launch: Launch
) -> None:
    """Cluster the embeddings of the leaf `embeddings` into `out`."""
    meter = costs.start()
    x, samples = artifacts.read_embeddings(embeddings)
    if params.k > len(x):
        raise UserError(
            f"cluster.k: must be at most the number of embedded rows, got k = {params.k} and "
            f"{len(x)} rows in {embeddings}; lower cluster.k (auto is train.workers) or use more "
            "data"
        )
    found = constrained_kmeans(
        x,
        k=params.k,
        alpha=params.alpha,
        seed=params.seed,
        n_init=params.n_init,
        max_iter=params.max_iter,
        tol=params.tol,
        threads=launch.threads,
        progress=True,
    )
    frame = pl.DataFrame(
        {"id": samples["id"], "cluster": found.labels, "distance": found.distances}
    )
    artifacts.write_table(out, "clusters.parquet", frame)
    artifacts.write_table(out, "displaced.parquet", frame[found.displaced_rows])
    np.save(out / "centroids.npy", found.centroids, allow_pickle=False)
    usage = params.k * int(found.sizes[-1]) / len(x)
    # Rows without a direction, which selection keeps only when nothing else is left.
    zero = samples.filter(pl.col("proxy_norm") == 0)["id"].to_list()
    summary = {**_summary(found, params, usage=usage), "zero_rows": zero}
    summary["cost"] = meter.stop(out)
    artifacts.write_json(out / artifacts.SUMMARY, summary)
    if usage < LOW_USAGE:
        print(
            f"warning: the smallest of {params.k} clusters holds {found.sizes[-1]} of "
            f"{len(x)} rows, so balanced selection uses at most "
            f"{usage:.1%} of the data; lower cluster.alpha or cluster.k",
            file=sys.stderr,
        )


def _summary(found: Clustering, params: ClusterParams, *, usage: float) -> dict[str, object]:
    return {
        "k": params.k,
        "n": len(found.labels),
        "alpha": params.alpha,
        "seed": found.seed,
        "capacity": found.capacity,
        "sizes": found.sizes.tolist(),
        "weights": found.weights.tolist(),
        "inertia": found.inertia,
        "n_iter": found.n_iter,
        "displaced": found.displaced,
        "usage_at_r1": usage,
    }


def _best_restart(
    table: Table,
    *,
    k: int,
    alpha: float,
    seed: int,
    n_init: int,
    max_iter: int,
    tol: float,
    bar: tqdm,
) -> Fit:
    """Return the fit of least inertia over `n_init` seedings, the first on ties."""
    best = None
    for restart in range(n_init):
        centers = seed_centers(table, k=k, rng=np.random.default_rng([seed, restart]))
        limit = capacity_of(table.n_rows, k, alpha)
        lloyd = Lloyd(table, centers, capacity=limit, prices=np.zeros(k))
        fit = lloyd.run(max_iter=max_iter, tolerance=tol)
        if best is None or fit.inertia < best.inertia:
            best = fit
        bar.update()
    assert best is not None
    return best


def _table(
    x: NDArray[np.floating] | torch.Tensor, *, threads: int | None, block_rows: int | None
) -> Table:
    if isinstance(x, np.ndarray):
        return Table(x, threads=threads, block_rows=block_rows)
    from cluster_sft.tensors import TensorTable

    return TensorTable(x, threads=threads, block_rows=block_rows)


def _sample_size(x: NDArray[np.floating] | torch.Tensor, k: int) -> int:
    fitting = SAMPLE_BYTES // (x.itemsize * x.shape[1])
    return max(64 * k, min(SAMPLE_ROWS, fitting))


def _sample_rows(n_rows: int, size: int, *, seed: int) -> NDArray[np.int64]:
    """Return distinct rows drawn at random, ascending."""
    return np.sort(np.random.default_rng([seed, n_rows]).choice(n_rows, size, replace=False))


def _canonical(fit: Fit, *, capacity: int, seed: int) -> Clustering:
    """Renumber the clusters by size, ties by lowest row, and measure the rows."""
    n_rows, k = fit.cost.shape
    every = np.arange(n_rows)
    sizes = np.bincount(fit.labels, minlength=k)
    first = np.empty(k, np.int64)
    first[fit.labels[::-1]] = every[::-1]  # the last assignment stands: the lowest row
    order = np.lexsort((first, -sizes))
    new_id = np.empty(k, np.int32)
    new_id[order] = np.arange(k, dtype=np.int32)
    own = fit.cost[every, fit.labels]
    nearest = fit.cost.argmin(axis=1)
    elsewhere = (fit.cost[every, nearest] < own) & (sizes[nearest] >= capacity)
    return Clustering(
        labels=new_id[fit.labels],
        centroids=fit.centers[order].astype(np.float32),
        distances=np.sqrt(own).astype(np.float32),
        inertia=fit.inertia,
        sizes=sizes[order].astype(np.int64),
        weights=sizes[order] * k / n_rows,
        n_iter=fit.n_iter,
        capacity=capacity,
        seed=seed,
        displaced_rows=np.flatnonzero(elsewhere),
    )


def _checked(
    x: NDArray[np.floating] | torch.Tensor,
    *,
    k: int,
    seed: int,
    n_init: int,
    max_iter: int,
    tol: float,
) -> NDArray[np.floating] | torch.Tensor:
    tensor = type(x).__module__.partition(".")[0] == "torch"
    if not tensor and not isinstance(x, np.ndarray):
        x = np.asarray(x)
    known = ("float16", "float32", "float64", "bfloat16")
    if x.ndim != 2 or str(x.dtype).removeprefix("torch.") not in known or not x.shape[1]:
        raise UserError(
            f"constrained_kmeans: x must be a table (N, H) of float16 or float32, got shape "
            f"{tuple(x.shape)} of {x.dtype}"
        )
    if not 1 <= k <= len(x):
        raise UserError(
            f"constrained_kmeans: k must be 1 to the number of rows, got k = {k} and {len(x)} rows"
        )
    for name, value, least in (("n_init", n_init, 1), ("max_iter", max_iter, 1), ("seed", seed, 0)):
        if value < least:
            raise UserError(f"constrained_kmeans: {name} must be at least {least}, got {value}")
    if not tol >= 0:
        raise UserError(f"constrained_kmeans: tol must not be negative, got {tol}")
    return x
