"""Run a Python program where it can harm nothing: no network, no files, no privilege, limits.

Isolation is Linux namespaces, used directly; `_jail.py` does the work in a process of its own.
`probe` really tries it: where it is not available nothing is run.
"""

from __future__ import annotations

import contextlib
import json
import os
import site
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from cluster_sft import _jail

# What a Python interpreter and its C extensions need of the system, beside their own prefixes.
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/nix/store", "/etc/ld.so.cache", "/etc/alternatives"),
)
SELF_TEST = """
import os, socket
assert os.getpid() == 1, "shares the processes of the machine"
assert os.getuid() not in (0,), "runs as root"
for folder in {folders}:
    try:
        open(os.path.join(folder, ".cluster-sft-probe"), "w")
    except OSError:
        continue
    raise SystemExit("can write to " + folder)
try:
    socket.create_connection(("192.0.2.1", 9), timeout=1)
except TimeoutError:
    raise SystemExit("has a route to the network")
except OSError:
    pass
open("own", "w").write("works")
print("isolated")
"""


@dataclass(frozen=True)
class Limits:
    """Bounds on one isolated program; the defaults leave room for EvalPlus's own (4 GiB, 60 s)."""

    wall_seconds: float = 240.0  # then killed with all descendants
    cpu_seconds: int = 240  # of each process
    memory_bytes: int = 4 << 30  # address space of each process, and resident memory of all
    file_bytes: int = 16 << 20  # of each file, output included; four times that in all
    processes: int = 16  # processes and threads at a time


@dataclass(frozen=True)
class Outcome:
    """How an isolated program ended; `output` is what it wrote to stdout."""

    state: Literal["exited", "timeout", "memory"]
    code: int  # exit status, or minus the signal number
    output: bytes
    error: str  # the end of what it wrote to stderr


class SandboxUnavailable(RuntimeError):
    """Isolation failed, and nothing was run; the message is the reason."""


def probe() -> str | None:
    """Return why programs cannot be isolated here, or None after a program has shown they can."""
    if sys.platform != "linux":
        return f"needs Linux namespaces, this is {sys.platform}"
    folders = [str(Path.home()), "/tmp", "/", str(Path(__file__).parent), "/usr"]
    try:
        outcome = run_isolated(
            ["-c", SELF_TEST.format(folders=folders)],
            limits=Limits(wall_seconds=30, cpu_seconds=10),
        )
    except SandboxUnavailable as error:
        return str(error)
    if outcome.state == "exited" and outcome.code == 0 and outcome.output == b"isolated\n":
        return None
    lines = outcome.error.strip().splitlines() or [f"{outcome.state}, status {outcome.code}"]
    return f"an isolated program {lines[-1]}"


def run_isolated(
    arguments: Sequence[str],
    *,
    request: bytes = b"",
    limits: Limits | None = None,
    environment: dict[str, str] | None = None,
) -> Outcome:
    """Run `python *arguments` isolated, with `request` as its stdin, and return how it ended.

    The program sees this interpreter, its installed packages and this package, all read-only, and
    starts in an empty directory that vanishes with it. No variable of this process's environment
    reaches it, so no token does. When this returns, no process of it exists.

    Raises:
        SandboxUnavailable: the program could not be isolated; it has not been started.
    """
    status_reader, status_writer = os.pipe()
    spec = {
        "argv": [sys.executable, *arguments],
        "env": _environment() | (environment or {}),
        "binds": _binds(),
        "limits": asdict(limits or Limits()),
        "status_fd": status_writer,
        "caller": os.getpid(),
    }
    # Files rather than pipes: the limit on file sizes then bounds the output too.
    with (
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
        os.fdopen(status_reader, "rb") as status_file,
    ):
        stdin.write(request)
        stdin.seek(0)
        try:
            subprocess.run(
                [sys.executable, "-I", "-S", _jail.__file__, json.dumps(spec)],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[status_writer],
                cwd="/",
                check=False,
            )
        finally:
            os.close(status_writer)
        status = _read_status(status_file.read())
        stdout.seek(0)
        stderr.seek(0)
        error = stderr.read()[-2000:].decode(errors="replace")
        if status["state"] == "unavailable":
            raise SandboxUnavailable(status["reason"] or error or "the jail gave no reason")
        return Outcome(status["state"], status["code"], stdout.read(), error)


def _read_status(written: bytes) -> dict:
    with contextlib.suppress(ValueError):
        return json.loads(written)
    return {"state": "unavailable", "code": 0, "reason": ""}


def _binds() -> list[str]:
    """Return the paths a program may see, outermost first, so that none hides another."""
    package = Path(__file__).parent
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    sites = [*site.getsitepackages(), site.getusersitepackages(), *sys.path]
    wanted = {
        *SYSTEM,
        sys.prefix,
        sys.base_prefix,
        *(path for path in sites if {"site-packages", "dist-packages"} & set(Path(path).parts)),
        *(path for path in libraries if path.startswith("/")),
        str(package),
    }
    kept: list[str] = []
    for path in sorted(path for path in wanted if os.path.exists(path) and path != "/"):
        if os.path.islink(path) and path in SYSTEM:
            continue
        if not any(Path(path).is_relative_to(outer) for outer in kept):
            kept.append(path)
    return kept


def _environment() -> dict[str, str]:
    home = _jail.WRITABLE
    values = {
        "PATH": "/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": home,
        "XDG_CACHE_HOME": home,
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    if libraries := os.environ.get("LD_LIBRARY_PATH"):
        values["LD_LIBRARY_PATH"] = libraries
    return values
