"""What docs/benchmarks.md says of training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.cells import cell, gigabytes, table

LOSSES = ("chunked", "full", "model")


def write(result: dict[str, Any]) -> Iterator[str]:
    """Yield the section."""
    yield "\n## Training\n"
    yield (
        f"`{Path(result['model']).name}`, {result['precision']} over float32 weights, AdamW, "
        f"{result['batch']} rows a step, {result['micro_batch']} a forward pass, "
        f"{result['steps']} steps of {result['tokens']:,} tokens (padding not counted) after one "
        f"that warms up, threads: {result['threads']}. All arms see the same rows in the same "
        "order. *weighted*: the stage `train` as CluSTER runs it. *unweighted*: the same steps, "
        "all weights 1. *trainer*: Transformers' Trainer, padding to the longest row of a pass. "
        "*trl*: TRL's SFTTrainer, which takes its loss in chunks too, without gradient "
        "checkpointing. A step lasts from the end of the one before to its own, logging included. "
        "Ours sorts a worker's rows by length before it cuts them into passes.\n"
    )
    rows = [
        [
            *(arm, cell(result["seconds"][arm]), cell(speed, 0)),
            cell(result["speed_of"][arm]) if arm in result["speed_of"] else "",
            *(gigabytes(result["resident_bytes"][arm]), f"{result['first_losses'][arm]:.4f}"),
        ]
        for arm, speed in result["tokens_per_second"].items()
    ]
    heads = ["arm", "s", "tok/s", "unweighted is faster, times", "peak", "first loss"]
    yield table(heads, rows)
    plan, weighting = result["plan"], result["weighted_over_plain"]
    yield (
        "\nA forward and backward pass with the weighted loss takes "
        f"{cell(weighting, 3)} times the one with the plain mean of the rows' losses, in turns in "
        f"one process ({len(weighting['values'])} pairs). Plan, shares and coefficients take "
        f"{1e3 * plan['seconds_per_step']['median']:.2f} ms a step, "
        f"{plan['share']['median']:.2%} of it.\n"
    )
    yield (
        "Peak of one forward and backward pass on top of weights and gradients. *chunked*: ours, "
        "where logits exist for a chunk of positions at a time. *full*: the same with all logits "
        "at once. *model*: the model's own loss.\n"
    )
    rows = [
        [
            f"{p['rows']} x {p['tokens']}",
            *(gigabytes(p["bytes"][loss]) for loss in LOSSES),
        ]
        for p in result["memory"]
    ]
    yield table(["rows x tokens", *LOSSES], rows)
