"""Child processes that this one waits for: started apart, told to end with time to, never left.

SIGTERM asks a job to end. It is noted and passed on, so that children can finish what a later run
would have to compute again.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

POLL_SECONDS = 0.5
GRACE_SECONDS = 10.0
STOP_SECONDS = 600.0  # for children that were told to end, to finish a step and save it
STOP = b"stop\n"  # tells so on standard input, to a child that passes it on


@contextmanager
def start(
    command: Sequence[str], environment: Mapping[str, str], *, log: Path, talks: bool
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a launcher whose output is added to `log`; it does not outlive the block.

    With `talks` its standard input is a pipe, which closes however this process ends.
    """
    with log.open("ab") as file:
        # A session of its own, so that one signal ends launcher and workers together.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            end(process)


def supervise(
    process: subprocess.Popen[bytes],
    *,
    on_poll: Callable[[], None] = lambda: None,
    asked: threading.Event | None = None,
    tell: bool = False,
) -> bool:
    """Wait for a launcher; when this process gets SIGTERM, tell its workers and allow some time.

    Args:
        process: of `start`.
        on_poll: called twice a second, and once after the end.
        asked: set by others who want the workers to end, as SIGTERM does.
        tell: through the launcher's standard input, since srun kills its tasks on SIGTERM.

    Returns:
        Whether the workers were told to end.
    """
    deadline = math.inf
    with sigterm_noted(asked or threading.Event()) as told:
        while process.poll() is None and time.monotonic() < deadline:
            on_poll()
            if told.is_set() and deadline == math.inf:
                deadline = time.monotonic() + STOP_SECONDS
                _tell(process, through_input=tell)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=POLL_SECONDS)
        while told.is_set() and _group_lives(process.pid) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)  # the launcher was told by others too, and did not wait
        on_poll()
        return told.is_set()


def _tell(process: subprocess.Popen[bytes], *, through_input: bool) -> None:
    with contextlib.suppress(psutil.NoSuchProcess, BrokenPipeError):
        if through_input and process.stdin is not None:
            os.write(process.stdin.fileno(), STOP)
            return
        for worker in psutil.Process(process.pid).children():
            worker.terminate()


def _group_lives(leader: int) -> bool:
    """Whether any process of the group is left that still runs."""
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == leader and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
    return False


@contextmanager
def sigterm_noted(event: threading.Event) -> Iterator[threading.Event]:
    """Set an event on SIGTERM in place of ending; in threads, where Python cannot, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.signal(signal.SIGTERM, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGTERM, before)


def end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and its workers if they still run, also workers that outlived it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        process.poll()
        if not _group_lives(process.pid):
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + GRACE_SECONDS
        while _group_lives(process.pid) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 5)
            process.poll()


def this_process() -> dict[str, float]:
    """Return what names this process for ever on its machine: its number and its start."""
    return {"pid": os.getpid(), "started": psutil.Process().create_time()}


def is_alive(named: Mapping[str, float]) -> bool:
    """Whether a process lives; its start time tells it from a later one of the same number."""
    try:
        process = psutil.Process(int(named["pid"]))
        same = abs(process.create_time() - named["started"]) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def tail(path: Path, *, lines: int = 20) -> str:
    """Return the last lines of a log."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
