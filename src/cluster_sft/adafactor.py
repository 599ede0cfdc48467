"""Adafactor (Shazeer and Stern, 2018) for whole and for sharded weights.

For a gradient G of R rows and C columns the mean squares of rows and of columns stand for all

    r <- b r + (1 - b) mean_C(G^2 + eps),    c <- b c + (1 - b) mean_R(G^2 + eps),    b = 1 - t^-0.8
    U = G / sqrt(r c^T / mean_R(r)),    W <- W - lr (U / max(1, RMS(U)) + weight_decay W)

and a vector keeps all its squares. The rate comes from outside: no relative steps, no scaling by
the weights' size, no first moment. FSDP cuts weights by rows: means over rows and RMS(U) are then
taken over all processes; optimizers that know nothing of it take those of their shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Shard

EPSILON = 1e-30
DECAY = -0.8
LARGEST_RMS = 1.0


class Adafactor(torch.optim.Optimizer):
    """Adafactor with an external learning rate.

    Whole weights get bitwise the steps of Transformers' class of this name with
    `scale_parameter=False, relative_step=False`. State, all float32 tensors: `step`, and `row` and
    `column`, or `square` of a vector; laid out as the weights are.

    Args:
        params: as torch's optimizers take them; float32 or wider.
    """

    def __init__(self, params: Iterable[Any], *, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every weight that has a gradient; no closure is taken."""
        assert closure is None, "Adafactor takes no closure"
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(_fresh_state(p))
                update = _clipped(_direction(p, state), p).mul_(group["lr"])
                weight = local(p)
                if group["weight_decay"] != 0:
                    weight.add_(weight, alpha=-group["weight_decay"] * group["lr"])
                weight.add_(-update)


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor, the whole of another; it shares memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _fresh_state(p: nn.Parameter) -> dict[str, Tensor]:
    step = torch.zeros((), dtype=torch.float32)
    if p.ndim < 2:
        return {"step": step, "square": torch.zeros_like(p)}
    row = local(p).new_zeros(local(p).shape[:-1])
    column = local(p).new_zeros(local(p).shape[:-2] + p.shape[-1:])
    # The columns' means of a matrix are alike on all processes.
    column = column if p.ndim == 2 else _laid_out(column, p, (*p.shape[:-2], p.shape[-1]))
    return {"step": step, "row": _laid_out(row, p, p.shape[:-1]), "column": column}


def _laid_out(part: Tensor, p: nn.Parameter, shape: tuple[int, ...]) -> Tensor:
    """Return a part as the tensor of the whole shape, cut along its first dimension as `p` is."""
    if not isinstance(p, DTensor):
        return part
    assert p.placements == (Shard(0),)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _direction(p: nn.Parameter, state: dict[str, Tensor]) -> Tensor:
    """Return this process's part of U, after taking the gradient's squares into the state."""
    assert p.grad is not None
    gradient = local(p.grad)
    state["step"] += 1
    beta = 1.0 - math.pow(int(state["step"]), DECAY)
    squares = gradient**2 + EPSILON
    if p.ndim < 2:
        square = local(state["square"]).mul_(beta).add_(squares, alpha=1.0 - beta)
        return square.rsqrt().mul_(gradient)
    row, column = local(state["row"]), local(state["column"])
    row.mul_(beta).add_(squares.mean(dim=-1), alpha=1.0 - beta)
    column.mul_(beta).add_(_mean_of_rows(squares, p, dim=-2), alpha=1.0 - beta)
    by_row = (row / _mean_of_rows(row, p, dim=-1).unsqueeze(-1)).rsqrt_().unsqueeze(-1)
    return torch.mul(by_row, column.unsqueeze(-2).rsqrt()).mul_(gradient)


def _mean_of_rows(x: Tensor, p: nn.Parameter, *, dim: int) -> Tensor:
    """Return the mean over the dimension `dim`, which is the rows of `p`, of all processes."""
    if not isinstance(p, DTensor) or p.ndim > 2:
        return x.mean(dim=dim)
    total = x.sum(dim=dim)
    distributed.all_reduce(total, group=p.device_mesh.get_group())
    return total / p.shape[0]


def _clipped(update: Tensor, p: nn.Parameter) -> Tensor:
    """Divide U by its root mean square where that is above 1, in place."""
    if isinstance(p, DTensor):
        total = update.square().sum()
        distributed.all_reduce(total, group=p.device_mesh.get_group())
        rms = (total / p.numel()).sqrt()
    else:
        rms = update.norm(2) / (update.numel() ** 0.5)
    return update.div_((rms / LARGEST_RMS).clamp_(min=1.0))
