"""Stage embed: the gradient-proxy embedding of every prepared row, scaled to unit length.

Reads dataset.parquet. Writes embeddings.npy (N, H) float16, samples.parquet and summary.json, in
the order of the data. A batch is computed whole by one process, which writes its rows of shared,
memory-mapped arrays in the scratch folder and then marks them done; a killed run continues from the
marks. Rows with a non-finite proxy are dropped; a zero proxy stays a zero row.

Legend: N rows, H hidden size, B rows of a batch.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from transformers import PreTrainedModel

from cluster_sft import launching, models
from cluster_sft.artifacts import (
    SUMMARY,
    read_json,
    read_table,
    write_json,
    write_table,
)
from cluster_sft.errors import UserError
from cluster_sft.heads import head_is_exact
from cluster_sft.partial_results import Results, Writer
from cluster_sft.proxy import proxies_at, unknown_head
from cluster_sft.token_batches import (
    OFFSETS,
    Batch,
    BatchPlan,
    TokenStore,
    build_batch,
    open_tokens,
    pack_tokens,
    plan_batches,
)

if TYPE_CHECKING:
    from cluster_sft.params import EmbedParams, Launch

AHEAD = 2  # batches built before, and written after, the one that the model runs


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
    started = time.perf_counter()
    ids = read_table(dataset, "dataset.parquet", ["id"])["id"]
    if not len(ids):
        raise UserError(f"{dataset}: dataset.parquet has no rows; there is nothing to embed")
    scratch.mkdir(parents=True, exist_ok=True)
    if not (scratch / OFFSETS).is_file():
        pack_tokens(dataset / "dataset.parquet", scratch)
    model = str(models.local_path(params.model))
    results = Results.create(scratch, rows=len(ids), width=models.head_width(model))
    lengths = open_tokens(scratch).lengths
    resumed = int(lengths[results.done.astype(bool)].sum())
    job = {
        "model": model,
        "dtype": params.dtype,
        "scratch": str(scratch),
        "batch_tokens": launch.batch_tokens,
    }
    _compute(job, launch, results, lengths)
    assert results.done.all(), "a batch was given to no process"
    facts = {
        "tokens": int(lengths.sum()),
        "padding_share": plan_batches(lengths, launch.batch_tokens).padding,
        "processes": launch.processes,
        "seconds": (seconds := time.perf_counter() - started),
        "tokens_per_second": (int(lengths.sum()) - resumed) / seconds,
        "resumed_tokens": resumed,
        **_worker_facts(scratch, launch.processes),
    }
    _finish(results, ids, out, facts)


def _compute(job: dict[str, Any], launch: Launch, results: Results, lengths: np.ndarray) -> None:
    """Run the job's batches, here or in worker processes, under a progress bar."""
    use_gpu = launching.use_gpus(launch.processes)
    with tqdm(total=int(lengths.sum()), desc="embed", unit="tok", unit_scale=True) as bar:

        def show() -> None:
            bar.update(int(lengths[results.done.astype(bool)].sum()) - bar.n)

        show()
        bar.initial = bar.n
        if launch.processes > 1:
            launching.launch(
                "cluster_sft.embedding",
                job,
                processes=launch.processes,
                threads=launch.threads,
                use_gpu=use_gpu,
                scratch=Path(job["scratch"]),
                on_poll=show,
            )
            return
        threads = torch.get_num_threads()
        torch.set_num_threads(launch.threads or threads)
        try:
            work({**job, "processes": 1}, rank=0, on_flush=show)
        finally:
            torch.set_num_threads(threads)


def work(job: dict[str, Any], *, rank: int, on_flush: Callable[[], None] = lambda: None) -> None:
    """Compute every unfinished batch whose number is `rank` modulo the job's processes."""
    scratch = Path(job["scratch"])
    store, results = open_tokens(scratch), Results.open(scratch)
    plan = plan_batches(store.lengths, job["batch_tokens"])
    mine = [
        rows
        for batch in range(rank, len(plan), job["processes"])
        if not results.done[rows := plan.rows(batch)].all()
    ]
    exact = True
    if mine:
        device = models.pick_device("auto", rank=rank)
        _use(device)
        model = models.load_model(job["model"], dtype=job["dtype"], device=device)
        try:
            exact = _check_head(model, store, plan)
            _embed(model, store, mine, Writer(results, on_flush), exact_head=exact)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"embed: {device} is out of memory; lower launch.batch_tokens, which is "
                f"{job['batch_tokens']}"
            ) from error
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    facts = {"peak_memory_bytes": peak, "exact_head": exact}
    if not exact:
        facts["line"] = unknown_head(model)
    write_json(scratch / f"worker-{rank}.json", facts)


