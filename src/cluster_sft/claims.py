"""Claims: of processes that would make the same result, one works in its scratch folder.

On one machine the kernel's lock on `holder` tells whether the holder lives. Between machines that
share the folder such locks may reach no further than their own, or outlive it. There the file
`heartbeat` tells: only one process can create it, and who holds it renews its time.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, NoReturn

HOLDER = "holder"
HEARTBEAT = "heartbeat"
FILES = {HOLDER, HEARTBEAT}
BEAT_SECONDS = 10.0
POLL_SECONDS = 0.5
DEAD_SECONDS = 120.0  # without a beat, as file systems may show a time that is a minute old
INTERRUPTED = 130  # exit status, as of Ctrl-C
WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@contextmanager
def claimed(scratch: Path) -> Iterator[Path]:
    """Hold a scratch folder for this process; it is free again however the process ends.

    A live process that makes the same result, perhaps for another leaf, is waited for, and one that
    was killed on another machine until it cannot live. What a stage leaves in the folder stays for
    the next run to resume from; if that is nothing, the folder goes.
    """
    other = _Other(scratch)
    while True:
        try:
            scratch.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            if scratch.is_file():
                raise
            continue  # its last holder removed the folder, as we looked what it is
        with ExitStack() as last:
            last.callback(_remove_if_empty, scratch)  # once `holder` is closed, for NFS
            try:
                file = last.enter_context((scratch / HOLDER).open("a+"))
            except FileNotFoundError:
                continue  # its last holder removed the folder, as we came
            locked = _locks(file)
            if locked is not False and not _stands_at(file, scratch / HOLDER):
                continue  # or made another
            if locked is not False and _is_begun(scratch):
                try:
                    file.truncate(0)
                    file.write(_me())
                    file.flush()
                    with _beating(scratch / HEARTBEAT):
                        yield scratch
                finally:
                    if _read(scratch / HEARTBEAT) == _me():
                        (scratch / HEARTBEAT).unlink(missing_ok=True)
                        _drop_holder_alone(scratch)
                return
            if not other.lives(locked=locked):
                other.bury(locked=locked)
                continue
        time.sleep(POLL_SECONDS)


class _Other:
    """The process that holds a claim, as far as its files tell."""

    def __init__(self, scratch: Path):
        self._scratch = scratch
        self._beat: tuple[int, int] | None = None
        self._since = time.monotonic()
        self._told = False

    def lives(self, *, locked: bool | None) -> bool:
        """Whether the holder may live; `locked` is what `_locks` said of its lock.

        Of another machine, whose clock may differ, only a change of the heartbeat's time counts; so
        it does without locks.
        """
        name = _read(self._scratch / HEARTBEAT) or _read(self._scratch / HOLDER)
        here = name.endswith(_host()) and locked is not None
        if (beat := _beaten(self._scratch / HEARTBEAT)) != self._beat:
            self._beat, self._since = beat, time.monotonic()
        if here and locked:
            return False
        if not here and time.monotonic() - self._since >= DEAD_SECONDS:
            return False
        if not self._told:
            until = "" if here else f", or until it was silent for {DEAD_SECONDS:.0f} s"
            who = name or "another process"
            told = f"{self._scratch}: {who} is making this very result; waiting for it{until}"
            print(told, file=sys.stderr, flush=True)
            self._told = True
        return True

    def bury(self, *, locked: bool | None) -> None:
        """Remove the claim of a holder that lives no more, unless another process just did."""
        mine = self._scratch / f"{HEARTBEAT}-{os.getpid()}{_host().replace(' ', '-')}"
        with suppress(FileNotFoundError):
            (self._scratch / HEARTBEAT).rename(mine)
            if _beaten(mine) != self._beat:
                mine.rename(self._scratch / HEARTBEAT)
                return
            mine.unlink()
        if locked is False:  # a file server may keep the lock of a machine that is gone
            (self._scratch / HOLDER).unlink(missing_ok=True)


def is_claimed(scratch: Path) -> bool:
    """Whether a live process holds a scratch folder, of this machine or of another."""
    try:
        with (scratch / HOLDER).open("r+") as file:
            locked = _locks(file)
            if locked is False:
                return True
        beat = scratch / HEARTBEAT
        mine = locked and _read(beat).endswith(_host())
        return not mine and time.time() - beat.stat().st_mtime < DEAD_SECONDS
    except FileNotFoundError:
        return False


def _is_begun(scratch: Path) -> bool:
    """Create the heartbeat of this process; False if there is one, of whatever machine."""
    try:
        return _create(scratch / HEARTBEAT)
    except OSError:
        _drop_holder_alone(scratch)
        raise


def _drop_holder_alone(scratch: Path) -> None:
    """Remove `holder` where there is nothing to resume from, so that the folder can go."""
    with suppress(FileNotFoundError):  # someone removed the folder
        if os.listdir(scratch) == [HOLDER]:
            (scratch / HOLDER).unlink()


def _remove_if_empty(scratch: Path) -> None:
    with suppress(OSError):  # what is to be resumed from is in it, or the next claim
        scratch.rmdir()


def _me() -> str:
    return f"process {os.getpid()}{_host()}"


@functools.cache  # the name may change under a process that runs for days
def _host() -> str:
    return f" on {socket.gethostname()}"


def _create(path: Path) -> bool:
    """Create a file that says who this is; False if it exists, on whatever machine it was made."""
    try:
        with path.open("x") as file:
            file.write(_me())
    except FileExistsError:
        return False
    except OSError:  # a full disk
        path.unlink(missing_ok=True)
        raise
    return True


@contextmanager
def _beating(path: Path) -> Iterator[None]:
    """Renew a file's time again and again in a thread; end the process if its claim is lost."""
    ended = threading.Event()

    def beat() -> None:
        lost = 0
        while not ended.wait(BEAT_SECONDS):
            with suppress(OSError):  # a file system that is away for a while
                # Gone or empty it may be for an instant, while another process looks after it.
                name = _read(path)
                lost = lost + 1 if name == "" else 0
                if lost > 1 or name not in ("", _me()):
                    _give_way(path, name)
                os.utime(path)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _give_way(heartbeat: Path, name: str) -> NoReturn:
    """End this process with nothing cleaned up, since all that it could touch is another's."""
    who = name or "another process"
    told = f"{heartbeat.parent}: {who} took over while this process stood still; it ends"
    try:
        print(f"cluster-sft: {told}", file=sys.stderr, flush=True)
    finally:
        os._exit(INTERRUPTED)


def _beaten(path: Path) -> tuple[int, int] | None:
    """Return the file's identity and time, None if it is gone; opened, lest they are remembered."""
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _read(path: Path) -> str:
    with suppress(FileNotFoundError):
        return path.read_text()
    return ""


def _locks(file: IO[str]) -> bool | None:
    """Whether the file could be locked; None on a file system that knows no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        return None
    return True


def _stands_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
