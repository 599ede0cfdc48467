"""Start worker processes of this package through `accelerate launch`, with nothing left to chance.

A job is a JSON file in the stage's scratch folder. The parent writes it, starts the workers with
explicit numbers (a user's own accelerate settings never apply) and waits; what they print goes to
a log file beside the job. A worker reports an error that a user can cause through a JSON file and
exit status 2; any other end is a defect and names the log.

Reads and writes, in scratch: job.json, accelerate.yaml, workers.log, error.json.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch

from cluster_sft import gpu_ticket
from cluster_sft.errors import UserError
from cluster_sft.threads import THREAD_VARIABLES, available_threads

JOB = "job.json"
LOG = "workers.log"
ERROR = "error.json"
POLL_SECONDS = 0.5
GRACE_SECONDS = 10.0
FULL_BYTES = 1 << 16  # a disk with less room is full
USER_ERROR_STATUS = 2
PORT_TAKEN = b"EADDRINUSE"  # in the log of a launcher whose rendezvous port was not free any more
# What describes other workers: our own parent's, or those of srun, mpirun and torchrun around it.
# accelerate would believe it (a PMI_SIZE of 1 makes every worker train alone).
FOREIGN = ("ACCELERATE_", "FSDP_", "PMI_", "PMIX_", "OMPI_COMM_", "MV2_COMM_", "TORCHELASTIC_")
FOREIGN_NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
)


def launch(
    module: str,
    job: Mapping[str, Any],
    *,
    processes: int,
    threads: int | None,
    use_gpu: bool,
    scratch: Path,
    on_poll: Callable[[], None],
) -> None:
    """Run `python -m module JOB` in `processes` processes and wait for them.

    Args:
        module: dotted name of a module of this package that calls `work`.
        job: JSON values for the workers; `processes` is added.
        processes: of one machine.
        threads: CPU threads of all processes together; None for all that this process may use.
        use_gpu: one GPU per process; otherwise CPU.
        scratch: folder of the job; it survives a kill.
        on_poll: called twice a second while the workers run, and once after them.

    Raises:
        UserError: a worker reported one.
        OSError: the workers failed and a disk that they write to is full.
        RuntimeError: the workers ended otherwise; the message names their log.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / ERROR).unlink(missing_ok=True)
    parent = {"pid": os.getpid(), "started": psutil.Process().create_time()}
    (scratch / JOB).write_text(json.dumps({**job, "processes": processes, "parent": parent}))
    environment = worker_environment(processes=processes, threads=threads, use_gpu=use_gpu)
    log = scratch / LOG
    for again in (True, False):
        command = accelerate_command(
            module, processes=processes, use_gpu=use_gpu, scratch=scratch, port=_free_port()
        )
        known = log.stat().st_size if log.exists() else 0
        status = _run(command, environment, log=log, on_poll=on_poll)
        # Nothing keeps the port between its choice and its use: another program may have come.
        if status == 0 or not (again and PORT_TAKEN in log.read_bytes()[known:]):
            break
    if (scratch / ERROR).is_file():
        raise UserError(json.loads((scratch / ERROR).read_text())["message"])
    if status != 0:
        _raise_if_full([scratch, *([Path(job["out"])] if "out" in job else [])])
        raise RuntimeError(
            f"{module}: the worker processes failed (exit {status}); "
            f"their log is {log} and ends with:\n{_tail(log)}"
        )


def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    log: Path,
    on_poll: Callable[[], None],
) -> int:
    """Run a launcher to its end, its output added to `log`; return its exit status."""
    with log.open("ab") as file:
        # A session of its own, so that one signal ends launcher and workers together.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                on_poll()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=POLL_SECONDS)
            on_poll()
        finally:
            _stop(process)
    return process.returncode


def accelerate_command(
    module: str, *, processes: int, use_gpu: bool, scratch: Path, port: int
) -> list[str]:
    """Return the `accelerate launch` command line; its config file is written to `scratch`.

    Several processes need `--multi_gpu` on CPUs too: with `--cpu` accelerate 1.15 starts a single
    process and says nothing.
    """
    several = processes > 1
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if several else "NO",
        "machine_rank": 0,
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": processes,
        "use_cpu": not use_gpu,
    }
    path = scratch / "accelerate.yaml"
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in config.items()))
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(path)),
        *("--num_processes", str(processes)),
        *("--num_machines", "1"),
        *("--mixed_precision", "no"),
        *("--dynamo_backend", "no"),
        *(("--multi_gpu", "--main_process_port", str(port)) if several else ()),
        *("--module", module, str(scratch / JOB)),
    ]


def worker_environment(*, processes: int, threads: int | None, use_gpu: bool) -> dict[str, str]:
    """Return the workers' environment: this one's, with threads divided and the device stated."""
    each = str(max(1, (threads or available_threads()) // processes))
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(FOREIGN) and name not in FOREIGN_NAMES
    }
    path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(path),
        # Snakemake sets all of them to the rule's threads. One that is left makes two processes of
        # two threads share two cores, where OpenMP's waiting threads take most of the time.
        **dict.fromkeys(THREAD_VARIABLES, each),
        "ACCELERATE_USE_CPU": str(not use_gpu).lower(),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def use_gpus(processes: int) -> bool:
    """Whether to compute on GPUs, one a process; UserError if there are some but too few."""
    count = torch.cuda.device_count()
    if 0 < count < processes:
        raise UserError(
            f"launch.processes is {processes}, but {count} GPUs are visible, one a process; lower "
            "it or change CUDA_VISIBLE_DEVICES"
        )
    return count > 0


def work(run: Callable[[dict[str, Any]], None]) -> None:
    """Be a worker: read the job named on the command line, run it, report a UserError.

    The worker ends itself soon after the stage or the launcher is gone: a killed stage must not
    leave workers behind that write to its scratch folder.
    """
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    gpu_ticket.share()
    threading.Thread(target=_watch, args=(job["parent"],), daemon=True).start()
    try:
        run(job)
    except UserError as error:
        beside = path.with_name(f"{ERROR}.{os.getpid()}")
        beside.write_text(json.dumps({"message": str(error)}))
        beside.replace(path.with_name(ERROR))
        _leave(USER_ERROR_STATUS)
    _leave(0)


def _leave(status: int) -> NoReturn:
    """End the process without the interpreter's teardown.

    All results are written by then, and a teardown of communication threads may never end: one of
    four workers once stood still there until the launcher was killed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _watch(parent: Mapping[str, Any]) -> None:
    launcher = os.getppid()
    while _is_alive(parent) and os.getppid() == launcher:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def _is_alive(parent: Mapping[str, Any]) -> bool:
    """Whether the process lives; its start time tells it from a later one of the same number."""
    try:
        process = psutil.Process(parent["pid"])
        same = abs(process.create_time() - parent["started"]) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and its workers if they still run."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_SECONDS)


def _raise_if_full(folders: Sequence[Path]) -> None:
    """Raise ENOSPC if one of the folders is on a full disk.

    Told by the disk, since libraries report it in exceptions of their own, and since a worker can
    write down no error where there is no room.
    """
    for folder in folders:
        if shutil.disk_usage(folder).free < FULL_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _tail(path: Path, lines: int = 20) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
