"""What srun starts once on every node of a job: it starts the node's workers and watches them.

Its standard input comes from the stage, through srun: a line asks the workers to end, its end says
that the stage is gone. Neither a file nor a process number means anything on another machine.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from cluster_sft import launching, slurm
from cluster_sft.errors import UserError
from cluster_sft.supervision import start, supervise, tail

LINES = 40


def main() -> int:
    """Run this node's workers of the job named on the command line; return their exit status."""
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    try:
        place = slurm.place()
        local = job["processes"] // job["nodes"]
        if job["use_gpu"] and not launching.use_gpus(local):
            raise UserError(f"{socket.gethostname()}: no GPU is visible, unlike on other nodes")
    except UserError as error:
        launching.report(path, {"message": str(error)})
        return launching.USER_ERROR_STATUS
    return _run(path.parent, job, place=place, local=local)


def _run(scratch: Path, job: dict[str, Any], *, place: slurm.Place, local: int) -> int:
    command = launching.accelerate_command(
        job["module"],
        processes=job["processes"],
        use_gpu=job["use_gpu"],
        scratch=scratch,
        port=place.port,
        place=place,
    )
    environment = launching.worker_environment(
        processes=local, threads=job["threads"], use_gpu=job["use_gpu"]
    )
    log = scratch / f"workers-{place.rank}.log"
    asked = threading.Event()
    with start(command, environment, log=log, talks=False) as process:
        threading.Thread(target=_listen, args=(asked,), daemon=True).start()
        told = supervise(process, asked=asked)
    if process.returncode and not told:
        ending = f"node {socket.gethostname()}: {log} ends with:\n{tail(log, lines=LINES)}"
        print(ending, file=sys.stderr)
    return process.returncode


def _listen(asked: threading.Event) -> NoReturn:
    while os.read(sys.stdin.fileno(), 64):
        asked.set()
    # The stage is gone, killed or on a node that is lost. The workers end with this process.
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
