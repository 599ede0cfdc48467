"""Cosine of the logical workers' gradients: do workers pull the model the same way in a step.

With u_k = g_k / ||g_k||, the mean of cos(g_j, g_k) over pairs of W workers is

    (||sum_k u_k||^2 - W) / (W (W - 1)),

so that a process adds up its own workers' unit gradients and only the sum is shared. Where
gradients are cut over processes (FSDP) each adds up its part of all workers' gradients and squared
norms are shared. A worker without a gradient counts as none. The gradients are taken apart from the
step's, by backward passes of their own that leave no trace: measuring changes no trained number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cluster_sft.workload import MicroBatch


def worker_cosine(
    gradients: Iterable[Sequence[Tensor | None]],
    parameters: Sequence[Tensor],
    *,
    workers: int,
    add_up: Callable[[Tensor], Tensor],
    is_cut: bool = False,
) -> dict[str, Any]:
    """Return `worker_cosine`, None for fewer than two gradients, and `workers_without_gradient`.

    Every process calls this, also one whose workers have no rows: it shares sums with the others.

    Args:
        gradients: of each of this process's workers in turn, a tensor a parameter; None for zeros.
        parameters: what the gradients are by.
        workers: W, of all processes.
        add_up: returns the sum of a tensor over processes.
        is_cut: gradients and parameters are this process's parts, and the gradients those of all
            workers, on every process.
    """
    over_parts, over_workers = (add_up, _itself) if is_cut else (_itself, add_up)
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    found = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for gradient in gradients:
        norm = math.sqrt(float(over_parts(_square(gradient, like=found))))
        if norm == 0:
            continue
        found += 1
        for total, part in zip(sums, gradient, strict=True):
            if part is not None:
                total.add_(part.float(), alpha=1 / norm)
    known = round(float(over_workers(found)))
    parts = [over_workers(total).double().square().sum() for total in sums]
    square = float(over_parts(torch.stack(parts).sum()))
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


def trained(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are trained."""
    return [p for p in module.parameters() if p.requires_grad]


def whole_gradient(
    share: Iterable[MicroBatch],
    parameters: Sequence[nn.Parameter],
    loss: Callable[[MicroBatch], Tensor],
) -> list[Tensor | None]:
    """Return a worker's own gradient; no parameter's `grad` is touched."""
    total: list[Tensor | None] = [None] * len(parameters)
    for micro in share:
        if micro.coefficients.any():
            parts = torch.autograd.grad(loss(micro), parameters, allow_unused=True)
            total = [
                b if a is None else a if b is None else a + b
                for a, b in zip(total, parts, strict=True)
            ]
    return total


def _square(gradient: Sequence[Tensor | None], *, like: Tensor) -> Tensor:
    squares = [part.double().square().sum() for part in gradient if part is not None]
    return torch.stack(squares).sum() if squares else torch.zeros_like(like)


def _itself(x: Tensor) -> Tensor:
    return x
