"""GPUs of one machine, shared by jobs that know nothing of each other: all that one needs, or none.

Every request is a *ticket*: a numbered file in one folder of the machine, on which the process that
asks holds a lock (flock). The ticket says which GPUs it asks for and, once it was served, which it
got. A GPU is free if no locked ticket has got it. The kernel drops the lock of a process however
that ends, so a killed job loses its GPUs, and a killed waiter its place. Workers take the lock as
well (`gpu_ticket.share`): the GPUs of a killed stage are free only when its last worker has ended.

Tickets are read and written under a mutex, and every waiter works out the same division of the
free GPUs from them, see `allot`: oldest first, and what an old ticket still gathers is not given to
a younger one. So nobody holds some GPUs while it waits for more, and nobody starves.

The folder is /tmp/cluster-sft-gpus, for all users of the machine, or CLUSTER_SFT_GPU_LOCKS. Under
Slurm the scheduler has given out the GPUs, and nothing here is done.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cluster_sft.errors import UserError
from cluster_sft.gpu_devices import MIG, Gpu, find_gpus, visible_gpus
from cluster_sft.gpu_ticket import TICKET
from cluster_sft.variables import variables

LOCKS = "CLUSTER_SFT_GPU_LOCKS"
VISIBLE = "CUDA_VISIBLE_DEVICES"
# Not TMPDIR: users and sessions that have one of their own would not see each other's tickets.
FOLDER = Path("/tmp/cluster-sft-gpus")
MUTEX = "mutex"
NAME = re.compile(r"ticket-(\d+)")
POLL_SECONDS = 0.2
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Ticket:
    """A request for `count` of the GPUs `among`; it waits until it has `got` them."""

    number: int
    pid: int
    label: str
    count: int
    among: tuple[str, ...]
    got: tuple[str, ...] = ()


@contextmanager
def hold(count: int, *, label: str, gpus: Sequence[Gpu] | None = None) -> Iterator[tuple[str, ...]]:
    """Wait for `count` GPUs, and have CUDA see just these, here and in children, inside the block.

    Enter it before CUDA is initialised, which reads CUDA_VISIBLE_DEVICES once. A process that has
    computed on its GPUs itself keeps them until it ends, since its CUDA context lasts as long.

    Args:
        count: how many; 0 for a job that computes on none.
        label: says to others who holds the GPUs.
        gpus: those of the machine, by default as `find_gpus` finds them.

    Yields:
        The GPUs as CUDA_VISIBLE_DEVICES names them. Empty, with nothing set, where there are none
        to give: `count` is 0, no GPU is visible, or Slurm or a `hold` around it has given them out.

    Raises:
        UserError: more than are visible, which no wait can mend, or no place for the tickets.
    """
    if count == 0 or not os.environ.keys().isdisjoint(("SLURM_JOB_ID", TICKET)):
        yield ()
        return
    outer = os.environ.get(VISIBLE)
    names = visible_gpus(outer, find_gpus() if gpus is None else gpus)
    if not names:
        yield ()
        return
    if count > 1:  # CUDA gives a process no more than one slice of a GPU
        names = {gpu: name for gpu, name in names.items() if not gpu.startswith(MIG)}
    if count > len(names):
        raise UserError(
            f"{label}: needs {count} GPUs, one a process, but {len(names)} are there"
            f"{'' if outer is None else f' under {VISIBLE}={outer}'}; lower launch.processes"
            f"{'' if outer is None else f' or change {VISIBLE}'}"
        )
    with _queued(count, label, names) as (got, path):
        chosen = tuple(names[gpu] for gpu in got)
        # By bus as nvidia-smi counts, or else a number may mean another GPU to CUDA.
        told = {VISIBLE: ",".join(chosen), "CUDA_DEVICE_ORDER": "PCI_BUS_ID", TICKET: str(path)}
        with variables(told):
            yield chosen


def allot(tickets: Sequence[Ticket], number: int) -> tuple[str, ...]:
    """Return the GPUs that the waiting ticket `number` may take now, () if it has to wait.

    Oldest first, every waiting ticket is given the first free GPUs it asks for. One that does not
    find enough keeps those it finds from all younger ones, so that they gather until it is served.

    Args:
        tickets: all of them, in any order.
        number: of one that waits.
    """
    taken = {gpu for ticket in tickets for gpu in ticket.got}
    for ticket in sorted((t for t in tickets if not t.got), key=lambda t: t.number):
        found = tuple(gpu for gpu in ticket.among if gpu not in taken)[: ticket.count]
        if ticket.number == number:
            return found if len(found) == ticket.count else ()
        taken.update(found)
    raise AssertionError(f"ticket {number} does not wait")


@contextmanager
def _queued(
    count: int, label: str, names: Mapping[str, str]
) -> Iterator[tuple[tuple[str, ...], Path]]:
    """Draw a ticket and wait until it is served; yield its GPUs and its path."""
    path = Path(os.environ[LOCKS]).resolve() if os.environ.get(LOCKS) else FOLDER
    with contextlib.ExitStack() as held:
        with _user_errors(path):
            folder = _open_folder(path)
            held.callback(os.close, folder)
            file, mine = _draw(folder, Ticket(0, os.getpid(), label, count, tuple(names)))
            held.callback(_leave, folder, file)
            got = _wait(folder, file, mine, names)
        try:
            yield got, path / _name(mine)
        finally:
            if _has_context():
                held.pop_all()


def _wait(folder: int, file: int, mine: Ticket, names: Mapping[str, str]) -> tuple[str, ...]:
    """Wait until the ticket may take its GPUs, write them down and return them."""
    told = False
    while True:
        with _alone(folder):
            if os.fstat(file).st_nlink == 0:
                raise UserError(f"{mine.label}: its ticket {_name(mine)} was removed; run it again")
            tickets = _standing(folder)
            if got := allot(tickets, mine.number):
                _write(file, replace(mine, got=got))
                return got
        if not told:
            print(_reason(tickets, mine, names), file=sys.stderr, flush=True)
            told = True
        time.sleep(POLL_SECONDS * random.uniform(0.5, 1.5))


def _leave(folder: int, file: int) -> None:
    """Let go of a ticket; a child that has its file open as well, by a fork, still holds it."""
    os.close(file)
    with _alone(folder):
        _standing(folder)


def _reason(tickets: Sequence[Ticket], mine: Ticket, names: Mapping[str, str]) -> str:
    """Return what a ticket waits for: who has its GPUs, and who is served before it."""
    parts = [f"waiting for {mine.count} of {len(names)} GPUs"]
    for other in sorted(tickets, key=lambda t: t.number):
        who = f"pid {other.pid} ({other.label})"
        if has := [names[gpu] for gpu in other.got if gpu in names]:
            parts.append(f"{','.join(has)} held by {who}")
        elif not other.got and other.number < mine.number and set(other.among) & set(names):
            parts.append(f"{who} is before it and waits for {other.count}")
    return "; ".join(parts)


def _draw(folder: int, request: Ticket) -> tuple[int, Ticket]:
    """Write a new ticket, younger than all others, and lock it; return its file and the ticket."""
    with _alone(folder):
        numbers = [int(m[1]) for name in os.listdir(folder) if (m := NAME.fullmatch(name))]
        mine = replace(request, number=max(numbers, default=0) + 1)
        file = _create(_name(mine), folder)
        fcntl.flock(file, fcntl.LOCK_SH)
        _write(file, mine)
    return file, mine


def _standing(folder: int) -> list[Ticket]:
    """Return the tickets that some process holds; remove the others. The mutex must be held."""
    found = []
    for name in os.listdir(folder):
        if not NAME.fullmatch(name):
            continue
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
        try:
            if _lock_alone(file):
                with contextlib.suppress(PermissionError):  # another user's, who will remove it
                    os.unlink(name, dir_fd=folder)
                continue
            with contextlib.suppress(ValueError, TypeError, KeyError):  # no ticket of this program
                found.append(_read(file))
        finally:
            os.close(file)
    return found


def _read(file: int) -> Ticket:
    told: dict[str, Any] = json.loads(os.read(file, 1 << 20))
    return Ticket(**{**told, "among": tuple(told["among"]), "got": tuple(told["got"])})


def _lock_alone(file: int) -> bool:
    """Whether nobody else holds the file, which is then locked until it is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(file: int, ticket: Ticket) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(asdict(ticket)).encode(), 0)


