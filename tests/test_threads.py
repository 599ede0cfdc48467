"""A job keeps to its threads: what is loaded already, what comes later, and what it starts."""

from __future__ import annotations

import os

import numpy as np
import torch
from threadpoolctl import threadpool_info

from cluster_sft.threads import THREAD_VARIABLES, limited


def taken() -> tuple[set[int], int]:
    """Return the threads of BLAS and of torch."""
    assert np.ones(2) @ np.ones(2) == 2  # by the BLAS that is asked next
    blas = {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}
    return blas, torch.get_num_threads()


def test_limited_tells_loaded_libraries_and_the_environment_and_then_restores(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with limited(2):
        with limited(1):
            assert taken() == ({1}, 1)
            assert {os.environ[name] for name in THREAD_VARIABLES} == {"1"}
        assert taken() == ({2}, 2)
    assert os.environ["OMP_NUM_THREADS"] == "7"
