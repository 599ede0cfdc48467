"""Training checkpoints in a stage's scratch folder: written beside, renamed when complete.

A checkpoint is a folder `step-N` after N steps: accelerate's saved state and `checkpoint.json`.
One is kept. It is used only by a run of the same identity (parameters, rows, weights).
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from accelerate import Accelerator

META = "checkpoint.json"
PREFIX = "step-"


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


def _sync(folder: Path) -> None:
    """Force the files to disk, lest a rename outlive its contents when the machine fails."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
