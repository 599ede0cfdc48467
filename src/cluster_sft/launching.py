"""Start worker processes of this package through `accelerate launch`, with nothing left to chance.

A job is a JSON file in the stage's scratch folder. The parent writes it, starts the workers with
explicit numbers (a user's own accelerate settings never apply) and waits; what they print goes to
a log file beside the job. A worker reports an error that a user can cause through a JSON file and
exit status 2; any other end is a defect and names the log. On several nodes of a Slurm job srun
starts `node_launcher` once on each, which starts the workers of that node.

SIGTERM asks a job to end: its workers get it too, and those that can finish what a later run would
have to compute again. Reads and writes, in scratch: job.json, accelerate.yaml, workers.log,
error.json; on several nodes also accelerate-N.yaml and workers-N.log of node N.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from cluster_sft import gpu_ticket, slurm
from cluster_sft.errors import UserError
from cluster_sft.supervision import (
    POLL_SECONDS,
    STOP_SECONDS,
    is_alive,
    sigterm_noted,
    start,
    supervise,
    tail,
    this_process,
)
from cluster_sft.threads import THREAD_VARIABLES, available_threads
from cluster_sft.variables import python_path

JOB = "job.json"
LOG = "workers.log"
ERROR = "error.json"
PARENT = "CLUSTER_SFT_PARENT"  # variable: the process that workers must not outlive
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
    nodes: int = 1,
) -> None:
    """Run `python -m module JOB` in `processes` processes and wait for them.

    Args:
        module: dotted name of a module of this package that calls `work`.
        job: JSON values for the workers; `processes` is added.
        processes: of all nodes together, equally many on each.
        threads: CPU threads of a node's processes together; None for all that this one may use.
        use_gpu: one GPU per process; otherwise CPU.
        scratch: folder of the job; it survives a kill.
        on_poll: called twice a second while the workers run, and once after them.
        nodes: machines of the Slurm job that this process runs in; 1 for this machine.

    Raises:
        UserError: a worker reported one, or the Slurm job has no such nodes.
        KeyboardInterrupt: the workers were told to end and did.
        OSError: the workers failed and a disk that they write to is full.
        RuntimeError: the workers ended otherwise; the message names their log.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / ERROR).unlink(missing_ok=True)
    mine = {"module": module, "nodes": nodes, "threads": threads, "use_gpu": use_gpu}
    (scratch / JOB).write_text(json.dumps({**job, **mine, "processes": processes}))
    log = scratch / LOG
    for again in (nodes == 1, False):
        command, environment = _starter(
            module, processes, nodes=nodes, threads=threads, use_gpu=use_gpu, scratch=scratch
        )
        known = log.stat().st_size if log.exists() else 0
        with start(command, environment, log=log, talks=nodes > 1) as process:
            told = supervise(process, on_poll=on_poll, tell=nodes > 1)
        # Nothing keeps the port between its choice and its use: another program may have come.
        failed = process.returncode != 0 and not told
        if not (failed and again and PORT_TAKEN in log.read_bytes()[known:]):
            break
    _raise_reported(scratch / ERROR)
    if told and process.returncode != 0:
        raise KeyboardInterrupt
    if process.returncode != 0:
        _raise_if_full([scratch, *([Path(job["out"])] if "out" in job else [])])
        raise RuntimeError(
            f"{module}: the worker processes failed (exit {process.returncode}); "
            f"their log is {log} and ends with:\n{tail(log, lines=20 if nodes == 1 else 100)}"
        )


