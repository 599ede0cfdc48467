"""Capacity-constrained K-means beside k-means-constrained, scikit-learn, faiss and POT.

All start from the same centres and make the same number of assignments. Every run is a process of
its own; arms take turns, so that a slow minute hits all of them. Inertia is computed here, from
each arm's labels, with the means of their rows in float64.

Two iterations that assign differently part ways and end in different local optima, so the inertia
of one run says little about which assigns better. So both also go on from where k-means-constrained
ended, both run from several seedings until no label changes, and a whole fit, restarts included,
stands beside the peer's few assignments.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measuring, tables
from benchmarks.labelling import inertia, means
from cluster_sft.clustering import capacity_of
from cluster_sft.kmeans import seed_centers
from cluster_sft.passes import Table

CASES = [(4, 1.2), (4, 1.5), (8, 1.2)]
PASS_K = [4, 8]
GROWTH = (4, 1.2)
GROWTH_ITERATIONS = 3
SIZES = [10_000, 20_000, 40_000, 75_000]
SMALL_SIZES = [600, 1_200]
SEED_ROWS = 8192
ON = 2  # assignments of each from where the peer ended
SEEDINGS = 10
SEEDING_ROWS = 4_000
MOST_ITERATIONS = 100


def measure(options: Namespace) -> dict[str, Any]:
    """Return iterations, passes, assignments and growth, each beside its peers."""
    peers = measuring.has_peers()
    sizes = SMALL_SIZES if options.small else SIZES
    width = 64 if options.small else 4096
    folder = options.scratch / "clustering"
    folder.mkdir(parents=True, exist_ok=True)
    mixture = tables.mixture(
        folder / f"mixture-{sizes[-1]}x{width}.npy", n_rows=sizes[-1], width=width
    )
    named = {"mixture": mixture}
    if source := options.embeddings or _found_embeddings():
        path = folder / f"embeddings-{sizes[-1]}.npy"
        path.unlink(missing_ok=True)
        named["embeddings"] = tables.tiled(path, source, n_rows=sizes[-1])
    cases = [
        _iterations(name, path, k, alpha, options, peers=peers)
        for name, path in named.items()
        for k, alpha in (CASES[:1] if options.small else CASES)
    ]
    return {
        "iterations": cases,
        "seedings": [
            _seedings(name, path, min(sizes[0], SEEDING_ROWS), *CASES[-1])
            for name, path in named.items()
            if peers and not options.small
        ],
        "passes": [_passes(mixture, k) for k in PASS_K],
        "assignments": [
            _assignment(mixture, n, k, options, peers=peers)
            for k in PASS_K
            for n in (sizes[:1] if k > PASS_K[0] else sizes)
        ],
        "growth": [_growth(mixture, n, options, peers=peers) for n in sizes],
        "embeddings": str(source) if source else None,
        "versions": {
            **measuring.versions("numpy", "numba", "llvmlite"),
            **({f"peer {k}": v for k, v in _peer({"peer": "versions"}).items()} if peers else {}),
        },
    }


def _iterations(
    name: str, path: Path, k: int, alpha: float, options: Namespace, *, peers: bool
) -> dict[str, Any]:
    """Return the time of an iteration and the inertia of every arm from the same centres."""
    rows, width = np.load(path, mmap_mode="r").shape
    job = _job(path, rows, k, alpha, options.iterations)
    free = {**job, "capacity": rows}
    arms: dict[str, tuple[str, dict[str, Any]]] = {
        "ours": ("ours", job),
        "k-means-constrained": ("kmc", job),
        "ours, no capacity": ("ours", free),
        "scikit-learn": ("sklearn", free),
        "faiss": ("faiss", free),
    }
    found: dict[str, list[dict[str, Any]]] = {}
    for turn in range(options.rounds):
        for arm, (kind, settings) in arms.items():
            if kind != "ours" and not peers:
                continue
            found.setdefault(arm, []).append(_run(kind, settings))
            last = found[arm][-1]
            measuring.tell(
                f"clustering: {name} K={k} alpha={alpha} round {turn + 1}/{options.rounds}, {arm}: "
                f"{last['per_iteration']:.3f} s an assignment, {last['n_iter']} assignments"
            )
            if turn == 0:
                labels = np.load(job["labels"])
                last["inertia"] = inertia(path, labels, k)
                if kind == "kmc":
                    last["gap_from_its_end"] = _gap_from(path, labels, job)
    times = {arm: [r["per_iteration"] for r in runs] for arm, runs in found.items()}
    return {
        "data": name,
        "n": rows,
        "width": width,
        "k": k,
        "alpha": alpha,
        "arms": {arm: _summary(runs) for arm, runs in found.items()},
        "fit": measuring.run_child(
            "clustering_arms", {"arm": "fit", **job, "k": k, "alpha": alpha}
        ),
        **{
            name: gap
            for name, gap in found.get("k-means-constrained", [{}])[0].items()
            if name == "gap_from_its_end"
        },
        "times_faster": {
            arm: measuring.ratios(
                times[arm], times["ours" if arm == "k-means-constrained" else "ours, no capacity"]
            )
            for arm in times
            if not arm.startswith("ours")
        },
    }


def _summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "per_iteration": measuring.spread([r["per_iteration"] for r in runs]),
        "seconds": measuring.spread([r["seconds"] for r in runs]),
        "n_iter": runs[0]["n_iter"],
        "inertia": runs[0].get("inertia"),
        "resident_bytes": max(r["resident_bytes"] for r in runs),
        "table_reads": runs[0].get("table_reads"),
    }


def _gap(path: Path, job: dict[str, Any]) -> float:
    """Return our inertia over that of k-means-constrained, less 1, from the job's centres."""
    found = []
    for kind in ("ours", "kmc"):
        _run(kind, job)
        found.append(inertia(path, np.load(job["labels"]), len(np.load(job["centers"]))))
    return found[0] / found[1] - 1


