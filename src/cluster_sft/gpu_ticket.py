"""The ticket by which a job holds its GPUs, as its workers see it; see `gpus`.

Apart from `gpus`, so that the code of that is in no stage's cache key.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

TICKET = "CLUSTER_SFT_GPU_TICKET"  # path of the job's ticket


def share() -> None:
    """Hold the job's GPUs too, until this process ends.

    Those of a killed stage are free when its workers have ended. A worker shares first and then
    looks whether its stage is alive: a ticket that it came too late for may be somebody else's.
    """
    path = os.environ.get(TICKET)
    with contextlib.suppress(FileNotFoundError):  # removed since the stage has gone
        if path:
            fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_SH)
