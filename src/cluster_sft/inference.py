"""Run a model over every row of a token store: in batches, on any number of processes, resumable.

A batch is computed whole by one process, which writes its rows of shared, memory-mapped arrays in
the scratch folder and then marks them done; a killed run continues from the marks.

Legend: B rows of a batch.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from transformers import PreTrainedModel

from cluster_sft import launching, models
from cluster_sft.artifacts import read_json, write_json
from cluster_sft.clocks import Clock
from cluster_sft.costs import peak_resident_bytes
from cluster_sft.errors import UserError
from cluster_sft.heads import head_is_exact
from cluster_sft.partial_results import Results, Writer
from cluster_sft.proxy import unknown_head
from cluster_sft.token_batches import (
    Batch,
    BatchPlan,
    TokenStore,
    build_batch,
    open_tokens,
    plan_batches,
)

if TYPE_CHECKING:
    from cluster_sft.params import Launch

AHEAD = 2  # batches built before, and written after, the one that the model runs


class Worker(Protocol):
    """What a process does of a job."""

    def __call__(
        self, job: dict[str, Any], *, rank: int, on_flush: Callable[[], None] = ...
    ) -> None:
        """Compute every unfinished batch that is this rank's."""
        ...


class Outputs(Protocol):
    """What is computed of a batch."""

    def __call__(
        self, model: PreTrainedModel, batch: Batch, *, exact_head: bool
    ) -> tuple[Tensor, ...]:
        """Return a row of each array for every row of the batch, in the order of the arrays."""
        ...


def run_workers(
    module: str,
    job: Mapping[str, Any],
    work: Worker,
    *,
    launch: Launch,
    total: int,
    done: Callable[[], int],
) -> float:
    """Run a job here, or in worker processes of `module`, under a progress bar of tokens.

    Returns the seconds that interrupted runs had spent on results that this one found.

    Args:
        module: dotted name of the module whose main calls `work`.
        job: JSON values; `processes` is added. `scratch` is the job's folder, `label` its name.
        work: what a worker does.
        launch: processes, and threads of all of them together.
        total: tokens of the whole job.
        done: returns how many of them are done.
    """
    use_gpu = launching.use_gpus(launch.processes)
    clock = Clock(Path(job["scratch"]) / "seconds.json")
    with tqdm(total=total, desc=job["label"], unit="tok", unit_scale=True) as bar:

        def show() -> None:
            if more := done() - bar.n:
                bar.update(more)
                clock.note()

        bar.update(done())
        bar.initial = bar.n
        if launch.processes > 1:
            launching.launch(
                module,
                job,
                processes=launch.processes,
                threads=launch.threads,
                use_gpu=use_gpu,
                scratch=Path(job["scratch"]),
                on_poll=show,
            )
            return clock.earlier
        threads = torch.get_num_threads()
        torch.set_num_threads(launch.threads or threads)
        try:
            work({**job, "processes": 1}, rank=0, on_flush=show)
        finally:
            torch.set_num_threads(threads)
    return clock.earlier


def compute(
    job: Mapping[str, Any],
    outputs: Outputs,
    *,
    rank: int,
    on_flush: Callable[[], None] = lambda: None,
    load: Callable[[torch.device], PreTrainedModel] | None = None,
) -> None:
    """Compute every unfinished batch whose number is `rank` modulo the job's processes.

    Args:
        job: `label`, `model`, `dtype`, `batch_tokens`, `processes`, `arrays` (names of the
            results), `scratch` (folder of the results) and `tokens` (folder of the token store).
        outputs: computes a batch.
        rank: of this process.
        on_flush: called after results were marked done.
        load: loads the model onto a device; None for the job's `model` in its `dtype`.

    Raises:
        UserError: the device is out of memory.
    """
    scratch = Path(job["scratch"])
    store, results = open_tokens(Path(job["tokens"])), Results.open(scratch, job["arrays"])
    plan = plan_batches(store.lengths, job["batch_tokens"])
    mine = [
        rows
        for batch in range(rank, len(plan), job["processes"])
        if not results.done[rows := plan.rows(batch)].all()
    ]
    facts: dict[str, Any] = {"exact_head": True}
    if mine:
        device = models.pick_device("auto", rank=rank)
        _use(device)
        if load is None:
            model = models.load_model(job["model"], dtype=job["dtype"], device=device)
        else:
            model = load(device)
        try:
            facts["exact_head"] = exact = _check_head(model, store, plan)
            _sweep(model, store, mine, Writer(results, on_flush), outputs, exact_head=exact)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{job['label']}: {device} is out of memory; lower launch.batch_tokens, which is "
                f"{job['batch_tokens']}"
            ) from error
        if not exact:
            facts["line"] = unknown_head(model)
    facts["peak_memory_bytes"] = peak_resident_bytes()
    write_json(scratch / f"worker-{rank}.json", facts)


@torch.inference_mode()
def _sweep(
    model: PreTrainedModel,
    store: TokenStore,
    batches: Sequence[np.ndarray],
    writer: Writer,
    outputs: Outputs,
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
            found = outputs(model, batch.to(model.device), exact_head=exact_head)
            behind.append(writing.submit(writer.write, batch.rows, *_to_host(found)))
            if len(behind) > AHEAD:
                behind.popleft().result()
        for future in behind:
            future.result()
        writer.flush()


def _use(device: torch.device) -> None:
    """Make a GPU the calling thread's own, for events, page-locked memory and contexts."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


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


def worker_facts(scratch: Path, processes: int) -> dict[str, Any]:
    """Join what the workers reported; a head of an unknown kind is also said on stderr."""
    reports = [read_json(scratch / f"worker-{rank}.json") for rank in range(processes)]
    for line in sorted({report["line"] for report in reports if "line" in report}):
        print(line, file=sys.stderr)
    return {
        "peak_memory_bytes": max(report["peak_memory_bytes"] for report in reports),
        "exact_head": all(report["exact_head"] for report in reports),
    }
