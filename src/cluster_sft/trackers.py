"""Experiment trackers of a training, by accelerate: what a step gave, under the leaf's name.

TensorBoard's files are part of the result. The others keep their own, and know nothing of a kill:
how far each has got lies in scratch, so that a resumed training shows every step once. Nothing
needs a network unless the user set it up: Weights & Biases by its variables or login, MLflow by
MLFLOW_TRACKING_URI, trackio by TRACKIO_SPACE_ID; else all is kept in work/trackers.

Reads and writes, in scratch: tensorboard/, trackers.json.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_sft.artifacts import read_json, replace_json
from cluster_sft.errors import UserError
from cluster_sft.offline import is_offline

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

LEAF = "CLUSTER_SFT_LEAF"  # variable: the leaf that this process makes
HOME = Path("work/trackers")
STATE = "trackers.json"
TENSORBOARD = "tensorboard"  # of accelerate, and the folder
SHOWN = ("loss", "grad_norm", "lr", "worker_cosine")
WANDB_HOST = "api.wandb.ai"


def check_trackers(names: Sequence[str]) -> None:
    """Check that the packages of trackers are installed.

    Raises:
        UserError: one is not; the message names the command that installs it.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"launch.trackers: {name} is not installed; run `pip install {name}`, or take it "
                "out of the list"
            )


class Trackers:
    """The open trackers of one training, in its main process."""

    def __init__(self, trackers: Sequence[Any], state: dict[str, Any], path: Path):
        self._open = list(trackers)
        self._state = state
        self._path = path

    def log(self, entry: Mapping[str, Any]) -> None:
        """Show an entry of the train log; each tracker sees a step once."""
        values = {f"train/{n}": entry[n] for n in SHOWN if entry.get(n) is not None}
        step = entry["step"]
        for tracker in list(self._open):
            if step <= self._state["steps"].get(tracker.name, 0):
                continue
            try:
                tracker.log(values, step=step)
            # Of any library and of its network: no reason to end a training.
            except Exception as error:
                print(f"{tracker.name} failed, and shows nothing from step {step} on: {error!r}")
                self._open.remove(tracker)
                continue
            self._state["steps"][tracker.name] = step
        replace_json(self._path, self._state)

    def close(self) -> None:
        """Finish all runs.

        Not by accelerate's `end_training`, which also ends the group of processes: results are yet
        to be gathered.
        """
        for tracker in self._open:
            tracker.finish()


def open_trackers(
    accelerator: Accelerator,
    names: Sequence[str],
    *,
    scratch: Path,
    label: str,
    identity: str,
    config: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
) -> Trackers:
    """Start or resume the run of each tracker, in the main process.

    Args:
        accelerator: keeps the trackers, as accelerate's own code expects.
        names: of `launch.trackers`.
        scratch: folder of the training, which survives a kill.
        label: the training's name beside that of the leaf.
        identity: what the training is; another one starts new runs.
        config: settings to show; those that can change the result.
        entries: of the steps done before; a tracker that lacks some is shown them.

    Raises:
        UserError: a tracker does not start.
    """
    done = entries[-1]["step"] if entries else 0
    path = scratch / STATE
    state: dict[str, Any] = read_json(path) if path.is_file() else {}
    if state.get("identity") != identity:
        state = {"identity": identity, "id": uuid.uuid4().hex, "steps": {}}
    # Its own files say how far it is: what they hold beyond the steps done is purged.
    state["steps"][TENSORBOARD] = done if (scratch / TENSORBOARD).is_dir() else 0
    project, run = _names(label)
    made: list[Any] = [_make(n, project, run, state, scratch, done=done) for n in names]
    accelerator.log_with = made
    try:
        accelerator.init_trackers(project)
        for tracker in accelerator.trackers:
            if tracker.name != TENSORBOARD:  # it would add files named by the time
                tracker.store_init_configuration(dict(config))
            if tracker.name == "mlflow":
                state["mlflow"] = tracker.tracker.info.run_id
    # Whatever the libraries raise: without login, server, disk.
    except Exception as error:
        told = (str(error).strip().splitlines() or [repr(error)])[0]
        raise UserError(
            f"launch.trackers: {', '.join(names)}: cannot start ({told}); set it up, or take it out"
        ) from error
    opened = Trackers(accelerator.trackers, state, path)
    for entry in entries:
        opened.log(entry)
    return opened


def _names(label: str) -> tuple[str, str]:
    """Return project and run: the configuration's name, and the leaf below it."""
    parts = Path(os.environ.get(LEAF, label)).parts
    project = parts[1] if len(parts) > 2 else "cluster-sft"
    run = "/".join(parts[2:] if len(parts) > 2 else parts)
    return project, run if label in ("train", run) else f"{run} ({label})"


def _make(
    name: str, project: str, run: str, state: Mapping[str, Any], scratch: Path, *, done: int
) -> GeneralTracker:
    """Return a tracker that is not started yet, whose files stay on this machine by default."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    make: Any = LOGGER_TYPE_TO_CLASS[name]
    if name == TENSORBOARD:
        return make(TENSORBOARD, str(scratch), purge_step=done + 1)
    home = HOME.resolve() / name
    home.mkdir(parents=True, exist_ok=True)
    if name == "wandb":
        mode = None if _has_wandb() else "offline"
        return make(project, name=run, id=state["id"], resume="allow", dir=str(home), mode=mode)
    if name == "mlflow":
        # Files: a database would be locked by trainings side by side, and lock a shared folder.
        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ |= {"MLFLOW_TRACKING_URI": home.as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
        return make(project, run_name=run, run_id=state.get("mlflow"))
    os.environ.setdefault("TRACKIO_DIR", str(home))
    # A name of its own, since trackio resumes by name.
    return make(project, name=f"{run} {state['id'][:6]}", resume="allow")


def _has_wandb() -> bool:
    """Return whether the user set Weights & Biases up for this run."""
    if "WANDB_MODE" in os.environ:
        return True
    if is_offline():
        return False
    if "WANDB_API_KEY" in os.environ:
        return True
    try:
        return netrc.netrc().authenticators(WANDB_HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False
