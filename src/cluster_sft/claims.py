"""Claims: of processes that would make the same result, one works in its scratch folder."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from cluster_sft.errors import UserError

HOLDER = "holder"


@contextmanager
def claimed(scratch: Path) -> Iterator[Path]:
    """Hold a scratch folder for this process; the kernel lets go of it however the process ends.

    What a stage leaves in the folder stays for the next run to resume from; if that is nothing, the
    folder goes.

    Raises:
        UserError: another live process makes the same result.
    """
    while True:
        scratch.mkdir(parents=True, exist_ok=True)
        with (scratch / HOLDER).open("a+") as file:
            if not _locks(file):
                file.seek(0)
                raise UserError(
                    f"{scratch}: {file.read() or 'another process'} is making this very result; "
                    "wait for it or end it"
                )
            if not _stands_at(file, scratch / HOLDER):
                continue  # its last holder finished, and removed the folder, as we came
            try:
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}")
                file.flush()
                yield scratch
            finally:
                if scratch.is_dir() and os.listdir(scratch) == [HOLDER]:
                    shutil.rmtree(scratch)
            return


def is_claimed(scratch: Path) -> bool:
    """Whether a live process holds a scratch folder."""
    try:
        with (scratch / HOLDER).open("r+") as file:
            return not _locks(file)
    except FileNotFoundError:
        return False


def _locks(file: IO[str]) -> bool:
    """Whether the file could be locked; True too on a file system that knows no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return True


def _stands_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
