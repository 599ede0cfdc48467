"""How a run's processes share its model: `launch.parallelism`, behind one interface.

    ddp    every process holds the whole model; gradients are averaged after the last forward pass
    fsdp   every process holds its part of the weights, gradients and moments, see `sharding`

Both average gradients over processes, and both give the same numbers up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from cluster_sft.sharding import Sharded
from cluster_sft.worker_cosine import trained, whole_gradient, worker_cosine
from cluster_sft.workload import MicroBatch

if TYPE_CHECKING:
    from peft import PeftModel

# Loads the untrained model, and its adapter with LoRA, to a device; "meta" is a model without data.
MakeModel = Callable[[torch.device], "tuple[PreTrainedModel, PeftModel | None]"]
# Of a module and a micro-batch: what the forward pass adds to the step's loss.
WeightedLoss = Callable[[nn.Module, MicroBatch], Tensor]


class Parallelism(Protocol):
    """What training asks of a way to share the model. All processes make every call together."""

    @property
    def first_device(self) -> torch.device:
        """Where this process loads the model before `wrap`."""
        ...

    def agree(self, check: Callable[[], bool]) -> bool:
        """Return what `check` says of the loaded model, alike on all processes."""
        ...

    def wrap(self, module: nn.Module, *, precision: str) -> nn.Module:
        """Return the module that is trained; its weights are on their devices afterwards.

        Raises:
            UserError: the model cannot be shared in this way.
        """
        ...

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return the context of a backward pass that is not the step's last."""
        ...

    def clip(self, parameters: Sequence[nn.Parameter], bound: float) -> float:
        """Scale the gradients to a norm of at most `bound`; return their norm before."""
        ...

    def whole(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, laid out as the weights are, one after the other as whole ones."""
        ...

    def collect(
        self, model: PreTrainedModel, adapter: PeftModel | None, make: MakeModel
    ) -> tuple[PreTrainedModel, PeftModel | None] | None:
        """Return the whole trained model and its adapter on the main process, None elsewhere."""
        ...

    def cosine(
        self, module: nn.Module, shares: Sequence[Sequence[MicroBatch]], loss: WeightedLoss
    ) -> dict[str, Any]:
        """Return `worker_cosine` of the logical workers' shares; no gradient is left behind."""
        ...


def make_parallelism(name: str, accelerator: Accelerator) -> Parallelism:
    """Return the way that `launch.parallelism` names; one process has nothing to cut."""
    assert name in ("ddp", "fsdp"), name
    if name == "ddp" or accelerator.num_processes == 1:
        return Replicated(accelerator)
    return Sharded(accelerator)


class Replicated:
    """The whole model in every process: DDP, and training by one process alone."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    @property
    def first_device(self) -> torch.device:
        """The process's own device."""
        return self.accelerator.device

    def agree(self, check: Callable[[], bool]) -> bool:
        """Return the process's own finding: all have the same model."""
        return check()

    def wrap(self, module: nn.Module, *, precision: str) -> nn.Module:
        """Return the module in DDP; precision is the loop's autocast."""
        del precision
        return self.accelerator.prepare(module)

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Leave the gradients unshared."""
        return self.accelerator.no_sync(module)

    def clip(self, parameters: Sequence[nn.Parameter], bound: float) -> float:
        """Clip averaged gradients, which are alike on all processes."""
        return float(torch.nn.utils.clip_grad_norm_(parameters, bound))

    def whole(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors themselves."""
        for name, tensor in named:
            yield name, tensor.detach()

    def collect(
        self, model: PreTrainedModel, adapter: PeftModel | None, make: MakeModel
    ) -> tuple[PreTrainedModel, PeftModel | None] | None:
        """Return the main process's own model."""
        del make
        return (model, adapter) if self.accelerator.is_main_process else None

    def cosine(
        self, module: nn.Module, shares: Sequence[Sequence[MicroBatch]], loss: WeightedLoss
    ) -> dict[str, Any]:
        """Measure: a process takes the gradients of the workers that it plays."""
        # Without DDP's wrapper, which would share the gradient.
        bare = self.accelerator.unwrap_model(module)
        parameters = trained(bare)
        size = len(shares) // self.accelerator.num_processes
        mine = shares[self.accelerator.process_index * size :][:size]
        return worker_cosine(
            (whole_gradient(share, parameters, partial(loss, bare)) for share in mine),
            parameters,
            workers=len(shares),
            add_up=lambda x: cast("Tensor", self.accelerator.reduce(x, reduction="sum")),
        )
