"""Stage train: weighted data-parallel fine-tuning on the selected rows.

The parent checks what can be checked, starts the worker processes and shows their progress. Every
worker reads the same rows, makes the same batch plan and computes its share of each step. What a
step computes does not depend on the number of processes, nor on how they share the model: a whole
copy each (DDP) or a part each (FSDP), see `parallelism`.

Reads dataset.parquet and subset.parquet, joined by id. Writes a Hugging Face model directory,
train_log.jsonl (a line per step), summary.json and tensorboard/; with LoRA the model is the merged
one and adapter/ holds the adapter alone. `fit` is the same training for other stages.
Dropout, in models that have it and in adapters, draws from (seed, step, forward pass): it changes
with the size of forward passes, not with the process count.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    broadcast_object_list,
)
from tqdm import tqdm

from cluster_sft import costs, launching
from cluster_sft.artifacts import SUMMARY, read_json, replace_text, write_json
from cluster_sft.checkpoints import latest_checkpoint, load_checkpoint
from cluster_sft.errors import UserError
from cluster_sft.models import arithmetic, local_path
from cluster_sft.objective import RowLoss
from cluster_sft.optimizers import make_optimizer
from cluster_sft.parallelism import make_parallelism
from cluster_sft.starting_model import head_gives_logits, make_model
from cluster_sft.trackers import check_trackers
from cluster_sft.training_loop import TRAIN_LOG, Session, read_log, train
from cluster_sft.training_results import FACTS, write_results
from cluster_sft.training_rows import (
    Selection,
    make_plan,
    read_rows,
    read_selection,
)
from cluster_sft.workload import check_processes, divisors

if TYPE_CHECKING:
    from cluster_sft.params import Launch
    from cluster_sft.stage_params import TrainParams

MOST_WORKERS = 8  # where no cluster needs one of its own


def run(
    params: TrainParams, *, dataset: Path, subset: Path, out: Path, scratch: Path, launch: Launch
) -> None:
    """Train on the subset's rows and write the model to `out`.

    Raises:
        UserError: processes that cannot play the workers, no such model, rows that do not join,
            batches that cannot be made, or a loss that is not finite.
        RuntimeError: the worker processes failed; the message names their log.
    """
    settings = params.model_dump(mode="json")
    facts = fit(settings, dataset=dataset, subset=subset, out=out, scratch=scratch, launch=launch)
    write_json(out / SUMMARY, facts)


def fit(
    settings: Mapping[str, Any],
    *,
    dataset: Path,
    subset: Path,
    out: Path,
    scratch: Path,
    launch: Launch,
    snapshots: Sequence[int] = (),
    keep_moments: bool = False,
    label: str = "train",
) -> dict[str, Any]:
    """Train on the subset's rows; keep the trained model, or snapshots of it on the way.

    Written to `out`: train_log.jsonl and tensorboard/; without snapshots the model directory as
    stage train writes it; with them, in its place, a folder `step-XXXXXXXX` for each, of
    `weights.safetensors` by the model's names and, where kept, `exp_avg.safetensors` and
    `exp_avg_sq.safetensors`, float32 by the same names.

    Args:
        settings: every field of TrainParams, as JSON values; `workers: None` cuts a step into
            as many forward passes on any number of processes, of which at most 8 are started.
        dataset: a prepared leaf.
        subset: a selected leaf, see `training_rows.read_selection` and `write_subset`.
        out: empty folder.
        scratch: folder of checkpoints, which survives a kill; a later call with the same settings
            and rows continues there.
        launch: processes and the size of forward passes.
        snapshots: steps, counted from 1, after which the trainable weights are kept.
        keep_moments: keep Adam's moments with each snapshot.
        label: the run's name in messages and the progress bar.

    Returns:
        What the run was and cost: steps, rows, tokens, seconds, memory, and `cost` as of `costs`.

    Raises:
        UserError: as `run`.
        RuntimeError: as `run`.
    """
    meter = costs.start()
    check_trackers(launch.trackers)
    processes = launch.processes
    if settings["workers"] is None:
        workers = max(d for d in divisors(settings["global_batch_size"]) if d <= MOST_WORKERS)
        processes = max(d for d in divisors(workers) if d <= processes)
        settings = {**settings, "workers": workers}
    params = cast("TrainParams", SimpleNamespace(**settings))
    check_processes(processes, workers=params.workers)
    use_gpu = launching.use_gpus(processes // launch.nodes)
    selection = read_selection(dataset, subset, weights=params.weights)
    plan = make_plan(selection, params)
    assert all(0 < step <= len(plan) for step in snapshots), "a snapshot is of no step of the run"
    job = {
        "params": dict(settings),
        "launch": launch.model_dump(mode="json"),
        "model": str(local_path(params.model)),
        "dataset": str(dataset.resolve()),
        "subset": str(subset.resolve()),
        "out": str(out.resolve()),
        "scratch": str(scratch.resolve()),
        "use_gpu": use_gpu,
        "snapshots": sorted(snapshots),
        "keep_moments": keep_moments,
        "label": label,
    }
    job["identity"] = _identity(job, selection)
    with tqdm(total=len(plan), desc=label, unit="step") as bar:
        launching.launch(
            "cluster_sft.training",
            job,
            processes=processes,
            threads=launch.threads,
            use_gpu=use_gpu,
            scratch=scratch.resolve(),
            on_poll=lambda: _show(bar, scratch / TRAIN_LOG),
            nodes=launch.nodes,
        )
    return _cost(read_json(scratch / FACTS), meter, out)


def _identity(job: Mapping[str, Any], selection: Selection) -> str:
    """Return a digest of what the run is: the same on any number of processes."""
    rows = [selection.ids, selection.weights_K.tolist(), selection.clusters_N.tolist()]
    marks = [job["params"], rows, job["snapshots"], job["keep_moments"]]
    return hashlib.sha256(json.dumps(marks, sort_keys=True).encode()).hexdigest()


def _cost(facts: dict[str, Any], meter: costs.Meter, out: Path) -> dict[str, Any]:
    """Return the facts with their cost; steps from before an interruption count as they took."""
    passes = facts["row_visits"]
    cost = meter.stop(
        out,
        forward_passes=passes,
        backward_passes=passes,
        tokens=facts["train_tokens"],
        peak_memory_bytes=facts["peak_memory_bytes"],
        earlier_seconds=facts.pop("resumed_seconds"),
    )
    return {**facts, "cost": cost}


def make_accelerator(*, use_gpu: bool) -> Accelerator:
    """Return the accelerator: the group of processes and how they communicate.

    Precision is the loop's own autocast over float32 weights, so accelerate's is off. FSDP is
    torch's own: accelerate's plugin does nothing on CPUs, and says nothing.
    """
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    # The others wait while the main process reads or writes the model, perhaps over a network.
    group = InitProcessGroupKwargs(timeout=timedelta(hours=1))
    return Accelerator(cpu=not use_gpu, mixed_precision="no", kwargs_handlers=[ddp, group])


def worker(job: dict[str, Any]) -> None:
    """Train as one of the job's processes; the main one writes the results."""
    accelerator = make_accelerator(use_gpu=job["use_gpu"])
    if accelerator.num_processes != job["processes"]:
        raise UserError(
            f"launch.processes asks for {job['processes']} processes, but accelerate started a "
            f"group of {accelerator.num_processes}; check the environment's launcher variables"
        )
    try:
        session = _open_session(job, accelerator)
        done = _resume(session)
        earlier = sum(entry["seconds"] for entry in read_log(session.scratch / TRAIN_LOG))
        train(session, done)
        write_results(session, job, resumed_seconds=earlier)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{job['label']}: GPU {accelerator.local_process_index} is out of memory; lower "
            "launch.micro_batch or launch.batch_tokens, or set launch.gradient_checkpointing: true "
            "or launch.parallelism: fsdp"
        ) from error
    accelerator.wait_for_everyone()


