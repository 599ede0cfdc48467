"""The stage `cluster` on 1,000,000 x 4,096 float16 (8.2 GB) from disk, beside reading it once.

Beside the mixture whose parts spread as embeddings do stands one whose parts are round, which no
iteration can split better than another: the worst that data can do.

The file's cached pages are dropped before every reading and every run, as far as the system lets
go of them.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks import measuring, tables
from cluster_sft import artifacts, clustering
from cluster_sft.kmeans import Lloyd
from cluster_sft.params import Launch
from cluster_sft.stage_params import ClusterParams

CASES = [("mixture", k, alpha) for k in (4, 8) for alpha in (1.0, 1.2, 1.5)]
CASES += [("round parts", k, 1.2) for k in (4, 8)]
READ_BYTES = 16 << 20


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Run the stage once in this process, on a cold file."""
    leaf, out = Path(job["leaf"]), Path(job["out"])
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    params = ClusterParams(k=job["k"], alpha=job["alpha"])
    made: list[Lloyd] = []

    class Recorded(Lloyd):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            made.append(self)

    warm = np.random.default_rng(0).standard_normal((200, 64)).astype(np.float16)
    clustering.constrained_kmeans(warm, k=job["k"], alpha=job["alpha"], seed=0)
    clustering.Lloyd = Recorded
    drop_cache(leaf / "embeddings.npy")
    with measuring.MemoryPeak() as peak:
        seconds, _ = measuring.timed(
            lambda: clustering.run(params, embeddings=leaf, out=out, scratch=out, launch=Launch())
        )
    summary = artifacts.read_json(out / "summary.json")
    return {
        "seconds": seconds,
        "n_iter": summary["n_iter"],
        "inertia": summary["inertia"],
        "converged": summary["n_iter"] < params.max_iter,
        "table_reads": made[-1].rows_read / made[-1].table.n_rows,
        "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **peak.facts(),
    }


def drop_cache(path: Path) -> None:
    """Ask the system to forget the file's pages, which must have been written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def read_cold(path: Path) -> float:
    """Return the seconds that one reading of the file takes, in order, 16 MiB at a time."""
    drop_cache(path)

    def read() -> None:
        buffer = bytearray(READ_BYTES)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    return measuring.timed(read)[0]


def measure(options: Namespace) -> dict[str, Any]:
    """Return seconds, iterations and memory of every case, each beside a cold reading."""
    n_rows, width = (3000, 64) if options.small else (options.rows, 4096)
    cases = []
    for data, k, alpha in CASES[::6] if options.small else CASES:
        leaf = options.scratch / f"out-of-core-{data.replace(' ', '-')}-{n_rows}x{width}"
        array = tables.mixture(
            leaf / "embeddings.npy", n_rows=n_rows, width=width, is_round=data != "mixture"
        )
        _write_samples(leaf, n_rows)
        runs, reads = [], []
        for turn in range(options.rounds):
            reads.append(read_cold(array))
            job = {"leaf": str(leaf), "out": str(leaf / "cluster"), "k": k, "alpha": alpha}
            runs.append(measuring.run_child("out_of_core", job))
            measuring.tell(
                f"out_of_core: {data} K={k} alpha={alpha} round {turn + 1}/{options.rounds}: "
                f"{runs[-1]['seconds']:.1f} s, one reading {reads[-1]:.1f} s, "
                f"{runs[-1]['anonymous_bytes'] / 1e6:.0f} MB anonymous"
            )
        seconds = [r["seconds"] for r in runs]
        cases.append(
            {
                **{name: runs[0][name] for name in ("n_iter", "inertia", "converged")},
                "data": data,
                "k": k,
                "alpha": alpha,
                "table_reads": runs[0]["table_reads"],
                "seconds": measuring.spread(seconds),
                "read_seconds": measuring.spread(reads),
                "over_read": measuring.ratios(seconds, reads),
                **{
                    name: max(r[name] for r in runs)
                    for name in ("anonymous_bytes", "resident_bytes", "max_rss_bytes")
                },
            }
        )
    return {
        "n": n_rows,
        "width": width,
        "bytes": 2 * n_rows * width,
        "cases": cases,
        "versions": measuring.versions("numpy", "numba"),
    }


def _write_samples(leaf: Path, n_rows: int) -> None:
    if (leaf / "samples.parquet").is_file():
        return
    frame = pl.DataFrame({"id": [f"{i:016x}" for i in range(n_rows)]}).with_columns(
        n_tokens=pl.lit(1), nll=pl.lit(1.0), proxy_norm=pl.lit(1.0)
    )
    artifacts.write_table(leaf, "samples.parquet", frame)


def parse(arguments: list[str]) -> Namespace:
    """Return the options of this benchmark."""
    parser = ArgumentParser(prog="benchmarks.out_of_core", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes: a smoke test")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--scratch", type=Path, default=measuring.OUT)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
