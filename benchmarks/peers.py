"""What users could take instead. Runs in the peers' venv, so it imports nothing of this project.

An iteration of a peer is an assignment and new means; after the last one each assigns once more, so
that its labels fit its means. `iterations` of the job counts assignments, and so does `n_iter` of
the result.

Called as `python peers.py JOB`, with the job as JSON; prints the result as JSON.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ["k-means-constrained", "ortools", "scikit-learn", "faiss-cpu", "POT", "numpy"]


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Run one peer and return its seconds and what it found."""
    warnings.simplefilter("ignore")
    if job["peer"] == "versions":
        return {package: version(package) for package in PACKAGES}
    return {"emd": run_emd, "kmc": run_kmc, "sklearn": run_sklearn, "faiss": run_faiss}[
        job["peer"]
    ](job)


def run_kmc(job: dict[str, Any]) -> dict[str, Any]:
    """k-means-constrained: Lloyd's iteration with a minimum-cost flow."""
    from k_means_constrained import KMeansConstrained

    x, centers = _table(job)
    model = KMeansConstrained(
        len(centers),
        size_max=job["capacity"],
        init=centers,
        n_init=1,
        max_iter=job["iterations"] - 1,
        tol=0.0,
        random_state=0,
        copy_x=False,
    )
    started = time.perf_counter()
    model.fit(x)
    return _fitted(job, time.perf_counter() - started, model.labels_, _steps(job, model.n_iter_))


def run_sklearn(job: dict[str, Any]) -> dict[str, Any]:
    """scikit-learn's KMeans, which knows no capacities."""
    from sklearn.cluster import KMeans

    x, centers = _table(job)
    model = KMeans(
        len(centers), init=centers, n_init=1, max_iter=job["iterations"] - 1, tol=0.0, copy_x=False
    )
    started = time.perf_counter()
    model.fit(x)
    return _fitted(job, time.perf_counter() - started, model.labels_, _steps(job, model.n_iter_))


def run_faiss(job: dict[str, Any]) -> dict[str, Any]:
    """Faiss' Kmeans, which knows no capacities, on all rows."""
    import faiss

    x, centers = _table(job)
    model = faiss.Kmeans(
        x.shape[1], len(centers), niter=job["iterations"] - 1, max_points_per_centroid=len(x)
    )
    started = time.perf_counter()
    model.train(x, init_centroids=centers)
    _, labels = model.index.search(x, 1)
    seconds = time.perf_counter() - started
    return _fitted(job, seconds, labels[:, 0], job["iterations"])


def run_emd(job: dict[str, Any]) -> dict[str, Any]:
    """POT's network simplex; a row more takes what the capacities leave free, at no cost."""
    import ot

    cost = np.load(job["cost"])[: job["rows"]]
    capacity = np.full(cost.shape[1], job["capacity"], float)
    spare = capacity.sum() - len(cost)
    supply = np.concatenate([np.ones(len(cost)), [spare]])
    table = np.vstack([cost, np.zeros((1, cost.shape[1]))])
    started = time.perf_counter()
    plan = ot.emd(supply, capacity, table, numItermax=100_000_000)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "objective": float((plan * table).sum())}


def _table(job: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    x = np.load(job["array"], mmap_mode="r")[: job["rows"]].astype(np.float32)
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")  # the peak of memory starts from here, as it does for our arms
    return x, np.load(job["centers"]).astype(np.float32)


def _steps(job: dict[str, Any], n_iter: int) -> int:
    """Return the assignments made: converged to the last label, the last iteration was the last."""
    return int(n_iter) + (n_iter == job["iterations"] - 1)


def _fitted(job: dict[str, Any], seconds: float, labels: np.ndarray, n_iter: int) -> dict[str, Any]:
    np.save(job["labels"], labels.astype(np.int32))
    return {
        "seconds": seconds,
        "n_iter": n_iter,
        "per_iteration": seconds / n_iter,
        "resident_bytes": _peak(),
    }


def _peak() -> int:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("VmHWM:")), 0)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
