"""GPUs on one machine: never shared, never too few, never lost, nobody starves.

The machine is pretended, the jobs are real processes. Each checks by a lock of the test's own that
it is alone on its GPUs.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster_sft import computing, gpu_devices, gpus
from cluster_sft.errors import UserError
from cluster_sft.gpu_devices import Gpu, find_gpus, read_listing, visible_gpus
from cluster_sft.gpus import Ticket, allot, hold
from cluster_sft.nodes import Node
from cluster_sft.params import Launch, Section
from engines import Project

FOUR = [Gpu(n, f"GPU-{n}") for n in range(4)]
JOB = """
import fcntl, os, pathlib, sys, time
from cluster_sft import gpus
from cluster_sft.gpu_devices import Gpu

name, count, seconds, rounds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
gpus.POLL_SECONDS = 0.05
four = [Gpu(n, f"GPU-{n}") for n in range(4)]
# Opened before the ticket, since a kill closes files in the order of their opening.
checks = {str(n): open(f"device-{n}", "w") for n in range(4)}
for _ in range(rounds):
    with gpus.hold(count, label=name, gpus=four) as got:
        assert len(set(got)) == count and os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(got)
        for gpu in got:
            fcntl.flock(checks[gpu[-1]], fcntl.LOCK_EX | fcntl.LOCK_NB)
        pathlib.Path(f"{name}.got").touch()
        time.sleep(seconds)
        for gpu in got:
            fcntl.flock(checks[gpu[-1]], fcntl.LOCK_UN)
    if pathlib.Path("stop").exists():
        break
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Iterator[Path]:
    """A machine of its own: an empty place for tickets, and nothing said about GPUs around."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(gpus.LOCKS, str(tmp_path / "locks"))
    monkeypatch.setenv("PYTHONPATH", str(Path(gpus.__file__).parents[1]))
    for name in ("SLURM_JOB_ID", gpus.VISIBLE, gpus.TICKET):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    while Job.started:
        Job.started.pop().kill()


class Job:
    """A process that asks for GPUs."""

    started: ClassVar[list[Job]] = []

    def __init__(self, name: str, count: int, seconds: float, rounds: int = 1) -> None:
        self.name, self.seconds = name, seconds
        words = [name, str(count), str(seconds), str(rounds)]
        # A job of its own, also where the test holds GPUs meanwhile.
        own = {key: value for key, value in os.environ.items() if key != gpus.TICKET}
        with Path(f"{name}.err").open("w") as error:
            self.process = subprocess.Popen(
                [sys.executable, "-c", JOB, *words], stderr=error, env=own
            )

        self.started.append(self)

    @property
    def served(self) -> bool:
        return Path(f"{self.name}.got").exists()

    @property
    def said(self) -> str:
        return Path(f"{self.name}.err").read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def ended_well(self, seconds: float = 100) -> bool:
        return self.process.wait(seconds) == 0


def wait_until(condition, *, seconds=100.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def tickets() -> list[str]:
    return [name for name in os.listdir("locks") if name.startswith("ticket-")]


def test_hold_thirty_jobs_of_which_some_are_killed_never_overlap_and_lose_no_gpu():
    counts = [1, 2, 4] * 10
    random.Random(0).shuffle(counts)
    endless = {3, 10, 17, 24}  # would hold their GPUs for ever
    with hold(4, label="all", gpus=FOUR):
        jobs = [Job(f"job-{i}", n, 600 if i in endless else 0.1) for i, n in enumerate(counts)]
        wait_until(lambda: len(tickets()) == 31)
        gone = [jobs[counts.index(n, 5)] for n in (1, 2, 4)]
        for job in gone:
            job.kill()
        assert not any(job.served for job in jobs)
    holding = [jobs[i] for i in endless if jobs[i] not in gone]
    while standing := [job for job in holding if job.process.returncode is None]:
        wait_until(lambda: any(job.served for job in standing))
        for job in standing:
            if job.served:
                job.kill()
    rest = [job for job in jobs if job not in gone + holding]
    assert len(holding) > 2
    assert [job.name for job in rest if not job.ended_well()] == []
    with hold(4, label="again", gpus=FOUR):
        assert len(tickets()) == 1


def test_hold_of_all_gpus_is_served_amid_a_steady_stream_of_small_jobs():
    stream = [Job(f"small-{i}", 1, 0.2, rounds=1000) for i in range(8)]
    wait_until(lambda: all(job.served for job in stream))
    large = Job("large", 4, 0.0)
    assert large.ended_well()
    assert "waiting for 4 of 4 GPUs; " in large.said
    for job in stream:
        Path(f"{job.name}.got").unlink()
    wait_until(lambda: all(job.served for job in stream))
    Path("stop").touch()
    assert all(job.ended_well() for job in stream)


def test_hold_says_once_who_has_the_gpus_whatever_they_are_called(monkeypatch):
    with hold(3, label="results/a", gpus=FOUR):
        monkeypatch.setenv(gpus.VISIBLE, "GPU-3,GPU-1")
        job = Job("other", 2, 0.0)
        wait_until(lambda: job.said)
        time.sleep(0.5)
    assert job.ended_well()
    assert job.said == f"waiting for 2 of 2 GPUs; GPU-1 held by pid {os.getpid()} (results/a)\n"


def test_hold_of_a_killed_stage_lasts_until_its_workers_have_ended():
    worker = "from cluster_sft import gpu_ticket; gpu_ticket.share(); open('in', 'w'); input()"
    stage = (
        "import subprocess, sys\nfrom cluster_sft.gpus import hold\n"
        "from cluster_sft.gpu_devices import Gpu\n"
        "with hold(1, label='stage', gpus=[Gpu(0, 'GPU-0')]):\n"
        f"    child = subprocess.Popen([sys.executable, '-c', {worker!r}], stdin=subprocess.PIPE)\n"
        "    print(child.pid, flush=True)\n    child.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", stage], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    pid = int(parent.stdout.readline())
    wait_until(lambda: Path("in").exists())
    # Its input would end with its parent's, and it with that.
    os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    job = Job("next", 4, 0.0)
    wait_until(lambda: "(stage)" in job.said)
    os.kill(pid, signal.SIGKILL)
    assert job.ended_well()


def test_hold_of_a_process_with_a_cuda_context_lasts_until_it_ends():
    code = (
        "import sys\nfrom types import SimpleNamespace\nfrom cluster_sft.gpus import hold\n"
        "from cluster_sft.gpu_devices import Gpu\n"
        "cuda = SimpleNamespace(is_initialized=lambda: True)\n"
        "sys.modules['torch'] = SimpleNamespace(cuda=cuda)\n"
        "with hold(1, label='first', gpus=[Gpu(0, 'GPU-0')]):\n    pass\n"
        "print('left', flush=True)\nsys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    first = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
    assert first.stdout and first.stdout.readline() == "left\n"
    job = Job("next", 4, 0.0)
    wait_until(lambda: "(first)" in job.said)
    first.communicate()
    assert job.ended_well()


def test_hold_sets_the_devices_inside_and_restores_them():
    with hold(2, label="a", gpus=FOUR) as got:
        seen = os.environ[gpus.VISIBLE]
    assert (got, seen) == (("0", "1"), "0,1")
    assert gpus.VISIBLE not in os.environ and gpus.TICKET not in os.environ


def test_hold_inside_another_does_not_wait_for_itself():
    with hold(2, label="a", gpus=FOUR), hold(2, label="b", gpus=FOUR) as got:
        assert (got, os.environ[gpus.VISIBLE]) == ((), "0,1")


@pytest.mark.parametrize(
    ("count", "variable", "machine"),
    [
        (0, {}, FOUR),
        (2, {}, []),
        (2, {gpus.VISIBLE: ""}, FOUR),
        (2, {gpus.VISIBLE: "-1"}, FOUR),
        (8, {"SLURM_JOB_ID": "7"}, FOUR),
    ],
)
def test_hold_with_nothing_to_give_out_sets_nothing(monkeypatch, count, variable, machine):
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with hold(count, label="a", gpus=machine) as got:
        assert (got, dict(os.environ)) == ((), before)
    assert not Path("locks").exists()


@pytest.mark.parametrize(
    ("visible", "told"),
    [
        (None, "results/a: needs 5 GPUs, one a process, but 4 are there; lower launch.processes"),
        (
            "0,3",
            "results/a: needs 5 GPUs, one a process, but 2 are there under "
            "CUDA_VISIBLE_DEVICES=0,3; lower launch.processes or change CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_hold_of_more_than_there_are_fails_before_any_wait(monkeypatch, visible, told):
    if visible:
        monkeypatch.setenv(gpus.VISIBLE, visible)
    with pytest.raises(UserError) as caught, hold(5, label="results/a", gpus=FOUR):
        pass
    assert str(caught.value) == told
    assert not Path("locks").exists()


def test_hold_where_no_ticket_can_be_written_names_the_variable():
    Path("locks").touch()
    with pytest.raises(UserError, match=gpus.LOCKS), hold(1, label="a", gpus=FOUR):
        pass


def test_hold_makes_a_place_that_every_user_of_the_machine_can_use():
    before = os.umask(0o077)
    try:
        with hold(1, label="a", gpus=FOUR):
            modes = {
                p.name: p.stat().st_mode & 0o7777 for p in [Path("locks"), *Path("locks").iterdir()]
            }
    finally:
        os.umask(before)
    assert modes == {"locks": 0o1777, "mutex": 0o644, "ticket-1": 0o644}


def test_gpus_of_a_container_without_nvidia_smi_are_those_the_kernel_knows(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu_devices, "KERNEL", tmp_path)
    monkeypatch.setattr(gpu_devices, "DEVICES", tmp_path)
    known = {"c1": "GPU-0b", "41": "GPU-????????-????", "61": "GPU-2c", "81": "GPU-3d"}
    for minor, (bus, uuid) in enumerate(known.items()):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(
            f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
        )
        if uuid != "GPU-2c":  # of the host, not of this container
            (tmp_path / f"nvidia{minor}").touch()
    found = [Gpu(0, "GPU-41"), Gpu(1, "GPU-3d"), Gpu(2, "GPU-0b")]
    assert gpu_devices._ask_driver() == found


def as_user(number: int, action: Callable[[], None]) -> int:
    """Start a process of another user that does something; return its pid."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.closerange(3, 1 << 10)  # a ticket that a fork inherits it would hold as well
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        os.setuid(number)
        action()
        status = 0
    finally:
        os._exit(status)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_hold_of_one_user_is_one_to_another_and_a_killed_one_to_nobody(monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setenv(gpus.LOCKS, folder + "/locks")

        def take_all():
            for name in (gpus.TICKET, gpus.VISIBLE):
                os.environ.pop(name, None)
            with hold(4, label="all", gpus=FOUR):
                Path(folder, "locks/taken").touch()

        def keep_all():
            with hold(4, label="root", gpus=FOUR):
                time.sleep(60)

        with hold(1, label="root", gpus=FOUR):
            other = as_user(65534, take_all)
            wait_until(lambda: Path(folder, "locks/ticket-2").exists())
            time.sleep(0.5)
            assert not Path(folder, "locks/taken").exists()
        assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0
        killed = as_user(0, keep_all)
        wait_until(lambda: Path(folder, "locks/ticket-1").exists())
        os.kill(killed, signal.SIGKILL)
        os.waitpid(killed, 0)
        other = as_user(65534, take_all)
        assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0


def waiting(number: int, count: int, among: str) -> Ticket:
    return Ticket(number, 1, "", count, tuple(among))


def holding(number: int, got: str) -> Ticket:
    return Ticket(number, 1, "", len(got), tuple("abcd"), tuple(got))


@pytest.mark.parametrize(
    ("others", "mine", "got"),
    [
        ([], waiting(9, 2, "abcd"), "ab"),
        ([holding(1, "a")], waiting(9, 2, "abcd"), "bc"),
        ([holding(1, "abc")], waiting(9, 2, "abcd"), ""),
        # an older one gathers c and d, of which it needs both and one more
        ([holding(1, "ab"), waiting(2, 3, "abcd")], waiting(9, 1, "abcd"), ""),
        # an older one can be served, and leaves d
        ([holding(1, "a"), waiting(2, 2, "abcd")], waiting(9, 1, "abcd"), "d"),
        # an older one waits for others
        ([holding(1, "ab"), waiting(2, 2, "ab")], waiting(9, 2, "abcd"), "cd"),
        # a younger one waits for all
        ([holding(1, "a"), waiting(10, 4, "abcd")], waiting(9, 1, "abcd"), "b"),
    ],
)
def test_allot_serves_the_oldest_first_and_lets_it_gather(others, mine, got):
    assert allot([*others, mine], mine.number) == tuple(got)


REQUESTS = st.lists(
    st.tuples(st.integers(1, 4), st.sets(st.sampled_from("abcd"), min_size=1)), max_size=12
)


@settings(max_examples=50, deadline=None)
@given(requests=REQUESTS, seed=st.integers(0, 1 << 30))
def test_allot_until_all_are_served_never_gives_a_gpu_twice_and_always_ends(requests, seed):
    """In any order of looking and leaving; a holder leaves once nobody can be served."""
    draw = random.Random(seed)
    todo = [
        waiting(i, min(count, len(among)), "".join(sorted(among)))
        for i, (count, among) in enumerate(requests)
    ]
    while todo:
        asking = [t for t in todo if not t.got]
        draw.shuffle(asking)
        served = [(t, got) for t in asking if (got := allot(todo, t.number))]
        if not served:
            todo.remove(draw.choice([t for t in todo if t.got]))  # fails if all wait
            continue
        ticket, got = served[0]
        assert len(set(got)) == ticket.count and set(got) <= set(ticket.among)
        assert not any(set(t.got) & set(got) for t in todo)
        todo.remove(ticket)
        todo.append(Ticket(ticket.number, 1, "", ticket.count, ticket.among, got))


LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-5e1a)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-5e2b)
  MIG 3g.20gb     Device  0: (UUID: MIG-77)
  MIG 3g.20gb     Device  1: (UUID: MIG-88)