def _gap_from(path: Path, labels: np.ndarray, job: dict[str, Any]) -> float:
    """Return the gap after both went on from the means of the peer's last labels."""
    centers = path.with_name("ended.npy")
    k = len(np.load(job["centers"]))
    np.save(centers, means(path, labels, k)[0].astype(np.float32))
    return _gap(path, {**job, "centers": str(centers), "iterations": ON})


def _seedings(name: str, path: Path, rows: int, k: int, alpha: float) -> dict[str, Any]:
    """Return the gaps of several seedings, each run until no label changes."""
    gaps = []
    for seed in range(SEEDINGS):
        gaps.append(_gap(path, _job(path, rows, k, alpha, MOST_ITERATIONS, seed=seed)))
        measuring.tell(
            f"clustering: {name} K={k} seeding {seed}: inertia {gaps[-1]:+.1e} of theirs"
        )
    return {"data": name, "n": rows, "k": k, "alpha": alpha, "gap": measuring.spread(gaps)}


def _passes(path: Path, k: int) -> dict[str, Any]:
    rows = len(np.load(path, mmap_mode="r"))
    found = measuring.run_child("clustering_arms", {"arm": "pass", **_job(path, rows, k, 1.5, 1)})
    measuring.tell(
        f"clustering: a pass at K={k} takes {found['distances_over_read']['median']:.2f} times "
        "the reading"
    )
    return {"n": rows, "k": k, **found}


def _assignment(
    path: Path, rows: int, k: int, options: Namespace, *, peers: bool
) -> dict[str, Any]:
    """Return the time of one cold assignment beside POT's exact transport, and both objectives."""
    job = _job(path, rows, k, GROWTH[1], 1)
    job["cost"] = str(path.with_name("cost.npy"))
    x = np.load(path, mmap_mode="r")[:rows]
    with Table(np.asarray(x)) as table:
        every, norms, cost = np.arange(rows), np.empty(rows), np.empty((rows, k))
        table.square_norms(every, norms)
        table.square_distances(every, norms, np.load(job["centers"]).astype(np.float64), cost)
    np.save(job["cost"], cost)
    ours = [_assign(job) for _ in range(options.rounds)]
    theirs = [_peer({"peer": "emd", **job}) for _ in range(options.rounds)] if peers else []
    seconds = [r["seconds"] for r in ours]
    result: dict[str, Any] = {"n": rows, "k": k, "alpha": GROWTH[1]}
    result["ours_seconds"] = measuring.spread(seconds)
    if theirs:
        result["pot_seconds"] = measuring.spread([r["seconds"] for r in theirs])
        result["times_faster"] = measuring.ratios([r["seconds"] for r in theirs], seconds)
        result["objective_gap"] = ours[0]["objective"] / theirs[0]["objective"] - 1
    measuring.tell(f"clustering: assignment of {rows:,} rows to {k}: {seconds[0] * 1e3:.1f} ms")
    return result


