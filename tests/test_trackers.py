"""Trackers: every step once, whatever was killed; no network unless the user asked for it."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from cluster_sft import trackers
from cluster_sft.errors import UserError
from cluster_sft.trackers import check_trackers, open_trackers

MLFLOW = ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE")
LEAF = "results/demo/train/k-4/random/lr-1"


class Fake(GeneralTracker):
    """Stands for a library: keeps what it was asked, in `calls` of the class."""

    requires_logging_directory = False
    calls: list

    def __init__(self, run_name, **settings):
        super().__init__()
        self.calls.append(("open", run_name, settings))

    @property
    def tracker(self):
        return self

    def store_init_configuration(self, values):
        self.calls.append(("config", values))

    def log(self, values, step=None, **settings):
        self.calls.append((step, values))


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A working folder with a leaf to make; the training's scratch folder in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(trackers.LEAF, LEAF)
    for name in ("WANDB_MODE", "WANDB_API_KEY", "TRACKIO_DIR", *MLFLOW):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    (tmp_path / "work/key").mkdir(parents=True)
    return tmp_path / "work/key"


@pytest.fixture
def fake(monkeypatch) -> type[Fake]:
    """A class that takes the place of accelerate's for wandb."""
    kind = type("FakeWandb", (Fake,), {"name": "wandb", "calls": []})
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", kind)
    return kind


def entry(step: int, **more: float) -> dict:
    return {"step": step, "loss": 1 / step, "grad_norm": 1.0, "lr": 0.1, "rows": 4, **more}


def opened(
    scratch: Path, names: list[str], *, done: int = 0, label: str = "train", identity: str = "a"
):
    entries = [entry(step) for step in range(1, done + 1)]
    return open_trackers(
        Accelerator(cpu=True),
        names,
        scratch=scratch,
        label=label,
        identity=identity,
        config={"learning_rate": 0.1},
        entries=entries,
    )


def steps(kind: type[Fake]) -> list[int]:
    return [call[0] for call in kind.calls if isinstance(call[0], int)]


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Return steps and values as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder))
    shown.Reload()
    return [(event.step, round(event.value, 4)) for event in shown.Scalars(tag)]


def await_next_second() -> None:
    """TensorBoard reads its files in the order of their names, which tell time by the second."""
    time.sleep(1 - time.time() % 1)


def test_tensorboard_shows_each_step_once_after_a_kill(here):
    killed = opened(here, ["tensorboard"])
    for step in range(1, 6):
        killed.log(entry(step, loss=-1.0))
    await_next_second()
    resumed = opened(here, ["tensorboard"], done=3)
    for step in range(4, 7):
        resumed.log(entry(step, worker_cosine=0.5))
    resumed.close()
    assert [step for step, _ in scalars(here / "tensorboard", "train/loss")] == [1, 2, 3, 4, 5, 6]
    assert scalars(here / "tensorboard", "train/loss")[3] == (4, 0.25)
    assert scalars(here / "tensorboard", "train/worker_cosine") == [(s, 0.5) for s in (4, 5, 6)]


def test_tracker_of_its_own_files_sees_each_step_once_after_a_kill(here, fake):
    killed = opened(here, ["wandb"])
    for step in range(1, 6):
        killed.log(entry(step))
    resumed = opened(here, ["wandb"], done=3)
    for step in range(4, 7):
        resumed.log(entry(step))
    assert steps(fake) == [1, 2, 3, 4, 5, 6]
    first, second = (call[2]["id"] for call in fake.calls if call[0] == "open")
    assert first == second


def test_tracker_added_to_a_resumed_training_is_shown_the_steps_before(here, fake):
    opened(here, ["tensorboard"]).log(entry(1))
    await_next_second()
    opened(here, ["tensorboard", "wandb"], done=2).log(entry(3))
    assert steps(fake) == [1, 2, 3]
    assert [step for step, _ in scalars(here / "tensorboard", "train/loss")] == [1, 3]


def test_another_training_in_the_same_folder_is_a_run_of_its_own(here, fake):
    opened(here, ["wandb"]).log(entry(1))
    opened(here, ["wandb"], identity="b").log(entry(1))
    assert steps(fake) == [1, 1]
    first, second = (call[2]["id"] for call in fake.calls if call[0] == "open")
    assert first != second


def test_run_is_named_by_the_leaf_and_stays_offline_by_default(here, fake, tmp_path):
    opened(here, ["wandb"])
    opened(here, ["wandb"], label="s2l: proxy")
    (_, project, settings), (_, config), (_, _, other), _ = fake.calls
    assert (project, settings["name"]) == ("demo", "train/k-4/random/lr-1")
    assert other["name"] == "train/k-4/random/lr-1 (s2l: proxy)"
    assert (settings["mode"], settings["dir"]) == ("offline", str(tmp_path / "work/trackers/wandb"))
    assert config == {"learning_rate": 0.1}


@pytest.mark.parametrize(
    ("variables", "mode"),
    [
        ({"WANDB_API_KEY": "k", "HF_HUB_OFFLINE": "0"}, None),
        ({"WANDB_API_KEY": "k", "HF_HUB_OFFLINE": "1"}, "offline"),
        ({"WANDB_MODE": "online", "HF_HUB_OFFLINE": "1"}, None),
    ],
)
def test_wandb_goes_online_where_the_user_set_it_up(here, fake, monkeypatch, variables, mode):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    opened(here, ["wandb"])
    assert fake.calls[0][2]["mode"] == mode


def test_tracker_that_fails_ends_no_training(here, fake, monkeypatch, capsys):
    def broken(self, values, step=None, **settings):
        raise ConnectionError("no route")

    monkeypatch.setattr(fake, "log", broken)
    both = opened(here, ["wandb", "tensorboard"])
    both.log(entry(1))
    both.log(entry(2))
    assert capsys.readouterr().out.count("no route") == 1
    assert [step for step, _ in scalars(here / "tensorboard", "train/loss")] == [1, 2]


def test_tracker_that_does_not_start_is_one_line(here, fake, monkeypatch):
    def broken(self):
        raise RuntimeError("not logged in\nat all")

    monkeypatch.setattr(fake, "start", broken)
    with pytest.raises(
        UserError, match=r"^launch\.trackers: wandb: cannot start \(not logged in\)"
    ):
        opened(here, ["wandb"])


def test_package_that_is_not_installed_is_told_with_the_command(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="wandb is not installed; run `pip install wandb`"):
        check_trackers(["wandb"])


def test_no_trackers_leave_no_files(here):
    none = opened(here, [])
    none.log(entry(1))
    none.close()
    assert [path.name for path in here.iterdir()] == ["trackers.json"]


def _log_and_die(scratch: Path, name: str) -> None:
    opened(scratch, [name]).log(entry(1))
    os._exit(1)


@pytest.mark.parametrize("name", ["trackio", "mlflow", "wandb"])
def test_real_tracker_keeps_its_run_in_work_over_a_kill(here, tmp_path, name):
    if importlib.util.find_spec(name) is None:  # not imported: libraries read variables then
        pytest.skip(f"{name} is not installed")
    killed = multiprocessing.get_context("fork").Process(target=_log_and_die, args=(here, name))
    killed.start()
    killed.join()
    resumed = opened(here, [name], done=1)
    resumed.log(entry(2))
    resumed.close()
    assert any((tmp_path / "work/trackers" / name).rglob("*"))
    assert json.loads((here / "trackers.json").read_text())["steps"][name] == 2