"""


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, {"GPU-5e1a": "0", "MIG-77": "MIG-77", "MIG-88": "MIG-88"}),
        ("1, 0", {"MIG-77": "1", "GPU-5e1a": "0"}),
        ("GPU-5e1,MIG-88", {"GPU-5e1a": "GPU-5e1", "MIG-88": "MIG-88"}),
        ("0,7,1", {"GPU-5e1a": "0"}),
        ("GPU-5e", {}),
        ("0,0", {}),
        ("", {}),
        ("NoDevFiles", {}),
    ],
)
def test_visible_gpus_reads_the_variable_as_cuda_does(visible, found):
    assert visible_gpus(visible, read_listing(LISTING)) == found


def test_hold_of_two_takes_no_slices_of_a_gpu():
    with pytest.raises(UserError, match="needs 2 GPUs, one a process, but 1 are there"):
        hold(2, label="a", gpus=read_listing(LISTING)).__enter__()


@pytest.mark.parametrize(("cuda", "count"), [("13.0", 2), (None, 0)])
def test_find_gpus_asks_the_driver_and_whether_pytorch_can_use_them(here, monkeypatch, cuda, count):
    (here / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{LISTING}END\n")
    (here / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(here), prepend=os.pathsep)
    torch = SimpleNamespace(version=SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert len(find_gpus()) == count


@pytest.fixture
def stage(monkeypatch):
    """Compute a node of a module whose `run` tells what it was given; on four pretended GPUs."""
    monkeypatch.setattr(gpus, "find_gpus", lambda: FOUR)

    def compute(module: str, launch: Launch) -> dict[str, str]:
        seen: dict[str, str] = {}
        fake = SimpleNamespace(run=lambda *_, **__: seen.update(os.environ))
        monkeypatch.setitem(sys.modules, f"cluster_sft.{module}", fake)
        node = Node("report", "results/a", "", Section(), module=module)
        computing.compute_with(launch)(node, Path("out"), Path("scratch"))
        return seen

    return compute


@pytest.mark.parametrize(
    ("module", "devices"),
    [
        ("training", "0,1"),
        ("embedding", "0,1"),
        ("scorers.ifd", "0,1"),
        ("evaluation", "0"),
        ("validating", "0"),
        ("clustering", None),
        ("scorers.none", None),
        ("reporting", None),
    ],
)
def test_compute_gives_a_stage_its_gpus_and_its_threads(stage, module, devices):
    seen = stage(module, Launch(processes=2, threads=3))
    assert (seen.get(gpus.VISIBLE), seen["OMP_NUM_THREADS"]) == (devices, "3")


def test_compute_of_an_empty_leaf_does_not_wait_for_a_gpu(stage):
    with hold(4, label="all", gpus=FOUR):
        assert stage("scorers.none", Launch(processes=4))


@pytest.fixture(scope="module")
def project(tiny_model_dir, tmp_path_factory) -> Project:
    made = Project.create(tmp_path_factory.mktemp("gpus") / "p", tiny_model_dir)
    made.edit("launch.processes", 2)
    return made


def planned(project: Project, *arguments: str) -> dict[str, tuple[int, int]]:
    """Return the threads and GPUs of each rule that a run would start."""
    text = project.call("snakemake", "-n", "--cores", "8", *arguments)
    found = {}
    for block in text.split("\nrule ")[1:]:
        threads = re.search(r"threads: (\d+)", block)
        gpu = re.search(r"resources: .*\bgpu=(\d+)", block)
        found[block.split(":")[0]] = (int(threads[1]) if threads else 1, int(gpu[1]) if gpu else 0)
    return found


def test_snakemake_told_of_the_gpus_gives_each_job_its_share_of_the_cores(project):
    rules = planned(project, "--resources", "gpu=4")
    shares = {"embed": (4, 2), "train": (4, 2), "evaluate": (2, 1), "validate": (2, 1)}
    shares |= {"prepare": (8, 0), "cluster": (8, 0)}
    assert {name: rules[name] for name in shares} == shares


def test_snakemake_not_told_of_gpus_asks_for_none(project):
    assert set(planned(project).values()) == {(8, 0), (1, 0)}


def test_snakemake_told_of_too_few_gpus_says_so_in_one_line(project):
    text = project.call("snakemake", "-n", "--cores", "8", "--resources", "gpu=1", status=1)
    assert "needs 2 GPUs, one a process, but Snakemake was told of 1" in text
    assert "Traceback" not in text


def test_workstation_profile_is_one_that_snakemake_takes(project):
    rules = planned(project, "--profile", "profiles/workstation")
    assert (rules["train"][1], rules["evaluate"][1]) == (2, 1)
