"""Selection of 10 million rows: clusters.parquet to subset.parquet, and the rows' own text.

Two figures. `choice` is what the stage does up to and including subset.parquet: it reads
clusters.parquet and never the data. `stage` is the whole stage with subset.jsonl, which copies the
text of the chosen rows out of dataset.parquet and so depends on how long that is.
"""

from __future__ import annotations

import json
import shutil
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import measuring
from cluster_sft import selection
from cluster_sft.params import Launch
from cluster_sft.stage_params import SelectParams

SIZES = [10_000, 100_000, 1_000_000, 10_000_000]
SMALL_SIZES = [1_000]
SHARES = [0.6, 0.25, 0.1, 0.05]  # of the clusters, the largest first
BLOCK = 1 << 18
RECORD = '{"instruction": "Write function %d.", "input": "", "output": "'
STRATEGIES = ["cluster", "uniform", "random"]


def write_leaves(folder: Path, n_rows: int, *, record_bytes: int) -> None:
    """Write a clusters leaf of random ids and, with record_bytes, the data it belongs to."""
    rng = np.random.default_rng([0, n_rows])
    number = np.sort(rng.integers(0, 1 << 63, n_rows, dtype=np.uint64))
    text = number.byteswap().tobytes().hex().encode()
    offsets = pa.py_buffer(np.arange(n_rows + 1, dtype=np.int64) * 16)
    ids = pa.LargeStringArray.from_buffers(n_rows, offsets, pa.py_buffer(text))
    clusters = folder / "clusters"
    clusters.mkdir(parents=True)
    frame = pl.DataFrame(
        {
            "id": pl.Series(pl.from_arrow(ids)),
            "cluster": rng.choice(len(SHARES), n_rows, p=SHARES).astype(np.int32),
            "distance": rng.random(n_rows, dtype=np.float32),
        }
    )
    frame.write_parquet(clusters / "clusters.parquet", compression="zstd")
    (clusters / "summary.json").write_text(json.dumps({"zero_rows": []}))
    if record_bytes:
        _write_data(folder / "dataset", frame["id"], rng.permutation(n_rows), record_bytes)


def _write_data(folder: Path, ids: pl.Series, source_rows: np.ndarray, size: int) -> None:
    folder.mkdir()
    filler = "def f(x): return x + 1  # " * (size // 26 + 1)
    with pq.ParquetWriter(
        folder / "dataset.parquet",
        pa.schema(
            [("id", pa.large_string()), ("source_row", pa.int64()), ("record", pa.large_string())]
        ),
        compression="zstd",
    ) as writer:
        for low in range(0, len(ids), BLOCK):
            rows = source_rows[low : low + BLOCK]
            heads = [RECORD % row for row in rows]
            records = [head + filler[: max(0, size - len(head) - 2)] + '"}' for head in heads]
            block = {"id": ids[low : low + BLOCK].to_list(), "source_row": rows, "record": records}
            writer.write_table(pa.table(block, schema=writer.schema))


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Measure one selection in this process."""
    folder, out = Path(job["folder"]), Path(job["out"])
    params = SelectParams(strategy=job["strategy"], ratio=0.5)
    clusters = folder / "clusters"
    shutil.rmtree(out, ignore_errors=True)
    (out / "scratch").mkdir(parents=True)

    def choose() -> None:
        selection.select(params, dataset=folder / "dataset", clusters=clusters, out=out)

    def stage() -> None:
        selection.run(
            params,
            dataset=folder / "dataset",
            clusters=clusters,
            out=out,
            scratch=out / "scratch",
            launch=Launch(),
        )

    with measuring.MemoryPeak() as peak:
        seconds, _ = measuring.timed(stage if job["whole"] else choose)
    rows = pq.ParquetFile(out / "subset.parquet").metadata.num_rows
    shutil.rmtree(out)
    return {"seconds": seconds, "rows": rows, **peak.facts()}


def measure(options: Namespace) -> dict[str, Any]:
    """Return growth over N for the choice alone, and for the whole stage up to --text-rows."""
    folder = options.scratch / "selection"
    sizes = SMALL_SIZES if options.small else SIZES
    points = []
    for n_rows in sizes:
        whole = n_rows <= options.text_rows
        shutil.rmtree(folder, ignore_errors=True)
        measuring.tell(f"selection: writing {n_rows:,} rows")
        write_leaves(folder, n_rows, record_bytes=options.record_bytes if whole else 0)
        for strategy in STRATEGIES:
            for with_text in [False, True] if whole and strategy == "cluster" else [False]:
                job = {
                    "folder": str(folder),
                    "out": str(folder / "out"),
                    "strategy": strategy,
                    "whole": with_text,
                }
                runs = [measuring.run_child("selection", job) for _ in range(options.rounds)]
                point = {
                    "n": n_rows,
                    "strategy": strategy,
                    "part": "stage" if with_text else "choice",
                    "rows": runs[0]["rows"],
                    "seconds": measuring.spread([r["seconds"] for r in runs]),
                    "anonymous_bytes": max(r["anonymous_bytes"] for r in runs),
                    "resident_bytes": max(r["resident_bytes"] for r in runs),
                }
                points.append(point)
                measuring.tell(
                    f"selection: {n_rows:,} rows, {strategy}, {point['part']}: "
                    f"{point['seconds']['median']:.2f} s, "
                    f"{point['resident_bytes'] / 1e9:.2f} GB"
                )
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "points": points,
        "record_bytes": options.record_bytes,
        "versions": measuring.versions("polars", "numpy", "pyarrow"),
    }


def parse(arguments: list[str]) -> Namespace:
    """Return the options of this benchmark."""
    parser = ArgumentParser(prog="benchmarks.selection", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes: a smoke test")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record-bytes", type=int, default=600, help="of a row's own text")
    parser.add_argument("--text-rows", type=int, default=1_000_000, help="most rows with text")
    parser.add_argument("--scratch", type=Path, default=measuring.OUT)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