def _growth(path: Path, rows: int, options: Namespace, *, peers: bool) -> dict[str, Any]:
    """Return what N rows cost: an iteration, the whole fit, and an iteration of the peer."""
    k, alpha = GROWTH
    job = _job(path, rows, k, alpha, options.iterations)
    fits = [
        measuring.run_child("clustering_arms", {"arm": "fit", "k": k, "alpha": alpha, **job})
        for _ in range(options.rounds)
    ]
    ours = [_run("ours", job) for _ in range(options.rounds)]
    result = {
        "n": rows,
        "k": k,
        "alpha": alpha,
        "fit_seconds": measuring.spread([r["seconds"] for r in fits]),
        "fit_resident_bytes": max(r["resident_bytes"] for r in fits),
        "per_iteration": measuring.spread([r["per_iteration"] for r in ours]),
    }
    if peers:
        theirs = [
            _run("kmc", {**job, "iterations": GROWTH_ITERATIONS}) for _ in range(options.rounds)
        ]
        result["peer_per_iteration"] = measuring.spread([r["per_iteration"] for r in theirs])
        result["peer_resident_bytes"] = max(r["resident_bytes"] for r in theirs)
    measuring.tell(f"clustering: {rows:,} rows fitted in {fits[0]['seconds']:.2f} s")
    return result


def _job(
    path: Path, rows: int, k: int, alpha: float, iterations: int, *, seed: int = 0
) -> dict[str, Any]:
    """Return what all arms share; the centres are seeded once for each table, N, K and seed."""
    centers = path.with_name(f"centers-{path.stem}-{rows}-{k}-{seed}.npy")
    if not centers.is_file():
        x = np.load(path, mmap_mode="r")
        step = max(1, rows // SEED_ROWS)
        with Table(np.array(x[:rows:step])) as table:
            found = seed_centers(table, k=k, rng=np.random.default_rng([seed, k]))
        np.save(centers, found.astype(np.float32))
    return {
        "array": str(path),
        "rows": rows,
        "centers": str(centers),
        "capacity": capacity_of(rows, k, alpha),
        "iterations": iterations,
        "labels": str(path.with_name("labels.npy")),
    }


def _run(kind: str, job: dict[str, Any]) -> dict[str, Any]:
    if kind == "ours":
        return measuring.run_child("clustering_arms", {"arm": "lloyd", **job})
    return _peer({"peer": kind, **job})


def _assign(job: dict[str, Any]) -> dict[str, Any]:
    return measuring.run_child("clustering_arms", {"arm": "assign", **job})


def _peer(job: dict[str, Any]) -> dict[str, Any]:
    return measuring.run_child("peers", job, peer=True)


def _found_embeddings() -> Path | None:
    """Return the largest embeddings of a finished run, if there are any."""
    found = (measuring.ROOT / "results").glob("*/embed/embeddings.npy")
    return max(found, key=lambda p: p.stat().st_size, default=None)


def parse(arguments: list[str]) -> Namespace:
    """Return the options of this benchmark."""
    parser = ArgumentParser(prog="benchmarks.clustering", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes: a smoke test")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=10, help="assignments of every arm")
    parser.add_argument("--embeddings", type=Path, help="embeddings.npy of a real run, to be tiled")
    parser.add_argument("--scratch", type=Path, default=measuring.OUT)
    return parser.parse_args(arguments)
