"""FSDP: every process holds its part of all weights, gradients and moments (torch's fully_shard).

One unit per transformer block, gathered when it runs, and one of all else: embeddings, head and the
last norm, gathered for the whole of `RowLoss.forward`, where the head is used in chunks. Weights
shared by embeddings and head stay shared. Every backward pass reduces its gradients to shards at
once, so that whole ones never exist together.

With precision bf16 the weights of blocks travel and compute in bf16 and gradients are added up in
float32; the loop's autocast keeps the residual stream and the root unit in float32, as under DDP.
What differs from DDP is rounding: norm scales inside blocks are used in bf16.

A model larger than a GPU: the main process loads it into the host's memory, the others make one
without data, and units are sent, placed and cut one after the other. Host memory, for the main
process alone: 4 bytes a weight, while loading and while the result is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from cluster_sft.adafactor import local
from cluster_sft.errors import UserError
from cluster_sft.worker_cosine import trained, worker_cosine
from cluster_sft.workload import MicroBatch

if TYPE_CHECKING:
    from peft import PeftModel

    from cluster_sft.parallelism import MakeModel, WeightedLoss


def transformer_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the layers that Transformers checkpoints one by one, inner ones before outer ones.

    Raises:
        UserError: there are none.
    """
    blocks: list[nn.Module] = [
        m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)
    ]
    if not blocks:
        kind = type(getattr(module, "model", module)).__name__
        raise UserError(
            f"launch.parallelism is fsdp, which finds no transformer blocks in {kind}; use ddp"
        )
    return blocks[::-1]


class Sharded:
    """Part of the model in every process; see `parallelism.Parallelism` for the methods."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.is_main = accelerator.is_main_process
        self.mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))

    @property
    def first_device(self) -> torch.device:
        """The host's memory on the main process, nowhere on the others."""
        return torch.device("cpu" if self.is_main else "meta")

    def agree(self, check: Callable[[], bool]) -> bool:
        """Return what the main process finds."""
        found = [check() if self.is_main else False]
        return bool(broadcast_object_list(found)[0])

    def wrap(self, module: nn.Module, *, precision: str) -> nn.Module:
        """Send, place and cut the module, unit by unit; inner blocks come before outer ones."""
        self._check_alike(module)
        blocks = transformer_blocks(module)
        policy = MixedPrecisionPolicy()
        if precision == "bf16":
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        placed: set[nn.Module] = set()
        for block in blocks:
            self._place(block, placed)
            fully_shard(block, mesh=self.mesh, mp_policy=policy)
        self._place(module, placed)
        fully_shard(module, mesh=self.mesh)
        return module

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return no context: every backward pass shares its gradients."""
        del module
        return nullcontext()

    def clip(self, parameters: Sequence[nn.Parameter], bound: float) -> float:
        """Clip by the norm over all shards."""
        norm = torch.nn.utils.clip_grad_norm_(parameters, bound)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def whole(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Gather one tensor after the other, on the process's device."""
        for name, tensor in named:
            cut = tensor.detach()
            yield name, cut.full_tensor() if isinstance(cut, DTensor) else cut

    def collect(
        self, model: PreTrainedModel, adapter: PeftModel | None, make: MakeModel
    ) -> tuple[PreTrainedModel, PeftModel | None] | None:
        """Load the model again in the main process's memory and put the trained weights in."""
        del adapter
        fresh = make(torch.device("cpu")) if self.is_main else None
        targets = dict(fresh[0].named_parameters()) if fresh else {}
        named = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
        for name, tensor in self.whole(named):
            if fresh:
                targets[name].data.copy_(tensor)
        return fresh

    def cosine(
        self, module: nn.Module, shares: Sequence[Sequence[MicroBatch]], loss: WeightedLoss
    ) -> dict[str, Any]:
        """Measure: one worker after the other, its gradient cut over all processes."""
        parameters = trained(module)
        size = len(shares) // self.accelerator.num_processes
        first = self.accelerator.process_index * size
        return worker_cosine(
            (
                self._gradient(share, module, loss, is_mine=first <= worker < first + size)
                for worker, share in enumerate(shares)
            ),
            [local(p.detach()) for p in parameters],
            workers=len(shares),
            add_up=lambda x: cast("Tensor", self.accelerator.reduce(x, reduction="sum")),
            is_cut=True,
        )

    def _gradient(
        self, share: Sequence[MicroBatch], module: nn.Module, loss: WeightedLoss, *, is_mine: bool
    ) -> list[Tensor | None]:
        """Return this process's part of a worker's gradient; the others keep its player company."""
        for micro in share:
            if micro.coefficients.any():
                mine = micro if is_mine else MicroBatch(micro.rows, 0 * micro.coefficients)
                self.accelerator.backward(self.accelerator.num_processes * loss(module, mine))
        parameters = trained(module)
        parts = [None if p.grad is None else local(p.grad) for p in parameters]
        for p in parameters:
            p.grad = None
        return parts

    def _check_alike(self, module: nn.Module) -> None:
        """Assert the same tensors in all processes: else they would wait for each other forever."""
        tensors = itertools.chain(module.named_parameters(), module.named_buffers())
        shapes = [(name, tuple(t.shape), str(t.dtype)) for name, t in tensors]
        found = gather_object([shapes])
        assert all(other == found[0] for other in found), "processes disagree about the model"

    def _place(self, unit: nn.Module, placed: set[nn.Module]) -> None:
        """Put the unit's tensors, as the main process has them, on every process's device.

        A tensor under two names, as embeddings and head may be, stays one.
        """
        moved: dict[Tensor, Tensor] = {}
        for module in unit.modules():
            if module in placed:
                continue
            placed.add(module)
            parameters = module.named_parameters(recurse=False)
            for name, tensor in [*parameters, *module.named_buffers(recurse=False)]:
                if tensor not in moved:
                    moved[tensor] = self._sent(tensor)
                setattr(module, name, moved[tensor])

    def _sent(self, tensor: Tensor) -> Tensor:
        device = self.accelerator.device
        source = tensor.detach()
        # Contiguous, as the others' memory is.
        there = (
            source.contiguous().to(device)
            if self.is_main
            else torch.empty_like(source, device=device, memory_format=torch.contiguous_format)
        )
        distributed.broadcast(there, src=0)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(there, requires_grad=tensor.requires_grad)
        return there
