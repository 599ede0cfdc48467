"""Claims between machines: who lives is waited for, who is dead no longer than is needed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from cluster_sft import claims
from cluster_sft.claims import HEARTBEAT, HOLDER, claimed, is_claimed

OTHER = "process 7 on elsewhere"


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(claims, "DEAD_SECONDS", 1.5)
    monkeypatch.setattr(claims, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(claims, "POLL_SECONDS", 0.05)


@pytest.fixture
def scratch(tmp_path):
    """A folder that a process of another machine, where locks do not reach, has claimed."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    for name in (HOLDER, HEARTBEAT):
        (folder / name).write_text(OTHER)
    return folder


@contextmanager
def beating(folder):
    """Renew the other machine's heartbeat until the end."""
    ended = threading.Event()

    def beat():
        while not ended.wait(0.05):
            os.utime(folder / HEARTBEAT)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def start_claim(scratch):
    """Claim in a thread; return it, and the event that the claim was got."""
    entered = threading.Event()

    def claim():
        with claimed(scratch):
            entered.set()

    waiting = threading.Thread(target=claim)
    waiting.start()
    return waiting, entered


def test_claim_of_a_live_process_of_another_machine_is_waited_for(scratch, capsys):
    with beating(scratch):
        waiting, entered = start_claim(scratch)
        assert not entered.wait(3)
        assert (scratch / HEARTBEAT).read_text() == OTHER
    (scratch / HEARTBEAT).unlink()  # as a process does that has finished
    waiting.join(timeout=60)
    assert entered.is_set()
    assert capsys.readouterr().err.count(f"{OTHER} is making this very result; waiting") == 1


def test_claim_of_a_dead_process_of_another_machine_is_taken_over(scratch):
    (scratch / "checkpoint").write_text("7")
    started = time.monotonic()
    with claimed(scratch):
        assert time.monotonic() - started >= claims.DEAD_SECONDS
        assert (scratch / HEARTBEAT).read_text() == (scratch / HOLDER).read_text() != OTHER
    assert sorted(os.listdir(scratch)) == ["checkpoint", HOLDER]


def test_claim_of_a_dead_machine_whose_lock_the_server_keeps_is_taken_over(scratch):
    code = (
        "import fcntl, sys\nfile = open(sys.argv[1], 'r+')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\nprint('held', flush=True)\ninput()\n"
    )
    command = [sys.executable, "-c", code, str(scratch / HOLDER)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as child:
        try:
            assert child.stdout.readline() == "held\n"
            with claimed(scratch):
                assert is_locked(scratch / HOLDER)
                assert (scratch / HOLDER).read_text() != OTHER
        finally:
            child.kill()


def is_locked(path):
    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_claim_of_a_killed_process_of_this_machine_is_not_waited_for(scratch, monkeypatch):
    monkeypatch.setattr(claims, "DEAD_SECONDS", 60)
    (scratch / HEARTBEAT).write_text(f"process 7{claims._host()}")
    started = time.monotonic()
    with claimed(scratch):
        assert time.monotonic() - started < 60


def test_claim_released_is_free_for_every_machine_at_once(scratch):
    (scratch / HEARTBEAT).unlink()
    (scratch / "checkpoint").write_text("7")
    with claimed(scratch):
        first = (scratch / HEARTBEAT).stat().st_mtime_ns
        deadline = time.monotonic() + 10
        while (scratch / HEARTBEAT).stat().st_mtime_ns == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not (scratch / HEARTBEAT).exists()


def test_claim_of_another_machine_counts_for_gc_while_its_heart_beats(scratch):
    assert is_claimed(scratch)
    os.utime(scratch / HEARTBEAT, (time.time() - 10, time.time() - 10))
    assert not is_claimed(scratch)


def test_claim_without_locks_is_told_by_the_heartbeat_on_the_same_machine_too(scratch, monkeypatch):
    monkeypatch.setattr(claims, "_locks", lambda file: None)
    (scratch / HEARTBEAT).write_text(f"process 7{claims._host()}")
    with beating(scratch):
        waiting, entered = start_claim(scratch)
        assert not entered.wait(3)
        assert is_claimed(scratch)
    waiting.join(timeout=60)  # as of a killed process, it beats no more
    assert entered.is_set()


def test_claims_of_one_folder_side_by_side_are_held_one_at_a_time(tmp_path):
    holding, most, lock = [], [], threading.Lock()

    def claim(_):
        with claimed(tmp_path / "scratch"):
            with lock:
                holding.append(1)
                most.append(len(holding))
            time.sleep(0.005)
            with lock:
                holding.pop()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(claim, range(60)))
    assert (max(most), len(most)) == (1, 60)
    assert not (tmp_path / "scratch").exists()


def test_holder_that_was_halted_for_long_ends_at_once_and_leaves_what_is_anothers(tmp_path):
    scratch = tmp_path / "scratch"
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom cluster_sft import claims\n"
        "claims.BEAT_SECONDS = 0.05\n"
        "with claims.claimed(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(scratch)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as child:
        try:
            assert child.stdout.readline() == "held\n"
            (scratch / "taken").write_text(OTHER)
            (scratch / "taken").rename(scratch / HEARTBEAT)
            _, told = child.communicate(timeout=60)
        finally:
            child.kill()
    assert child.returncode == claims.INTERRUPTED
    assert told.count("\n") == 1 and f"{OTHER} took over" in told
    assert (scratch / HEARTBEAT).read_text() == OTHER


def test_takeover_leaves_the_claim_of_whoever_was_faster(scratch):
    late = claims._Other(scratch)
    assert late.lives(locked=False)
    (scratch / HEARTBEAT).unlink()
    (scratch / HEARTBEAT).write_text("process 8 on a third machine")
    os.utime(scratch / HEARTBEAT, (1, 1))
    late.bury(locked=False)
    assert (scratch / HEARTBEAT).read_text() == "process 8 on a third machine"
    assert (scratch / HOLDER).exists()
