"""Stage embed: the gradient-proxy embedding of every prepared row, scaled to unit length.

Reads dataset.parquet. Writes embeddings.npy (N, H) float16, samples.parquet and summary.json, in
the order of the data. A batch is computed whole by one process, which writes its rows of shared,
memory-mapped arrays in the scratch folder and then marks them done; a killed run continues from the
marks. Rows with a non-finite proxy are dropped; a zero proxy stays a zero row.

Legend: N rows, H hidden size, B rows of a batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cluster_sft import costs, inference, launching, models
from cluster_sft.artifacts import SUMMARY, read_table, write_json, write_table
from cluster_sft.errors import UserError
from cluster_sft.partial_results import Results
from cluster_sft.proxy import proxies_at
from cluster_sft.token_batches import Batch, open_tokens, pack_tokens, plan_batches

if TYPE_CHECKING:
    from cluster_sft.params import Launch
    from cluster_sft.stage_params import EmbedParams


def run(params: EmbedParams, *, dataset: Path, out: Path, scratch: Path, launch: Launch) -> None:
    """Embed every row of the prepared data with the model's starting weights.

    Args:
        params: the model's name and the dtype it runs in.
        dataset: leaf of stage prepare.
        out: empty folder for the payload.
        scratch: folder of partial results; a later call with the same data and model resumes.
        launch: processes, threads of all of them together, and tokens of a batch.

    Raises:
        UserError: no rows, no such model, or no row with a finite proxy.
    """
    meter = costs.start()
    ids = read_table(dataset, "dataset.parquet", ["id"])["id"]
    if not len(ids):
        raise UserError(f"{dataset}: dataset.parquet has no rows; there is nothing to embed")
    pack_tokens(dataset / "dataset.parquet", scratch)
    model = str(models.local_path(params.model))
    arrays = result_arrays(len(ids), models.head_width(model))
    results = Results.create(scratch, arrays)
    lengths = open_tokens(scratch).lengths
    resumed = int(lengths[results.done.astype(bool)].sum())
    job = {"model": model, "dtype": params.dtype, "arrays": list(arrays)}
    job |= {"scratch": str(scratch), "tokens": str(scratch), "batch_tokens": launch.batch_tokens}
    earlier = inference.run_workers(
        "cluster_sft.embedding",
        {"label": "embed", **job},
        work,
        launch=launch,
        total=int(lengths.sum()),
        done=lambda: int(lengths[results.done.astype(bool)].sum()),
    )
    assert results.done.all(), "a batch was given to no process"
    tokens = int(lengths.sum())
    workers = inference.worker_facts(scratch, launch.processes)
    kept = _write_samples(results, ids, out)
    cost = meter.stop(
        out,
        forward_passes=len(ids),
        tokens=tokens,
        peak_memory_bytes=workers["peak_memory_bytes"],
        still_to_store=len(kept) * results["embeddings"].shape[1] * 2,
        earlier_seconds=earlier,
    )
    facts = {
        "tokens": tokens,
        "padding_share": plan_batches(lengths, launch.batch_tokens).padding,
        "processes": launch.processes,
        "seconds": cost["seconds"],
        "tokens_per_second": tokens / cost["seconds"],
        "resumed_tokens": resumed,
        "cost": cost,
        **workers,
    }
    write_json(out / SUMMARY, {**_summary(results, ids, kept), **facts})
    # Last, since without its array the scratch folder cannot be resumed.
    results.move("embeddings", kept, out / "embeddings.npy")


def result_arrays(n_rows: int, width: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Return shape and dtype of what a worker computes of N rows, in the order of its outputs."""
    return {
        "embeddings": ((n_rows, width), np.float16),
        "n_tokens": ((n_rows,), np.int32),
        "nll": ((n_rows,), np.float32),
        "norm": ((n_rows,), np.float32),
    }


def work(job: dict[str, Any], *, rank: int, on_flush: Callable[[], None] = lambda: None) -> None:
    """Embed every unfinished batch that is this rank's."""
    inference.compute(job, _outputs, rank=rank, on_flush=on_flush)


def _outputs(model: PreTrainedModel, batch: Batch, *, exact_head: bool) -> tuple[Tensor, ...]:
    """Return unit embeddings (B, H) float16, n_tokens int32, nll and ||g|| float32 of a batch."""
    # Padding is on the right, where a causal model cannot see it; the check of the head has
    # compared this with a masked forward.
    mask = None if exact_head else batch.attention_mask
    proxy = proxies_at(
        model,
        batch.input_ids,
        mask,
        batch.positions,
        batch.targets,
        batch.n_tokens,
        exact_head=exact_head,
    )
    wide = proxy.embedding.double()
    norm = torch.linalg.vector_norm(wide, dim=1)
    unit = wide / norm.clamp(min=torch.finfo(wide.dtype).tiny).unsqueeze(1)
    return unit.half(), proxy.n_tokens.int(), proxy.nll.float(), norm.float()


def _write_samples(results: Results, ids: pl.Series, out: Path) -> np.ndarray:
    """Write samples.parquet, and return the positions of its rows: those with a finite proxy."""
    finite = np.isfinite(results["norm"]) & np.isfinite(results["nll"])
    if not finite.any():
        raise UserError(
            f"all {len(ids)} gradient proxies are non-finite; the model's weights hold NaN or "
            "overflow: check them, or set model.dtype to fp32"
        )
    samples = pl.DataFrame(
        {
            "id": ids,
            "n_tokens": np.asarray(results["n_tokens"]),
            "nll": np.asarray(results["nll"]),
            "proxy_norm": np.asarray(results["norm"]),
        }
    ).filter(finite)
    write_table(out, "samples.parquet", samples)
    return np.flatnonzero(finite)


def _summary(results: Results, ids: pl.Series, kept: np.ndarray) -> dict[str, Any]:
    dropped = np.setdiff1d(np.arange(len(ids)), kept)
    return {
        "n": len(kept),
        "hidden_size": results["embeddings"].shape[1],
        "dropped_non_finite": len(dropped),
        "dropped_ids": ids[dropped].to_list(),
        "zero_rows": int((results["norm"][kept] == 0).sum()),
        "supervised_tokens": int(results["n_tokens"][kept].sum(dtype=np.int64)),
    }


if __name__ == "__main__":
    launching.work(lambda job: work(job, rank=int(os.environ.get("RANK", "0"))))