@torch.inference_mode()
def _embed(
    model: PreTrainedModel,
    store: TokenStore,
    batches: Sequence[np.ndarray],
    writer: Writer,
    *,
    exact_head: bool,
) -> None:
    """Run the model over batches while one thread builds the next and another writes the last."""
    on_gpu = model.device.type == "cuda"

    def read(rows: np.ndarray) -> Batch:
        batch = build_batch(store, rows)
        return batch.pin() if on_gpu else batch

    def thread() -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, initializer=_use, initargs=(model.device,))

    with thread() as reader, thread() as writing:
        ahead = deque(reader.submit(read, rows) for rows in batches[:AHEAD])
        behind: deque[Future[None]] = deque()
        for i in range(len(batches)):
            batch = ahead.popleft().result()
            if i + AHEAD < len(batches):
                ahead.append(reader.submit(read, batches[i + AHEAD]))
            outputs = _outputs(model, batch.to(model.device), exact_head=exact_head)
            behind.append(writing.submit(writer.write, batch.rows, *_to_host(outputs)))
            if len(behind) > AHEAD:
                behind.popleft().result()
        for future in behind:
            future.result()
        writer.flush()


def _use(device: torch.device) -> None:
    """Make a GPU the calling thread's own, for events, page-locked memory and contexts."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


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


def _to_host(outputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Any]:
    """Start copying to page-locked host memory; the event tells when it is there."""
    if outputs[0].device.type != "cuda":
        return outputs, None
    hosts = tuple(torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in outputs)
    for host, x in zip(hosts, outputs, strict=True):
        host.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return hosts, copied


def _check_head(model: PreTrainedModel, store: TokenStore, plan: BatchPlan) -> bool:
    """Compare the short way to log p with the complete forward on a row of median length."""
    middle = len(plan.order) // 2
    for row in np.concatenate([plan.order[middle:], plan.order[:middle]]):
        batch = build_batch(store, np.asarray([row])).to(model.device)
        if len(batch.positions):
            # One token of padding, so that leaving the mask out is on trial as well.
            pad = (0, 1)
            return head_is_exact(
                model,
                functional.pad(batch.input_ids, pad),
                functional.pad(batch.attention_mask, pad),
                batch.positions,
                batch.targets,
                masked=False,
            )
    return True


def _worker_facts(scratch: Path, processes: int) -> dict[str, Any]:
    """Join what the workers reported; a head of an unknown kind is also said on stderr."""
    reports = [read_json(scratch / f"worker-{rank}.json") for rank in range(processes)]
    for line in sorted({report["line"] for report in reports if "line" in report}):
        print(line, file=sys.stderr)
    return {
        "peak_memory_bytes": max(report["peak_memory_bytes"] for report in reports),
        "exact_head": all(report["exact_head"] for report in reports),
    }


def _finish(results: Results, ids: pl.Series, out: Path, facts: dict[str, Any]) -> None:
    """Write the payload, without the rows whose proxy is not finite."""
    finite = np.isfinite(results.norm) & np.isfinite(results.nll)
    kept = np.flatnonzero(finite)
    if not len(kept):
        raise UserError(
            f"all {len(ids)} gradient proxies are non-finite; the model's weights hold NaN or "
            "overflow: check them, or set model.dtype to fp32"
        )
    samples = pl.DataFrame(
        {
            "id": ids,
            "n_tokens": np.asarray(results.n_tokens),
            "nll": np.asarray(results.nll),
            "proxy_norm": np.asarray(results.norm),
        }
    ).filter(finite)
    write_table(out, "samples.parquet", samples)
    dropped = ids.filter(pl.Series(~finite)).to_list()
    summary = {
        "n": len(kept),
        "hidden_size": results.embeddings.shape[1],
        "dropped_non_finite": len(dropped),
        "dropped_ids": dropped,
        "zero_rows": int((results.norm[kept] == 0).sum()),
        "supervised_tokens": int(results.n_tokens[kept].sum(dtype=np.int64)),
        **facts,
    }
    write_json(out / SUMMARY, summary)
    # Last, since without its array the scratch folder cannot be resumed.
    results.move_embeddings(kept, out / "embeddings.npy")


if __name__ == "__main__":
    launching.work(lambda job: work(job, rank=int(os.environ.get("RANK", "0"))))
