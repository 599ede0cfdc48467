"""This project's side of the clustering benchmark: one measurement in a process of its own."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from benchmarks import measuring
from cluster_sft import assignment
from cluster_sft.clustering import capacity_of, constrained_kmeans
from cluster_sft.kmeans import Lloyd
from cluster_sft.passes import Table

PASS_REPEATS = 9
WARM_ROWS = 500


@njit(nogil=True)
def fold(words: NDArray[np.uint64]) -> int:
    """Return the exclusive or of all words: what reading memory costs, with next to no work."""
    total = np.uint64(0)
    for word in words:
        total ^= word
    return total


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Run one arm, compiled beforehand, and return its seconds and what it found."""
    arms = {"lloyd": run_lloyd, "fit": run_fit, "pass": run_pass, "assign": run_assign}
    return arms[job["arm"]](job)


def run_lloyd(job: dict[str, Any]) -> dict[str, Any]:
    """Iterate from given centres; first reading and last measurement of all rows included."""
    x, centers = _table(job), np.load(job["centers"]).astype(np.float64)

    def work(rows: NDArray[np.float16], iterations: int) -> Any:
        with Table(rows) as table:
            capacity = job["capacity"] if rows is x else len(rows)
            lloyd = Lloyd(table, centers, capacity=capacity, prices=np.zeros(len(centers)))
            return lloyd.run(max_iter=iterations, tolerance=0.0), lloyd.rows_read / table.n_rows

    work(x[:WARM_ROWS].copy(), 2)
    with measuring.MemoryPeak() as peak:
        seconds, (fit, reads) = measuring.timed(lambda: work(x, job["iterations"]))
    np.save(job["labels"], fit.labels)
    return {
        "seconds": seconds,
        "n_iter": fit.n_iter,
        "per_iteration": seconds / fit.n_iter,
        "table_reads": reads,
        **peak.facts(),
    }


def run_fit(job: dict[str, Any]) -> dict[str, Any]:
    """Cluster from scratch: restarts on a sample, then all rows until 1e-4 of the labels change."""
    x = _table(job)
    settings = {"k": job["k"], "alpha": job["alpha"], "seed": 0}
    constrained_kmeans(x[:WARM_ROWS].copy(), **settings)
    with measuring.MemoryPeak() as peak:
        seconds, found = measuring.timed(lambda: constrained_kmeans(x, **settings))
    return {"seconds": seconds, "n_iter": found.n_iter, "inertia": found.inertia, **peak.facts()}


def run_pass(job: dict[str, Any]) -> dict[str, Any]:
    """Compare a pass over all rows with reading them, in turn, both with all threads."""
    x, centers = _table(job), np.load(job["centers"]).astype(np.float64)
    words = x.reshape(-1).view(np.uint64)
    threads = measuring.processors()
    pieces = np.array_split(words, 4 * threads)
    every = np.arange(len(x))
    norms, cost = np.empty(len(x)), np.empty((len(x), len(centers)))
    with Table(x) as table, ThreadPoolExecutor(threads) as pool:
        table.square_norms(every, norms)
        works = {
            "read": lambda: list(pool.map(fold, pieces)),
            "distances": lambda: table.square_distances(every, norms, centers, cost),
            "first_pass": lambda: Lloyd(
                table, centers, capacity=len(x), prices=np.zeros(len(centers))
            ),
        }
        for work in works.values():
            work()
        times: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(PASS_REPEATS):
            for name, work in works.items():
                times[name].append(measuring.timed(work)[0])
    read = times["read"]
    return {
        **{f"{name}_seconds": measuring.spread(values) for name, values in times.items()},
        "distances_over_read": measuring.ratios(times["distances"], read),
        "first_pass_over_read": measuring.ratios(times["first_pass"], read),
        "read_bytes_per_second": x.nbytes / measuring.spread(read)["median"],
    }


def run_assign(job: dict[str, Any]) -> dict[str, Any]:
    """Solve one assignment from nothing known."""
    cost = np.ascontiguousarray(np.load(job["cost"])[: job["rows"]])
    warm = cost[:WARM_ROWS]
    assignment.assign(warm, capacity_of(len(warm), cost.shape[1], 1.2))
    seconds, labels = measuring.timed(lambda: assignment.assign(cost, job["capacity"]))
    return {"seconds": seconds, "objective": float(cost[np.arange(len(cost)), labels].sum())}


def _table(job: dict[str, Any]) -> NDArray[np.float16]:
    return np.array(np.load(job["array"], mmap_mode="r")[: job["rows"]])


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
