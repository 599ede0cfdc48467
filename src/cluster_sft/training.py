"""Stage train: weighted data-parallel fine-tuning on the selected rows.

The parent checks what can be checked, starts the worker processes and shows their progress. Every
worker reads the same rows, makes the same batch plan and computes its share of each step; gradients
are averaged by DDP. What a step computes does not depend on the number of processes.

Reads dataset.parquet and subset.parquet, joined by id. Writes a Hugging Face model directory,
train_log.jsonl (a line per step), summary.json and tensorboard/.
Dropout, in models that have it, draws from (seed, process): only without it is the result
independent of the process count.
"""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from tqdm import tqdm

from cluster_sft import launching
from cluster_sft.batching import Step
from cluster_sft.checkpoints import latest_checkpoint
from cluster_sft.errors import UserError
from cluster_sft.heads import head_is_exact, supervised_positions
from cluster_sft.models import load_model, load_tokenizer, local_path
from cluster_sft.objective import RowLoss
from cluster_sft.optimizers import make_optimizer
from cluster_sft.training_loop import TRAIN_LOG, Session, read_log, train
from cluster_sft.training_rows import TrainingRows, collate, make_plan, read_rows, read_selection
from cluster_sft.workload import check_processes

if TYPE_CHECKING:
    from cluster_sft.params import Launch, TrainParams

SAVED_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def run(
    params: TrainParams, *, dataset: Path, subset: Path, out: Path, scratch: Path, launch: Launch
) -> None:
    """Train on the subset's rows and write the model to `out`.

    Raises:
        UserError: processes that cannot play the workers, no such model, rows that do not join,
            batches that cannot be made, or a loss that is not finite.
        RuntimeError: the worker processes failed; the message names their log.
    """
    check_processes(launch.processes, workers=params.workers)
    use_gpu = launching.use_gpus(launch.processes)
    selection = read_selection(dataset, subset, weights=params.weights)
    plan = make_plan(selection, params)
    model = local_path(params.model)
    settings = params.model_dump(mode="json")
    marks = [settings, selection.ids, selection.weights_K.tolist(), selection.clusters_N.tolist()]
    job = {
        "params": settings,
        "launch": launch.model_dump(mode="json"),
        "model": str(model),
        "dataset": str(dataset.resolve()),
        "subset": str(subset.resolve()),
        "out": str(out.resolve()),
        "scratch": str(scratch.resolve()),
        "use_gpu": use_gpu,
        "identity": hashlib.sha256(json.dumps(marks, sort_keys=True).encode()).hexdigest(),
    }
    with tqdm(total=len(plan), desc="train", unit="step") as bar:
        launching.launch(
            "cluster_sft.training",
            job,
            processes=launch.processes,
            threads=launch.threads,
            use_gpu=use_gpu,
            scratch=scratch.resolve(),
            on_poll=lambda: _show(bar, scratch / TRAIN_LOG),
        )


def make_accelerator(*, use_gpu: bool) -> Accelerator:
    """Return the accelerator; how gradients and weights are spread over processes is decided here.

    Precision is the loop's own autocast over float32 weights, so accelerate's is off.
    """
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    return Accelerator(cpu=not use_gpu, mixed_precision="no", kwargs_handlers=[ddp])


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
        train(session, _resume(session))
        _write_results(session, Path(job["model"]), Path(job["out"]))
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"train: GPU {accelerator.local_process_index} is out of memory; lower "
            "launch.micro_batch or launch.batch_tokens, or set launch.gradient_checkpointing: true"
        ) from error
    accelerator.wait_for_everyone()


