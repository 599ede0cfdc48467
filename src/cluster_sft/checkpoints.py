"""Training checkpoints and snapshots: folders written beside, renamed when complete.

A checkpoint is a folder `step-N` after N steps: the trained weights and the optimizer's state as
torch's distributed checkpoint, to which every process writes a part, and `checkpoint.json`. It is
read tensor by tensor, whatever the number of processes and the parallelism that it is read by. One
is kept. It is used only by a run of the same identity (parameters, rows, weights).
A snapshot is a result: the trained weights after so many steps, and the optimizer's moments.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

META = "checkpoint.json"
FORMAT = 2  # of checkpoints; another one is as if it were not there
PREFIX = "step-"
WEIGHTS = "weights.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch's Adam names them


def save_checkpoint(
    accelerator: Accelerator,
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    identity: str,
    parallelism: str,
) -> None:
    """Write the state after `step` steps; all processes call it together.

    Args:
        accelerator: of the run.
        folder: of the run's checkpoints; the folder is made, older checkpoints are deleted.
        model: whole or sharded.
        optimizer: of the model's trained parameters.
        step: steps done.
        identity: digest of what the run is.
        parallelism: by which the run is spread, for whoever looks at the folder.
    """
    beside = folder / f"partial-{step}"
    if accelerator.is_main_process:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    accelerator.wait_for_everyone()
    with _one_process_is_enough():
        # It flushes its files to disk.
        state_dict_saver.save(_state(model, optimizer), checkpoint_id=beside)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        meta = {
            "format": FORMAT,
            "step": step,
            "identity": identity,
            "parallelism": parallelism,
            "processes": accelerator.num_processes,
        }
        (beside / META).write_text(json.dumps(meta))
        _sync(beside)
        complete = folder / f"{PREFIX}{step}"
        _remove(complete)
        beside.rename(complete)
        for other in folder.iterdir():
            if other != complete:
                _remove(other)
    accelerator.wait_for_everyone()


def _remove(path: Path) -> None:
    """Remove a checkpoint, if it is there; killed half-way, what is left is none."""
    if path.exists():
        (path / META).unlink(missing_ok=True)
        shutil.rmtree(path)


def latest_checkpoint(folder: Path, *, identity: str) -> tuple[int, Path] | None:
    """Return the steps done and the folder of the last complete checkpoint of this run, if any."""
    found = []
    for path in folder.glob(f"{PREFIX}*/{META}"):
        meta = json.loads(path.read_text())
        if meta["identity"] == identity and meta.get("format") == FORMAT:
            found.append((int(meta["step"]), path.parent))
    return max(found, default=None)


def load_checkpoint(path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's weights and state into a fresh model and optimizer, before any step.

    All processes call it together; each reads what it holds.
    """
    _make_state(optimizer)
    with _one_process_is_enough():
        state_dict_loader.load(_state(model, optimizer), checkpoint_id=path)


@contextmanager
def _one_process_is_enough() -> Iterator[None]:
    """Keep torch from warning that a run of one process has no group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return all that training changes, by kind and name; the tensors share the run's memory."""
    state: dict[str, dict[str, Tensor]] = {"weight": {}}
    for name, p in model.named_parameters():
        if p.requires_grad:
            state["weight"][name] = p.detach()
            for kind, tensor in optimizer.state[p].items():
                state.setdefault(kind, {})[name] = tensor
    return state


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that has taken no step make its state, to be read into.

    By steps at a rate of 0 along gradients of 0, one weight at a time: all gradients together might
    not fit beside the buffers that DDP keeps for them.
    """
    for group in optimizer.param_groups:
        assert group["lr"] == 0, "the optimizer has taken a step"
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
            optimizer.step()
            p.grad = None


def snapshot_name(step: int) -> str:
    """Return the name of the folder of the snapshot after `step` steps."""
    return f"{PREFIX}{step:08d}"


def save_snapshot(folder: Path, files: Mapping[str, Mapping[str, Tensor]], *, step: int) -> None:
    """Write a snapshot after `step` steps: tensors by name, by file. One process calls it."""
    beside = folder / f"partial-{step}"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for name, tensors in files.items():
        save_file({k: t.contiguous() for k, t in tensors.items()}, beside / name)
        # safetensors 0.8 writes files that only their owner can read.
        (beside / name).chmod(0o666 & beside.stat().st_mode)
    _sync(beside)
    complete = folder / snapshot_name(step)
    shutil.rmtree(complete, ignore_errors=True)
    beside.rename(complete)


def _sync(folder: Path) -> None:
    """Force the files to disk, lest a rename outlive its contents when the machine fails."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