def _starter(
    module: str,
    processes: int,
    *,
    nodes: int,
    threads: int | None,
    use_gpu: bool,
    scratch: Path,
) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of what starts the workers, on this machine or by srun."""
    if nodes == 1:
        command = accelerate_command(
            module, processes=processes, use_gpu=use_gpu, scratch=scratch, port=_free_port()
        )
        return command, worker_environment(processes=processes, threads=threads, use_gpu=use_gpu)
    program = [sys.executable, "-m", "cluster_sft.node_launcher", str(scratch / JOB)]
    environment = {**slurm.srun_environment(), "PYTHONPATH": python_path()}
    return slurm.srun_command(program, nodes=nodes), environment


def accelerate_command(
    module: str,
    *,
    processes: int,
    use_gpu: bool,
    scratch: Path,
    port: int,
    place: slurm.Place | None = None,
) -> list[str]:
    """Return the `accelerate launch` command line; its config file is written to `scratch`.

    Several processes need `--multi_gpu` on CPUs too: with `--cpu` accelerate 1.15 starts a single
    process and says nothing. With a `place`, `processes` are those of all its nodes.
    """
    several = processes > 1
    rank, nodes = (place.rank, place.nodes) if place else (0, 1)
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if several else "NO",
        "machine_rank": rank,
        "mixed_precision": "no",
        "num_machines": nodes,
        "num_processes": processes,
        "same_network": True,
        "use_cpu": not use_gpu,
    }
    path = scratch / (f"accelerate-{rank}.yaml" if place else "accelerate.yaml")
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in config.items()))
    meeting = ("--machine_rank", str(rank), "--main_process_ip", place.address) if place else ()
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(path)),
        *("--num_processes", str(processes)),
        *("--num_machines", str(nodes)),
        *("--mixed_precision", "no"),
        *("--dynamo_backend", "no"),
        *(("--multi_gpu", "--main_process_port", str(port)) if several else ()),
        *meeting,
        *("--module", module, str(scratch / JOB)),
    ]


def worker_environment(*, processes: int, threads: int | None, use_gpu: bool) -> dict[str, str]:
    """Return the workers' environment: this one's, with threads divided and the device stated.

    `processes` are those of this machine; they must not outlive the process that calls this.
    """
    each = str(max(1, (threads or available_threads()) // processes))
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(FOREIGN) and name not in FOREIGN_NAMES
    }
    return {
        **kept,
        "PYTHONPATH": python_path(),
        PARENT: json.dumps(this_process()),
        # Snakemake sets all of them to the rule's threads. One that is left makes two processes of
        # two threads share two cores, where OpenMP's waiting threads take most of the time.
        **dict.fromkeys(THREAD_VARIABLES, each),
        # torchrun that is told to end kills its workers after this time.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(STOP_SECONDS)),
        "ACCELERATE_USE_CPU": str(not use_gpu).lower(),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def use_gpus(processes: int) -> bool:
    """Whether to compute on GPUs, one for each of this machine's processes.

    Raises:
        UserError: there are some, but too few.
    """
    count = torch.cuda.device_count()
    if 0 < count < processes:
        raise UserError(
            f"launch.processes is {processes}, but {count} GPUs are visible, one a process; lower "
            "it or change CUDA_VISIBLE_DEVICES"
        )
    return count > 0


_told = threading.Event()


def told_to_stop() -> bool:
    """Whether this worker was asked to end, and shall when its work can be resumed from there."""
    return _told.is_set()


def work(run: Callable[[dict[str, Any]], None], *, finishes: bool = False) -> None:
    """Be a worker: read the job named on the command line, run it, report a UserError.

    The worker ends itself soon after the stage or the launcher is gone: a killed stage must not
    leave workers behind that write to its scratch folder.

    Args:
        run: does the job; it raises KeyboardInterrupt when it ends early because it was told to.
        finishes: `run` looks at `told_to_stop`, so that SIGTERM does not end it at once.
    """
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    parent = json.loads(os.environ[PARENT])
    gpu_ticket.share()
    threading.Thread(target=_watch, args=(parent, finishes), daemon=True).start()
    with sigterm_noted(_told) if finishes else contextlib.nullcontext():
        try:
            run(job)
        except UserError as error:
            print(error, file=sys.stderr)
            report(path, {"message": str(error)})
            _leave(USER_ERROR_STATUS)
        except KeyboardInterrupt:
            report(path, {"stopped": True})
    _leave(0)


def report(job: Path, what: Mapping[str, Any]) -> None:
    """Leave a report beside the job, whole, for the stage to find."""
    beside = job.with_name(f"{ERROR}.{socket.gethostname()}-{os.getpid()}")
    beside.write_text(json.dumps(what))
    beside.replace(job.with_name(ERROR))


def _raise_reported(path: Path) -> None:
    if not path.is_file():
        return
    reported = json.loads(path.read_text())
    if "stopped" in reported:
        raise KeyboardInterrupt
    raise UserError(reported["message"])


def _leave(status: int) -> NoReturn:
    """End the process without the interpreter's teardown.

    All results are written by then, and a teardown of communication threads may never end: one of
    four workers once stood still there until the launcher was killed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _watch(parent: Mapping[str, Any], finishes: bool) -> None:
    launcher = os.getppid()
    while is_alive(parent) and os.getppid() == launcher:
        time.sleep(POLL_SECONDS)
    # A launcher that was told as well may go at once, while the stage waits for us. That we were
    # told may not be noted yet: a signal's handler runs when Python is back from its computation.
    if finishes:
        _told.set()
        deadline = time.monotonic() + STOP_SECONDS
        while is_alive(parent) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    os._exit(1)


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