def _name(ticket: Ticket) -> str:
    return f"ticket-{ticket.number}"


@contextmanager
def _alone(folder: int) -> Iterator[None]:
    """Hold the folder's mutex: for a look at the tickets, never for a wait."""
    flags = os.O_RDONLY | os.O_NOFOLLOW
    try:
        file = os.open(MUTEX, flags, dir_fd=folder)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.close(_create(MUTEX, folder))
        file = os.open(MUTEX, flags, dir_fd=folder)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # a child forked by another thread may have it as well
        os.close(file)


def _open_folder(path: Path) -> int:
    """Return the folder of tickets, made for all users if it is not there."""
    with _all_users(), contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o1777)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    fcntl.flock(folder, fcntl.LOCK_SH)  # systemd-tmpfiles clears out no folder that is locked
    return folder


def _create(name: str, folder: int) -> int:
    # Kernels refuse O_CREAT alone on another user's file in a folder like /tmp.
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with _all_users():
        return os.open(name, flags, 0o644, dir_fd=folder)


@contextmanager
def _all_users() -> Iterator[None]:
    """Create files with the mode that is asked for, from their first moment."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def _user_errors(folder: Path) -> Iterator[None]:
    remedy = (
        f"set {LOCKS} to a folder on a disk of this machine that every user of its GPUs can use"
    )
    try:
        yield
    except OSError as error:
        if error.errno in NO_LOCKS:
            raise UserError(f"{folder}: its file system knows no locks; {remedy}") from error
        raise UserError(f"{folder}: cannot be used ({error.strerror}); {remedy}") from error


def _has_context() -> bool:
    """Whether this process has computed on a GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()
