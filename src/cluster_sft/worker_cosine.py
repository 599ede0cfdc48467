"""Cosine of the logical workers' gradients: do workers pull the model the same way in a step.

With u_k = g_k / ||g_k||, the mean of cos(g_j, g_k) over pairs of W workers is

    (||sum_k u_k||^2 - W) / (W (W - 1)),

so that a process adds up its own workers' unit gradients and only the sum is shared. A worker
without a gradient counts as none. The gradients are taken apart from the step's, by backward passes
of their own that leave no trace in the parameters: measuring changes no trained number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def worker_cosine(
    gradients: Iterable[Sequence[Tensor | None]],
    parameters: Sequence[Tensor],
    *,
    workers: int,
    add_up: Callable[[Tensor], Tensor],
) -> dict[str, Any]:
    """Return `worker_cosine`, None for fewer than two gradients, and `workers_without_gradient`.

    Every process calls this, also one whose workers have no rows: it shares sums with the others.

    Args:
        gradients: of each of this process's workers in turn, a tensor a parameter; None for zeros.
        parameters: what the gradients are by.
        workers: W, of all processes.
        add_up: returns the sum of a tensor over processes.
    """
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    found = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for gradient in gradients:
        norm = _norm(gradient)
        if norm == 0:
            continue
        found += 1
        for total, part in zip(sums, gradient, strict=True):
            if part is not None:
                total.add_(part.float(), alpha=1 / norm)
    known = round(float(add_up(found)))
    square = sum(float(add_up(total).double().square().sum()) for total in sums)
    return {
        "worker_cosine": mean_cosine(square, known),
        "workers_without_gradient": workers - known,
    }


def mean_cosine(square: float, workers: int) -> float | None:
    """Return the mean cosine over pairs from the squared norm of the sum of unit gradients.

    None for fewer than two workers, or where a gradient was not finite.
    """
    if workers < 2 or not math.isfinite(square):
        return None
    return (square - workers) / (workers * (workers - 1))


def _norm(gradient: Sequence[Tensor | None]) -> float:
    squares = [part.double().square().sum() for part in gradient if part is not None]
    return math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0
