"""Start one program in an isolated place, supervise it, and leave nothing of it behind.

Run as a script by `sandbox.py`, never imported by it: standard library only, one thread, since a
process with threads may not enter a user namespace. `argv[1]` is a JSON object (see `main`).

The program becomes process 1 of a new PID namespace, so that its death takes every descendant with
it. It has no network interface, a root file system of read-only mounts of what Python needs, one
empty writable directory, and no privilege: if started by root it is a user who owns nothing,
otherwise the caller's own user inside a user namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

NOBODY = 65534
# Numbers that no file belongs to (systemd's dynamic users). One each, so that programs at the same
# time do not share a count of processes.
USERS = range(61184, 65520)
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 4096, 16384, 1 << 18, 1 << 21
ST_RELATIME = 4096
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217}
DEVICES = ("null", "zero", "random", "urandom")
# psutil, which EvalPlus asks for the memory size, reads these; the rest of /proc stays out.
PROC_FILES = ("meminfo", "stat", "cpuinfo")
WRITABLE = "/sandbox"

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Run `argv` of the JSON in argv[1] isolated and write how it ended to its `status_fd`.

    Keys: argv, env, binds (paths to show read-only), limits (see `sandbox.Limits`), status_fd,
    caller (process id of the parent; if it is gone already, nothing is started).
    Written: {"state": "exited" | "timeout" | "memory" | "unavailable", "code": int, "reason": str}.
    """
    spec = json.loads(sys.argv[1])
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != spec["caller"]:
        return
    try:
        status = _supervise(*_start(spec), spec["limits"])
    except OSError as error:
        status = {"state": "unavailable", "code": 0, "reason": str(error)}
    os.write(spec["status_fd"], json.dumps(status).encode())


def _start(spec: dict[str, Any]) -> tuple[int, int]:
    """Return the process id of the isolated program and the pipe that tells of a failed start."""
    user = USERS[os.getpid() % len(USERS)]
    as_root = os.geteuid() == 0 and _user_exists(user)
    if not as_root:
        user = NOBODY
        spec["limits"]["processes"] += _tasks_counted_with_ours()
    _enter_namespaces(as_root)
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    try:
        os.close(reader)
        os.close(spec["status_fd"])
        os.setsid()
        _build_root(spec["binds"], user, spec["limits"]["file_bytes"])
        _limit(spec["limits"])
        if as_root:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        # After the change of user, which would clear it.
        _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if _is_unread(writer):  # the supervisor died before that: nobody would end the program
            os._exit(1)
        _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        os.execve(spec["argv"][0], spec["argv"], spec["env"])
    except BaseException as error:
        with contextlib.suppress(BrokenPipeError):
            os.write(writer, f"{type(error).__name__}: {error}".encode())
    os._exit(1)


def _is_unread(writer: int) -> bool:
    """Say whether no process holds the reading end of a pipe any more."""
    poll = select.poll()
    poll.register(writer, 0)  # POLLERR is always told
    return bool(poll.poll(0))


def _enter_namespaces(as_root: bool) -> None:
    flags = CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS
    if as_root:
        _call("unshare", flags)
        return
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", flags | CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {gid} 1")


def _user_exists(uid: int) -> bool:
    """Say whether `uid` exists here: root of a rootless container may be the only user."""
    ranges = (line.split() for line in Path("/proc/self/uid_map").read_text().splitlines())
    return any(int(start) <= uid < int(start) + int(length) for start, _, length in ranges)


def _tasks_counted_with_ours() -> int:
    """Return how many running tasks of this user share our count of processes (RLIMIT_NPROC).

    Since Linux 5.14 the count of a user namespace starts at zero.
    """
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (5, 14):
        return 0
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == os.geteuid():
                count += len(os.listdir(process / "task"))
    return count


