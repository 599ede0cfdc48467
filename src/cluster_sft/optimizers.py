"""Optimizers and learning-rate schedules, by the names that `train:` uses."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Literal

import torch
from torch import nn

from cluster_sft.adafactor import Adafactor
from cluster_sft.errors import UserError

Scheduler = Literal["linear", "cosine", "constant"]


def make_optimizer(
    name: str, named_parameters: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float
) -> torch.optim.Optimizer:
    """Return the optimizer, with a learning rate of 0 until a step sets it.

    Weight decay spares vectors: biases and the scales of norms. Adafactor takes its rate from the
    schedule alone. Both work on whole and on sharded weights.

    Raises:
        ValueError: the name is neither adamw nor adafactor.
    """
    trained = [p for _, p in named_parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=0.0)
    if name == "adafactor":
        return Adafactor(groups, lr=0.0)
    raise UserError(f"train.optimizer must be adamw or adafactor, got {name!r}")


def warmup_length(steps: int, *, warmup_steps: int | None, warmup_ratio: float | None) -> int:
    """Return the steps of the warm-up; a ratio of the run is read as a decimal and rounded up."""
    if warmup_steps is not None:
        return warmup_steps
    return math.ceil(Fraction(str(warmup_ratio or 0)) * steps)


def learning_rate(
    step: int, *, peak: float, steps: int, warmup: int, scheduler: Scheduler
) -> float:
    """Return the rate of a 0-based step out of `steps`.

    It rises from 0 over the warm-up, then stays, or falls to 0 at the end in a line or half a
    cosine: the values of Transformers' schedules, as a function of the step alone, so that a
    resumed run needs no state.

    Raises:
        ValueError: the scheduler's name is unknown.
    """
    if scheduler not in ("linear", "cosine", "constant"):
        raise UserError(f"train.scheduler must be linear, cosine or constant, got {scheduler!r}")
    if step < warmup:
        return peak * step / warmup
    if scheduler == "constant":
        return peak
    done = (step - warmup) / max(1, steps - warmup)
    if scheduler == "linear":
        return peak * max(0.0, 1.0 - done)
    return peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * done)))
