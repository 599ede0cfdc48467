"""Starting workers: what they are told, how they fail, and that they never outlive their stage."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from cluster_sft import launching
from cluster_sft.errors import UserError
from cluster_sft.launching import launch, worker_environment
from cluster_sft.threads import THREAD_VARIABLES

PROGRAM = """
    import hashlib, json, os, sys, time, torch
    from pathlib import Path
    from accelerate import Accelerator
    from cluster_sft.errors import UserError
    from cluster_sft.launching import told_to_stop, work

    def run(job):
        folder = Path(job["folder"])
        accelerator = Accelerator(cpu=True)
        rank = accelerator.process_index
        (folder / f"rank-{rank}").write_text(f"{os.getpid()} {accelerator.num_processes}")
        plugin = accelerator.state.dynamo_plugin
        precision = f"{accelerator.mixed_precision} {plugin.backend.value}"
        (folder / f"precision-{rank}").write_text(precision)
        (folder / f"threads-{rank}").write_text(str(torch.get_num_threads()))
        if job["end"] == "user error":
            raise UserError("row 7 is\\nbad")
        if job["end"] == "disk":
            with (folder / "out" / "model").open("wb") as file:
                while True:
                    file.write(bytes(1 << 12))
        if job["end"] == "defect":
            raise KeyError("lost")
        while job["end"] == "never":
            time.sleep(0.1)
        if job["end"] == "told":
            while not told_to_stop():
                hashlib.pbkdf2_hmac("sha256", b"", b"", 3_000_000)  # handlers of signals wait
            time.sleep(1)
            (folder / f"saved-{rank}").touch()
            raise KeyboardInterrupt

    if __name__ == "__main__":
        work(run, finishes=json.loads(Path(sys.argv[1]).read_text())["end"] == "told")
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Launch the little program above with the given end; return the folder it writes to."""
    (tmp_path / "little_program.py").write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "out").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def start(end, *, processes=1):
        launch(
            "little_program",
            {"end": end, "folder": str(tmp_path), "out": str(tmp_path / "out")},
            processes=processes,
            threads=2,
            use_gpu=False,
            scratch=tmp_path / "scratch",
            on_poll=lambda: None,
        )
        return tmp_path

    return start


def test_launch_two_processes_form_one_group_and_share_the_threads(start):
    folder = start("well", processes=2)
    assert [(folder / f"rank-{r}").read_text().split()[1] for r in (0, 1)] == ["2", "2"]
    assert [(folder / f"threads-{r}").read_text() for r in (0, 1)] == ["1", "1"]


def test_launch_port_that_was_taken_meanwhile_is_exchanged_for_another(start, monkeypatch):
    with socket.socket(socket.AF_INET6) as other:
        other.bind(("::", 0))  # not listening: who looks for a free port finds it free
        ports = iter([other.getsockname()[1], launching._free_port()])
        monkeypatch.setattr(launching, "_free_port", lambda: next(ports))
        folder = start("well", processes=2)
    assert [(folder / f"rank-{r}").read_text().split()[1] for r in (0, 1)] == ["2", "2"]
    assert next(ports, None) is None


def test_launch_users_own_accelerate_defaults_change_nothing(start, tmp_path, monkeypatch):
    """They ask for three processes in half precision under dynamo, on another machine."""
    (tmp_path / "home/accelerate").mkdir(parents=True)
    (tmp_path / "home/accelerate/default_config.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 3\n"
        "num_machines: 2\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\nmain_process_port: 1\n"
        "mixed_precision: bf16\nuse_cpu: true\ndynamo_config: {dynamo_backend: INDUCTOR}\n"
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = start("well")
    assert (folder / "rank-0").read_text().split()[1] == "1"
    assert (folder / "precision-0").read_text() == "no NO"


def test_launch_user_error_of_a_worker_is_one_of_the_parent(start):
    with pytest.raises(UserError, match=r"^row 7 is bad$"):
        start("user error")


def test_launch_defect_of_a_worker_names_the_log(start):
    with pytest.raises(RuntimeError, match=r"workers\.log") as caught:
        start("defect")
    assert "KeyError" in str(caught.value)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("everyone", [False, True])
def test_launch_told_to_end_waits_until_the_workers_have_saved(
    start, tmp_path, processes, everyone
):
    """Slurm tells all processes of a job, so that the launcher may go at once."""

    def tell():
        ranks = range(processes)
        wait_until(lambda: all((tmp_path / f"threads-{r}").exists() for r in ranks), seconds=120)
        workers = [int((tmp_path / f"rank-{r}").read_text().split()[0]) for r in ranks]
        told = [psutil.Process(workers[0]).ppid(), *workers] if everyone else []
        time.sleep(0.5)
        for pid in [*told, os.getpid()]:
            os.kill(pid, signal.SIGTERM)

    teller = threading.Thread(target=tell)
    teller.start()
    with pytest.raises(KeyboardInterrupt):
        start("told", processes=processes)
    teller.join()
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(processes))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a tiny tmpfs needs root")
def test_launch_worker_that_fills_the_disk_is_told_as_a_full_disk(start, tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path / "out")]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            start("disk")
    finally:
        subprocess.run(["umount", str(tmp_path / "out")], check=True)


def test_launch_killed_parent_leaves_no_workers(tmp_path):
    (tmp_path / "little_program.py").write_text(textwrap.dedent(PROGRAM))
    code = (
        "from pathlib import Path; from cluster_sft.launching import launch; "
        f"launch('little_program', {{'end': 'never', 'folder': {str(tmp_path)!r}}}, processes=2, "
        f"threads=2, use_gpu=False, scratch=Path({str(tmp_path)!r}), on_poll=lambda: None)"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    marks = [tmp_path / "rank-0", tmp_path / "threads-1"]
    wait_until(lambda: all(mark.exists() for mark in marks), seconds=120)
    workers = [int((tmp_path / f"rank-{r}").read_text().split()[0]) for r in (0, 1)]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not any(is_running(pid) for pid in workers), seconds=30)


def test_environment_around_does_not_describe_the_workers(monkeypatch):
    for name in ("WORLD_SIZE", "PMI_SIZE", "ACCELERATE_MIXED_PRECISION", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    environment = worker_environment(processes=2, threads=8, use_gpu=False)
    assert not {"WORLD_SIZE", "PMI_SIZE", "ACCELERATE_MIXED_PRECISION", "MASTER_PORT"} & set(
        environment
    )
    assert {environment[name] for name in THREAD_VARIABLES} == {"4"}
    assert json.loads(environment["ACCELERATE_USE_CPU"]) is True


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, *, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
