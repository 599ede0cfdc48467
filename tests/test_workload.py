"""Every process's share of a step: each row once, equal rounds, bounded forward passes."""

from __future__ import annotations

import numpy as np
import pytest

from cluster_sft.batching import batch_plan
from cluster_sft.workload import check_processes, micro_batches, split_step


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_split_step_any_processes_hold_the_same_micro_batches(processes):
    lengths = np.random.default_rng(0).integers(5, 40, 30)
    arguments = {"lengths": lengths, "n_tokens": lengths // 2, "loss_reduction": "token"}
    plan = batch_plan(
        np.zeros(30, int), np.ones(1), workers=4, global_batch_size=16, epochs=1, seed=0
    )
    for step in plan:
        shares, whole = (
            split_step(step, processes=p, micro_batch=3, batch_tokens=80, **arguments)
            for p in (processes, 1)
        )
        assert len({len(share) for share in shares}) == 1
        found = [m for share in shares for m in share if m.coefficients.any()]
        assert [m.rows.tolist() for m in found] == [m.rows.tolist() for m in whole[0]]
        assert np.isclose(sum(m.coefficients @ (lengths // 2)[m.rows] for m in found), 1.0)


def test_split_step_process_without_rows_gets_company_that_counts_nothing():
    step = batch_plan(
        np.zeros(1, int), np.ones(1), workers=4, global_batch_size=4, epochs=1, seed=0
    )[0]
    shares = split_step(
        step,
        lengths=np.array([9]),
        n_tokens=np.array([4]),
        processes=4,
        loss_reduction="sequence",
        micro_batch=1,
        batch_tokens=1,
    )
    assert [len(share) for share in shares] == [1, 1, 1, 1]
    assert [share[0].coefficients.sum() for share in shares] == [0.25, 0, 0, 0]


def test_micro_batches_respect_rows_and_tokens_but_take_a_long_row():
    lengths = np.array([3, 50, 10, 10, 2, 9, 1])
    parts = micro_batches(lengths, micro_batch=3, batch_tokens=20)
    assert sorted(np.concatenate(parts)) == list(range(7))
    assert [lengths[part].tolist() for part in parts] == [[50], [10, 10], [9, 3], [2, 1]]


def test_processes_must_divide_the_workers():
    check_processes(2, workers=4)
    with pytest.raises(ValueError, match="use one of 1, 2, 3, 6"):
        check_processes(4, workers=6)