def _build_root(binds: list[str], user: int, file_bytes: int) -> None:
    """Make a root of read-only mounts of `binds` plus one writable directory, and enter it."""
    _call("unshare", CLONE_NEWNS)
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    sources = {path: os.path.realpath(path) for path in binds}
    _mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV)
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/new")
    _pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    _mount("tmpfs", "/new", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    for link in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(f"/old{link}"):
            os.symlink(os.readlink(f"/old{link}"), f"/new{link}")
    for path, source in sorted(sources.items()):
        for target in sorted({path, source}):
            _bind(f"/old{source}", f"/new{target}")
    for name in PROC_FILES:
        _bind(f"/old/proc/{name}", f"/new/proc/{name}")
    _make_read_only()
    for name in DEVICES:
        _bind(f"/old/dev/{name}", f"/new/dev/{name}")
    for path in (WRITABLE, "/dev/shm"):
        os.makedirs(f"/new{path}", exist_ok=True)
        options = f"size={4 * file_bytes},nr_inodes=4096,mode=700,uid={user},gid={user}"
        _mount("tmpfs", f"/new{path}", "tmpfs", MS_NOSUID | MS_NODEV, options)
    # System V shared memory outlives its process and is counted by no limit of ours.
    with contextlib.suppress(OSError):
        Path("/old/proc/sys/kernel/shmall").write_text("0")
    flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV
    _mount(None, "/new", None, flags)
    os.chdir("/new")
    _pivot_root(".", ".")
    if libc.umount2(b".", MNT_DETACH):
        raise OSError(ctypes.get_errno(), "umount2")
    os.chdir(WRITABLE)


def _bind(source: str, target: str) -> None:
    if os.path.lexists(target) or not os.path.exists(source):
        return
    if os.path.isdir(source):
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    _mount(source, target, None, MS_BIND | MS_REC)


def _make_read_only() -> None:
    for line in Path("/old/proc/self/mountinfo").read_text().splitlines():
        point = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), line.split()[4])
        if not point.startswith("/new/"):
            continue
        kept = os.statvfs(point).f_flag
        # Flags that a mount came with may not be dropped inside a user namespace.
        flags = kept & (MS_NOEXEC | 1024 | 2048) | (MS_RELATIME if kept & ST_RELATIME else 0)
        flags |= MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV
        _mount(None, point, None, flags)


def _limit(limits: dict[str, Any]) -> None:
    cpu = int(limits["cpu_seconds"])
    for kind, value in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (value, value))
    # If memory runs out nevertheless, the kernel takes it from here first.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _supervise(child: int, failure: int, limits: dict[str, Any]) -> dict[str, Any]:
    """Wait for `child`; kill it, and with it all its descendants, at the wall or memory limit."""
    deadline = time.monotonic() + limits["wall_seconds"]
    if reason := os.read(failure, 4096).decode(errors="replace"):
        os.waitpid(child, 0)
        return {"state": "unavailable", "code": 0, "reason": reason}
    state = "exited"
    while True:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            return {"state": state, "code": os.waitstatus_to_exitcode(code), "reason": ""}
        if time.monotonic() > deadline:
            state = "timeout"
        elif _resident_bytes(child) > limits["memory_bytes"]:
            state = "memory"
        if state != "exited":
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)


def _resident_bytes(process: int) -> int:
    """Return the private memory of `process` and its descendants; orphans are children of it."""
    total, queue = 0, [process]
    while queue:
        task = Path(f"/proc/{queue.pop()}")
        with contextlib.suppress(OSError):
            fields = (task / "statm").read_text().split()
            total += (int(fields[1]) - int(fields[2])) * resource.getpagesize()
            for children in task.glob("task/*/children"):
                queue += [int(pid) for pid in children.read_text().split()]
    return total


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    arguments = [None if text is None else text.encode() for text in (source, target, kind)]
    if libc.mount(*arguments, ctypes.c_ulong(flags), data.encode() or None):
        error = ctypes.get_errno()
        raise OSError(error, f"mount {target}: {os.strerror(error)}")


def _pivot_root(new: str, old: str) -> None:
    number = SYS_PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(f"the pivot_root call is not known for {os.uname().machine}")
    if libc.syscall(ctypes.c_long(number), new.encode(), old.encode()):
        error = ctypes.get_errno()
        raise OSError(error, f"pivot_root: {os.strerror(error)}")


def _call(name: str, *arguments: int) -> None:
    if getattr(libc, name)(*(ctypes.c_ulong(value) for value in arguments)):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


if __name__ == "__main__":
    main()
