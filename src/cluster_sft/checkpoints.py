"""Training checkpoints and snapshots: folders written beside, renamed when complete.

A checkpoint is a folder `step-N` after N steps: accelerate's saved state and `checkpoint.json`.
One is kept. It is used only by a run of the same identity (parameters, rows, weights).
A snapshot is a result: the trained weights after so many steps, and the optimizer's moments.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor, nn

META = "checkpoint.json"
PREFIX = "step-"
WEIGHTS = "weights.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch's Adam names them


def save_checkpoint(accelerator: Accelerator, folder: Path, *, step: int, identity: str) -> None:
    """Write the state after `step` steps; all processes call it together.

    Args:
        accelerator: whose prepared models, optimizers and random states are saved.
        folder: of the run's checkpoints; the folder is made, older checkpoints are deleted.
        step: steps done.
        identity: digest of what the run is.
    """
    beside = folder / f"partial-{step}"
    if accelerator.is_main_process:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(beside))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (beside / META).write_text(json.dumps({"step": step, "identity": identity}))
        _sync(beside)
        complete = folder / f"{PREFIX}{step}"
        shutil.rmtree(complete, ignore_errors=True)
        beside.rename(complete)
        for other in folder.iterdir():
            if other != complete:
                shutil.rmtree(other)
    accelerator.wait_for_everyone()


def latest_checkpoint(folder: Path, *, identity: str) -> tuple[int, Path] | None:
    """Return the steps done and the folder of the last complete checkpoint of this run, if any."""
    found = []
    for path in folder.glob(f"{PREFIX}*"):
        meta = json.loads((path / META).read_text())
        if meta["identity"] == identity:
            found.append((int(meta["step"]), path))
    return max(found, default=None)


def snapshot_name(step: int) -> str:
    """Return the name of the folder of the snapshot after `step` steps."""
    return f"{PREFIX}{step:08d}"


def save_snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    *,
    step: int,
    dtype: torch.dtype,
    keep_moments: bool,
) -> None:
    """Write the trainable weights after `step` steps, by their names in `model`.

    `weights.safetensors` holds them in `dtype`; with `keep_moments` Adam's first and second moments
    are beside it, float32 and by the same names, in `exp_avg.safetensors` and
    `exp_avg_sq.safetensors`. One process calls it.
    """
    beside = folder / f"partial-{step}"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    files: dict[str, dict[str, Tensor]] = {
        WEIGHTS: {name: p.detach().to(dtype) for name, p in trained.items()}
    }
    for moment in MOMENTS if keep_moments else ():
        states = {name: optimizer.state[p][moment] for name, p in trained.items()}
        files[f"{moment}.safetensors"] = states
    for name, tensors in files.items():
        save_file({k: t.contiguous().cpu() for k, t in tensors.items()}, beside / name)
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