def _open_session(job: dict[str, Any], accelerator: Accelerator) -> Session:
    params = cast("TrainParams", SimpleNamespace(**job["params"]))
    launch = cast("Launch", SimpleNamespace(**job["launch"]))
    rows = read_rows(Path(job["dataset"]), Path(job["subset"]), weights=params.weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the parent has shown the plan's warning
        plan = make_plan(rows.selection, params)
    parallelism = make_parallelism(launch.parallelism, accelerator)
    make = partial(make_model, params, job["model"])
    model, adapter = make(parallelism.first_device)
    exact = parallelism.agree(lambda: head_gives_logits(model, rows, plan[0]))
    if launch.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    row_loss = RowLoss(model, full_logits=not exact).train()
    row_loss = parallelism.wrap(
        row_loss, precision=arithmetic(params.precision, accelerator.device)
    )
    optimizer = make_optimizer(
        params.optimizer, row_loss.named_parameters(), weight_decay=params.weight_decay
    )
    return Session(
        accelerator=accelerator,
        parallelism=parallelism,
        make_model=make,
        row_loss=row_loss,
        optimizer=optimizer,
        rows=rows,
        plan=plan,
        params=params,
        launch=launch,
        scratch=Path(job["scratch"]),
        identity=job["identity"],
        model=model,
        adapter=adapter,
        label=job["label"],
        snapshots=frozenset(job["snapshots"]),
        keep_moments=job["keep_moments"],
    )


def _resume(session: Session) -> int:
    """Load the last complete checkpoint and cut the log to it; return the steps done."""
    # As the main process sees it: on a shared file system other nodes may see an older state.
    is_main = session.accelerator.is_main_process
    known = latest_checkpoint(session.checkpoints, identity=session.identity) if is_main else None
    [found] = broadcast_object_list([known])
    done = found[0] if found else 0
    if is_main:
        path = session.scratch / TRAIN_LOG
        kept = [entry for entry in read_log(path) if entry["step"] <= done]
        replace_text(path, "".join(json.dumps(entry) + "\n" for entry in kept))
    if found:
        load_checkpoint(found[1], model=session.model, optimizer=session.optimizer)
    session.accelerator.wait_for_everyone()
    return done


def _show(bar: tqdm[Any], log: Path) -> None:
    entries = read_log(log)
    if entries and entries[-1]["step"] != bar.n:
        bar.set_postfix(loss=f"{entries[-1]['loss']:.4f}", refresh=False)
        bar.update(entries[-1]["step"] - bar.n)


if __name__ == "__main__":
    launching.work(worker, finishes=True)
