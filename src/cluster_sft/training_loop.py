"""The training loop: what one worker process does in every step.

Gradients accumulate over a process's micro-batches and are averaged over processes, in the way that
`parallelism` has. The step's denominator is global and lies in the coefficients, so nothing here
divides.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel

from cluster_sft.batching import BatchPlan
from cluster_sft.checkpoints import MOMENTS, WEIGHTS, save_checkpoint, save_snapshot
from cluster_sft.errors import UserError
from cluster_sft.launching import told_to_stop
from cluster_sft.models import arithmetic
from cluster_sft.optimizers import learning_rate, warmup_length
from cluster_sft.parallelism import MakeModel, Parallelism
from cluster_sft.trackers import Trackers, open_trackers
from cluster_sft.training_rows import TrainingRows, collate
from cluster_sft.worker_cosine import trained
from cluster_sft.workload import MicroBatch, split_step

if TYPE_CHECKING:
    from peft import PeftModel

    from cluster_sft.params import Launch
    from cluster_sft.stage_params import TrainParams

TRAIN_LOG = "train_log.jsonl"
SNAPSHOTS = "snapshots"
SAVED_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Session:
    """One worker process's view of a run; everything but `accelerator` is alike in all.

    Attributes:
        parallelism: how the processes share the model.
        make_model: loads the untrained model again.
        model: what `row_loss` wraps; with LoRA its layers hold the adapter.
        adapter: PEFT's view of the model with LoRA, else None.
        label: the run's name in messages.
        snapshots: steps after which the trained weights are kept as a result.
        keep_moments: the optimizer's moments too.
    """

    accelerator: Accelerator
    parallelism: Parallelism
    make_model: MakeModel
    row_loss: torch.nn.Module
    optimizer: torch.optim.Optimizer
    rows: TrainingRows
    plan: BatchPlan
    params: TrainParams
    launch: Launch
    scratch: Path
    identity: str
    model: PreTrainedModel
    adapter: PeftModel | None
    label: str
    snapshots: frozenset[int]
    keep_moments: bool

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.scratch / "checkpoints"

    @property
    def saved_dtype(self) -> torch.dtype:
        """Of trained weights that are kept: the run's precision, but always float32 for LoRA."""
        return SAVED_DTYPES["fp32" if self.params.lora_rank else self.params.precision]


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a train log, one per finished step; a torn last line is left out."""
    if not path.is_file():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def train(session: Session, done: int) -> None:
    """Run the steps from `done` on, logging each, and saving snapshots and checkpoints.

    Raises:
        UserError: a loss or a gradient is not finite.
        KeyboardInterrupt: a process was told to end; what was done is in a checkpoint.
    """
    trackers = None
    if session.accelerator.is_main_process:
        trackers = open_trackers(
            session.accelerator,
            session.launch.trackers,
            scratch=session.scratch,
            label=session.label,
            identity=session.identity,
            config=vars(session.params),
            entries=read_log(session.scratch / TRAIN_LOG),
        )
    saved = time.monotonic()
    interval = 60 * session.launch.checkpoint_minutes
    for index in range(done, len(session.plan)):
        # Before the step's clock starts: what is measured is no cost of the training.
        measured = _measure(session, index)
        entry, is_due = _run_step(session, index, is_due=time.monotonic() - saved >= interval)
        entry |= measured
        if trackers is not None:
            _log(session.scratch / TRAIN_LOG, entry, trackers)
        # Before the checkpoint: whatever a resumed run does not compute again is there.
        if index + 1 in session.snapshots:
            _keep(session, index + 1)
        if is_due and index + 1 < len(session.plan):
            save_checkpoint(
                session.accelerator,
                session.checkpoints,
                model=session.model,
                optimizer=session.optimizer,
                step=index + 1,
                identity=session.identity,
                parallelism=session.launch.parallelism,
            )
            saved = time.monotonic()
            _leave_if_told(session.accelerator)
    if trackers is not None:
        trackers.close()


def _leave_if_told(accelerator: Accelerator) -> None:
    """Leave, all processes together, if any was told to end; the state is in a checkpoint."""
    told = torch.tensor([float(told_to_stop())], device=accelerator.device)
    if cast("Tensor", accelerator.reduce(told, reduction="sum")).item():
        raise KeyboardInterrupt


def _measure(session: Session, index: int) -> dict[str, Any]:
    """Return the cosine of the workers' gradients, in every n-th step from the first on."""
    every = session.params.cosine_every
    if not every or index % every:
        return {}
    shares = _shares(session, index, of=session.plan.workers)

    def loss(module: torch.nn.Module, micro: MicroBatch) -> Tensor:
        return _weighted_losses(session, module, index, micro)[0]

    return session.parallelism.cosine(session.row_loss, shares, loss)


def _shares(session: Session, index: int, *, of: int) -> list[list[MicroBatch]]:
    """Return a step's micro-batches, cut into as many equal shares."""
    return split_step(
        session.plan[index],
        lengths=session.rows.lengths_N,
        n_tokens=session.rows.n_tokens_N,
        processes=of,
        loss_reduction=session.params.loss_reduction,
        micro_batch=session.launch.micro_batch,
        batch_tokens=session.launch.batch_tokens,
    )


