"""The CPU threads of a job: every library that starts threads of its own is told how many."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import threadpool_limits

from cluster_sft.variables import variables

THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    *("NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "GOTO_NUM_THREADS"),
    *("RAYON_NUM_THREADS", "POLARS_MAX_THREADS"),
)


def available_threads() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def limited(threads: int) -> Iterator[None]:
    """Have the libraries of this process and of its children take `threads` threads each.

    Those loaded later, like torch in a stage, read it from the environment; those loaded already,
    like NumPy's BLAS, are told.
    """
    torch = sys.modules.get("torch")
    taken = torch.get_num_threads() if torch else 0
    if torch:
        torch.set_num_threads(threads)
    told = dict.fromkeys(THREAD_VARIABLES, str(threads))
    try:
        with variables(told), threadpool_limits(threads, user_api="blas"):
            yield
    finally:
        if torch:
            torch.set_num_threads(taken)
