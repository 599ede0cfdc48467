"""The nodes of a Slurm job: starting a program once on each, and finding out which one this is.

Snakemake's Slurm plugin takes all variables away from a rule that describe the job's nodes, so they
are read where srun sets them anew: in the tasks that it starts.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from cluster_sft.errors import UserError

PORTS = range(20000, 30000)  # below those that systems give to outgoing connections
SECONDS = 30  # for an answer of Slurm's commands
REMEDY = "train over several with `snakemake --profile profiles/slurm`, or set launch.nodes: 1"


@dataclass(frozen=True)
class Place:
    """Where this process runs among the nodes of a step, and where they meet.

    Attributes:
        rank: of this node, from 0.
        nodes: of the step.
        address: name of node 0.
        port: at which node 0 listens; no other job has it.
    """

    rank: int
    nodes: int
    address: str
    port: int


def srun_command(program: Sequence[str], *, nodes: int) -> list[str]:
    """Return the command that runs `program` once on each of the job's nodes.

    It works in a batch step and inside another step, whose resources it shares (`--overlap`). A
    task may use all CPUs that the job has on its node. If one fails srun ends the others.

    Raises:
        UserError: there is no Slurm job around this process, or it has other nodes.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if not job or not shutil.which("srun"):
        raise UserError(f"launch.nodes is {nodes}, but this process is in no Slurm job; {REMEDY}")
    counted = _output("squeue", "--noheader", f"--jobs={job}", "--format=%D")
    if counted.isdigit() and int(counted) != nodes:
        raise UserError(
            f"launch.nodes is {nodes}, but Slurm job {job} has {counted} nodes; give the rule as "
            "many in profiles/slurm"
        )
    return [
        *("srun", f"--jobid={job}", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}"),
        *("--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpu-bind=none", "--label"),
        *program,
    ]


def srun_environment() -> dict[str, str]:
    """Return this environment without what describes the step around, which srun would obey."""
    return {
        name: value
        for name, value in os.environ.items()
        if name == "SLURM_CONF" or not name.startswith(("SLURM_", "SRUN_", "SBATCH_"))
    }


def place() -> Place:
    """Return where srun started this process.

    Raises:
        UserError: srun did not, or the first node has no name that resolves here.
    """
    job, listed = _variable("SLURM_JOB_ID"), _variable("SLURM_STEP_NODELIST")
    rank, nodes = int(_variable("SLURM_NODEID")), int(_variable("SLURM_STEP_NUM_NODES"))
    names = _output("scontrol", "show", "hostnames", listed).split()
    if len(names) != nodes:
        raise UserError(
            f"{socket.gethostname()}: `scontrol show hostnames {listed}` names {len(names)} nodes, "
            f"not the {nodes} of Slurm job {job}; are Slurm's commands installed on this node?"
        )
    port = PORTS[int(job) % len(PORTS)]
    try:
        socket.getaddrinfo(names[0], port)
    except OSError as error:
        raise UserError(
            f"{socket.gethostname()}: {names[0]}, the first node of Slurm job {job}, has no "
            f"address here ({error.strerror}); compute nodes must resolve each other's names"
        ) from error
    return Place(rank, nodes, names[0], port)


def _variable(name: str) -> str:
    try:
        return os.environ[name]
    except KeyError:
        raise UserError(f"{name} is not set: srun did not start this process; {REMEDY}") from None


def _output(*command: str) -> str:
    """Return what a command of Slurm's prints, nothing if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