def _run_step(session: Session, index: int, *, is_due: bool) -> tuple[dict[str, Any], bool]:
    """Take one optimizer step; return its log entry and whether any process's clock is due."""
    started = time.perf_counter()
    accelerator, params, rows = session.accelerator, session.params, session.rows
    shares = _shares(session, index, of=accelerator.num_processes)
    local, row_losses = _accumulate(session, index, shares[accelerator.process_index])
    is_due = is_due or told_to_stop()
    facts = torch.stack([local, torch.full_like(local, float(is_due))])
    loss, due = cast("Tensor", accelerator.reduce(facts, reduction="sum")).tolist()
    if not math.isfinite(loss):
        _raise_not_finite(session, index, row_losses)
    bound = params.max_grad_norm or math.inf
    norm = session.parallelism.clip(trained(session.row_loss), bound)
    if not math.isfinite(norm):
        _raise_not_finite(session, index, row_losses)
    rate = _learning_rate(session, index)
    for group in session.optimizer.param_groups:
        group["lr"] = rate
    session.optimizer.step()
    session.optimizer.zero_grad(set_to_none=True)
    entry = {
        "step": index + 1,
        "epoch": round((index + 1) / session.plan.steps_per_epoch, 6),
        "loss": loss,
        "grad_norm": norm,
        "lr": rate,
        **rows.describe(session.plan[index]),
        "seconds": time.perf_counter() - started,
    }
    return entry, due > 0


def _accumulate(
    session: Session, index: int, share: list[MicroBatch]
) -> tuple[Tensor, list[tuple[MicroBatch, Tensor]]]:
    """Backpropagate a process's share of a step.

    Returns the sum of its weighted losses, float64, and the losses of every micro-batch's rows.
    """
    accelerator = session.accelerator
    total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    seen = []
    for number, micro in enumerate(share, start=1):
        is_last = number == len(share)
        with nullcontext() if is_last else session.parallelism.no_sync(session.row_loss):
            weighted, losses = _weighted_losses(session, session.row_loss, index, micro)
            # Gradients are averaged over processes; the step's loss is their sum.
            accelerator.backward(accelerator.num_processes * weighted)
        total += weighted.detach()
        seen.append((micro, losses.detach()))
    return total, seen


def _weighted_losses(
    session: Session, row_loss: torch.nn.Module, index: int, micro: MicroBatch
) -> tuple[Tensor, Tensor]:
    """Return what a forward pass adds to the step's loss, and the losses of its rows."""
    # A step has a row once, so that dropout draws alike whichever process computes this.
    torch.manual_seed(_dropout_seed(session.params.seed, index, int(micro.rows[0])))
    with _autocast(session):
        losses = row_loss(*collate(session.rows, micro.rows, device=session.accelerator.device))
    coefficients = torch.from_numpy(micro.coefficients).to(losses)
    return (coefficients * losses).sum(), losses


def _dropout_seed(seed: int, index: int, row: int) -> int:
    return int(np.random.SeedSequence([seed, index, row]).generate_state(1, np.uint64)[0])


def _keep(session: Session, step: int) -> None:
    """Keep the trained weights and, where asked for, Adam's moments, float32, by the same names."""
    weights = [(name, p) for name, p in session.model.named_parameters() if p.requires_grad]
    files = {WEIGHTS: _on_main(session, weights, session.saved_dtype)}
    for moment in MOMENTS if session.keep_moments else ():
        named = [(name, session.optimizer.state[p][moment]) for name, p in weights]
        files[f"{moment}.safetensors"] = _on_main(session, named, torch.float32)
    if session.accelerator.is_main_process:
        save_snapshot(session.scratch / SNAPSHOTS, files, step=step)


def _on_main(
    session: Session, named: Sequence[tuple[str, Tensor]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the whole tensors in the main process's memory, none elsewhere."""
    kept = {}
    for name, tensor in session.parallelism.whole(named):
        if session.accelerator.is_main_process:
            kept[name] = tensor.to("cpu", dtype)
    return kept


def _autocast(session: Session) -> torch.autocast:
    device = session.accelerator.device
    enabled = arithmetic(session.params.precision, device) == "bf16"
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def _learning_rate(session: Session, index: int) -> float:
    params, steps = session.params, len(session.plan)
    warmup = warmup_length(
        steps, warmup_steps=params.warmup_steps, warmup_ratio=params.warmup_ratio
    )
    return learning_rate(
        index, peak=params.learning_rate, steps=steps, warmup=warmup, scheduler=params.scheduler
    )


def _raise_not_finite(
    session: Session, index: int, row_losses: list[tuple[MicroBatch, Tensor]]
) -> NoReturn:
    """Raise on all processes together, naming the rows at fault, or the step's rows."""
    bad = [
        session.rows.selection.ids[row]
        for micro, losses in row_losses
        for row, loss in zip(micro.rows, losses.tolist(), strict=True)
        if not math.isfinite(loss)
    ]
    ids = sorted(set(gather_object(bad)))
    what = "loss" if ids else "gradient"
    ids = ids or [session.rows.selection.ids[r] for rows, _ in session.plan[index] for r in rows]
    raise UserError(
        f"{session.label}: the {what} of step {index + 1} of {len(session.plan)} is not finite, "
        f"rows {', '.join(ids[:5])}{' ...' if len(ids) > 5 else ''}; lower its learning_rate, or "
        "look at these rows and at the model's weights"
    )


def _log(path: Path, entry: dict[str, Any], trackers: Trackers) -> None:
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")
    trackers.log(entry)
