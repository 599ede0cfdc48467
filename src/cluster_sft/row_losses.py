"""The mean loss of every row of a token store, under one model or several, on any processes.

Each pass has a folder of its own for its partial results, so that a killed run continues where it
was. Computed in length-sorted batches without autograd; log-softmax and sums in float32 or wider.

Legend: N rows, B rows of a batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from cluster_sft import inference, launching, models
from cluster_sft.errors import UserError
from cluster_sft.heads import full_log_probs, head_inputs, token_log_probs
from cluster_sft.partial_results import Results
from cluster_sft.token_batches import Batch, open_tokens

if TYPE_CHECKING:
    from cluster_sft.params import Launch


@dataclass(frozen=True)
class Pass:
    """One model over all rows.

    Attributes:
        folder: of the pass's partial results.
        weights: a safetensors file of weights, by parameter name, that replace the model's own.
    """

    folder: Path
    weights: Path | None = None


@dataclass(frozen=True)
class Losses:
    """What the passes gave.

    Attributes:
        nll: of every pass (N,) float32, mean over the row's supervised tokens in nats; NaN for a
            row without any, infinite where the model's loss is not finite.
        tokens: that went through a model, all passes together.
        resumed_tokens: those of them that an earlier, interrupted run had computed.
        earlier_seconds: that it took for them.
        peak_memory_bytes: of the largest process.
    """

    nll: list[np.ndarray]
    tokens: int
    resumed_tokens: int
    earlier_seconds: float
    peak_memory_bytes: int


def row_losses(
    tokens: Path,
    passes: Sequence[Pass],
    *,
    model: str,
    dtype: str,
    launch: Launch,
    scratch: Path,
    label: str,
) -> Losses:
    """Return the mean loss of every row of the token store in `tokens`, pass by pass.

    Args:
        tokens: folder of the token store.
        passes: the models.
        model: name or directory of the model.
        dtype: of its weights while it runs.
        launch: processes, threads of all of them together, and tokens of a batch.
        scratch: folder of the worker processes' files.
        label: what the progress bar calls this.

    Raises:
        UserError: no such model, or weights that are not its own.
    """
    lengths = open_tokens(tokens).lengths
    results = [_results(one.folder, len(lengths)) for one in passes]

    def done() -> int:
        return sum(int(lengths[r.done.astype(bool)].sum()) for r in results)

    resumed = done()
    job = {
        "label": label,
        "model": str(models.local_path(model)),
        "dtype": dtype,
        "arrays": ["nll"],
        "tokens": str(tokens.resolve()),
        "scratch": str(scratch.resolve()),
        "batch_tokens": launch.batch_tokens,
        "passes": [[str(p.folder.resolve()), str(p.weights or "")] for p in passes],
    }
    earlier = inference.run_workers(
        "cluster_sft.row_losses",
        job,
        work,
        launch=launch,
        total=int(lengths.sum()) * len(passes),
        done=done,
    )
    assert all(r.done.all() for r in results), "a batch was given to no process"
    facts = [inference.worker_facts(p.folder, launch.processes) for p in passes]
    return Losses(
        nll=[np.array(r["nll"]) for r in results],
        tokens=int(lengths.sum()) * len(passes),
        resumed_tokens=resumed,
        earlier_seconds=earlier,
        peak_memory_bytes=max(f["peak_memory_bytes"] for f in facts),
    )


def _results(folder: Path, rows: int) -> Results:
    folder.mkdir(parents=True, exist_ok=True)
    return Results.create(folder, {"nll": ((rows,), np.float32)})


def work(job: dict[str, Any], *, rank: int, on_flush: Callable[[], None] = lambda: None) -> None:
    """Compute this rank's unfinished batches of every pass."""
    for folder, weights in job["passes"]:

        def load(device: torch.device, weights: str = weights) -> PreTrainedModel:
            model = models.load_model(job["model"], dtype=job["dtype"], device=device)
            if weights:
                _replace_weights(model, Path(weights))
            return model

        inference.compute(
            {**job, "scratch": folder}, _outputs, rank=rank, on_flush=on_flush, load=load
        )


def _replace_weights(model: PreTrainedModel, path: Path) -> None:
    unknown = model.load_state_dict(load_file(path), strict=False).unexpected_keys
    if unknown:
        raise UserError(
            f"{path}: weight {unknown[0]!r} is none of {type(model).__name__}'s; the snapshot was "
            "taken of another model: run its stage again"
        )


def _outputs(model: PreTrainedModel, batch: Batch, *, exact_head: bool) -> tuple[Tensor, ...]:
    """Return the mean loss of each row of a batch, (B,) float32."""
    if exact_head:
        hidden = head_inputs(model, batch.input_ids).flatten(0, 1)[batch.positions]
        log_probs = token_log_probs(model, hidden, batch.targets)
    else:
        arguments = (batch.input_ids, batch.attention_mask, batch.positions, batch.targets)
        _, log_probs = full_log_probs(model, *arguments)
    sums = torch.segment_reduce(log_probs, "sum", lengths=batch.n_tokens, unsafe=True, initial=0)
    nll = (-sums / batch.n_tokens).float()
    return (torch.where(nll.isnan() & (batch.n_tokens > 0), torch.inf, nll),)


if __name__ == "__main__":
    launching.work(lambda job: work(job, rank=int(os.environ.get("RANK", "0"))))