def _open_session(job: dict[str, Any], accelerator: Accelerator) -> Session:
    params = cast("TrainParams", SimpleNamespace(**job["params"]))
    launch = cast("Launch", SimpleNamespace(**job["launch"]))
    rows = read_rows(Path(job["dataset"]), Path(job["subset"]), weights=params.weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the parent has shown the plan's warning
        plan = make_plan(rows.selection, params)
    torch.manual_seed(params.seed * accelerator.num_processes + accelerator.process_index)
    model = load_model(job["model"], dtype="fp32", device=accelerator.device)
    exact = _head_is_exact(model, rows, plan[0], accelerator.device)
    if launch.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    row_loss = RowLoss(model, full_logits=not exact).train()
    optimizer = make_optimizer(
        params.optimizer, row_loss.named_parameters(), weight_decay=params.weight_decay
    )
    row_loss, optimizer = accelerator.prepare(row_loss, optimizer)
    return Session(
        accelerator,
        row_loss,
        optimizer,
        rows,
        plan,
        params,
        launch,
        Path(job["scratch"]),
        job["identity"],
    )


def _head_is_exact(model: Any, rows: TrainingRows, step: Step, device: torch.device) -> bool:
    """Whether the head alone gives the model's own logits, tried on one row."""
    first = next(positions for positions, _ in step if len(positions))[:1]
    ids, mask, labels = collate(rows, first, device=device)
    marked = supervised_positions(labels, mask)
    targets = labels.roll(-1, dims=1)[marked]
    exact = head_is_exact(model, ids, mask, marked.flatten().nonzero()[:, 0], targets)
    if not exact:
        print("the head alone does not give this model's logits: training on full logits")
    return exact


def _resume(session: Session) -> int:
    """Load the last complete checkpoint and cut the log to it; return the steps done."""
    found = latest_checkpoint(session.checkpoints, identity=session.identity)
    done = found[0] if found else 0
    if session.accelerator.is_main_process:
        path = session.scratch / TRAIN_LOG
        kept = [entry for entry in read_log(path) if entry["step"] <= done]
        path.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
    if found:
        session.accelerator.load_state(str(found[1]))
    session.accelerator.wait_for_everyone()
    return done


def _write_results(session: Session, source: Path, out: Path) -> None:
    accelerator = session.accelerator
    peak = torch.tensor([_peak_memory(accelerator.device)], dtype=torch.float64)
    peaks = cast("torch.Tensor", accelerator.gather(peak.to(accelerator.device)))
    if not accelerator.is_main_process:
        return
    model = accelerator.unwrap_model(session.row_loss).model
    model.to(SAVED_DTYPES[session.params.precision]).save_pretrained(out)
    # safetensors 0.8 writes files that only their owner can read.
    for weights in out.glob("*.safetensors"):
        weights.chmod((out / "config.json").stat().st_mode)
    load_tokenizer(str(source)).save_pretrained(out)
    log = session.scratch / TRAIN_LOG
    shutil.copyfile(log, out / TRAIN_LOG)
    (out / "tensorboard").mkdir()
    # Their own names hold the host's.
    for number, events in enumerate(sorted((session.scratch / "tensorboard").iterdir())):
        shutil.copyfile(events, out / "tensorboard" / f"events.out.tfevents.{number}")
    entries = read_log(log)
    seconds = sum(entry["seconds"] for entry in entries)
    tokens = sum(entry["tokens"] for entry in entries)
    summary = {
        "steps": len(entries),
        "rows": len(session.rows.selection.ids),
        "row_visits": sum(entry["rows"] for entry in entries),
        "train_tokens": tokens,
        "supervised_tokens": sum(entry["supervised_tokens"] for entry in entries),
        "train_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "processes": accelerator.num_processes,
        "workers": session.params.workers,
        "last_loss": entries[-1]["loss"],
        "peak_memory_bytes": int(peaks.max()),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1, sort_keys=True) + "\n")


def _peak_memory(device: torch.device) -> float:
    """Return the most bytes this process held: of its GPU, else resident."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _show(bar: tqdm[Any], log: Path) -> None:
    entries = read_log(log)
    if entries and entries[-1]["step"] != bar.n:
        bar.set_postfix(loss=f"{entries[-1]['loss']:.4f}", refresh=False)
        bar.update(entries[-1]["step"] - bar.n)


if __name__ == "__main__":
    launching.work(worker)
