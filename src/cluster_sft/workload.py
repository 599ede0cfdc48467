"""What every process computes in a step: its share of the plan, cut into micro-batches.

A pure function of the step, so that every process knows every other's share without asking. A
logical worker's rows are cut on their own: the forward passes are the same whichever process plays
the worker, and only the order in which gradients are added depends on the process count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster_sft.batching import Step
from cluster_sft.errors import UserError
from cluster_sft.objective import LossReduction, row_coefficients


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass and what their summed losses count in the step's loss.

    Attributes:
        rows: (b,) int64 positions, b at least 1.
        coefficients: (b,) float64; all 0 where a process only has to keep the others company.
    """

    rows: NDArray[np.int64]
    coefficients: NDArray[np.float64]


def check_processes(processes: int, *, workers: int) -> None:
    """Raise UserError unless `processes` can play `workers` logical workers in equal shares."""
    if processes < 1 or workers % processes:
        raise UserError(
            f"launch.processes must divide train.workers, got {processes} processes for {workers} "
            f"workers; use one of {', '.join(str(p) for p in divisors(workers))}"
        )


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive integer, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def split_step(
    step: Step,
    *,
    lengths: NDArray[np.int64],
    n_tokens: NDArray[np.int64],
    processes: int,
    loss_reduction: LossReduction,
    micro_batch: int,
    batch_tokens: int,
) -> list[list[MicroBatch]]:
    """Return the micro-batches of every process; worker j of W is played by process j P // W.

    Every process gets equally many, so that collectives inside a forward pass match up: one with
    fewer repeats the step's shortest row with a coefficient of 0.

    Args:
        step: W pairs of positions and weights; not all empty.
        lengths: (N,) tokens of every row.
        n_tokens: (N,) supervised tokens of every row, at least 1.
        processes: P, a divisor of W.
        loss_reduction: how the rows' losses make the step's loss.
        micro_batch: most rows of a forward pass.
        batch_tokens: most tokens of a forward pass, padding included; one row may exceed it.
    """
    row_B = np.concatenate([rows for rows, _ in step])
    weight_B = np.concatenate([weights for _, weights in step])
    coefficient_B = row_coefficients(weight_B, n_tokens[row_B], loss_reduction=loss_reduction)
    shares: list[list[MicroBatch]] = [[] for _ in range(processes)]
    start = 0
    for worker, (rows, _) in enumerate(step):
        stop = start + len(rows)
        share = shares[worker * processes // len(step)]
        for part in micro_batches(
            lengths[rows], micro_batch=micro_batch, batch_tokens=batch_tokens
        ):
            share.append(MicroBatch(rows[part], coefficient_B[start:stop][part]))
        start = stop
    rounds = max(len(share) for share in shares)
    idle = MicroBatch(row_B[[np.argmin(lengths[row_B])]], np.zeros(1))
    return [share + [idle] * (rounds - len(share)) for share in shares]


def micro_batches(
    lengths: NDArray[np.int64], *, micro_batch: int, batch_tokens: int
) -> list[NDArray[np.int64]]:
    """Cut rows into forward passes of similar lengths, longest first.

    Returns indices into `lengths`, every one once. A pass holds at most `micro_batch` rows and at
    most `batch_tokens` tokens counted as rows times the longest, but at least one row.
    """
    order = np.argsort(-lengths, kind="stable")
    parts = []
    start = 0
    while start < len(order):
        count = max(1, min(micro_batch, batch_tokens // max(1, int(lengths[order[start]]))))
        parts.append(order[start : start + count])
        start += count
    return parts
