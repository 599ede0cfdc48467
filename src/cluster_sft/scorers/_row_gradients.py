"""The gradient of every row's own loss with respect to an adapter, many rows in one backward pass.

A row's gradient of a linear layer without bias is the sum over its tokens of the outer product of
the gradient at the layer's output and its input. Adapters consist of such layers, so that one
backward pass through the activations of a batch gives every row's gradient exactly.

Legend: B rows, T positions, D trainable parameters, in the order of their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cluster_sft.heads import full_log_probs, head_inputs, head_is_exact, token_log_probs
from cluster_sft.token_batches import Batch

# Relative difference within which batched and separate gradients are one: rounding of the model.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
LOOSE = 0.1


class RowGradients:
    """Computes gradients of rows' mean losses with respect to a model's adapter.

    Args:
        model: with an adapter, in eval mode.
        sample: a few rows of different lengths, on which the fast ways are tried.

    Attributes:
        exact_head: body and head apart give the model's own logits.
        batched: one backward pass gives every row's gradient; else there is one pass a row.
    """

    def __init__(self, model: PreTrainedModel, sample: Batch) -> None:
        self.model = model
        self.trained = dict(sorted((n, p) for n, p in model.named_parameters() if p.requires_grad))
        self.size = sum(p.numel() for p in self.trained.values())
        self.batched = True
        with torch.no_grad():
            self.exact_head = head_is_exact(
                model, sample.input_ids, sample.attention_mask, sample.positions, sample.targets
            )
        self.batched = self._agrees(sample)

    def __call__(self, batch: Batch, out: Tensor) -> None:
        """Write the gradients of the rows' mean losses, in nats, into out (B, D) float32."""
        if self.batched:
            out.zero_()
            self._together(batch, out)
        else:
            self._one_by_one(batch, out)

    def _agrees(self, sample: Batch) -> bool:
        """Say whether the batched way gives what separate backward passes give."""
        rows = len(sample.rows)
        together, apart = (
            torch.zeros((rows, self.size), device=self.model.device) for _ in range(2)
        )
        try:
            self._together(sample, together)
        except _RowsAreMixed:
            return False
        self._one_by_one(sample, apart)
        bound = TOLERANCE.get(self.model.dtype, LOOSE)
        return bool(((together - apart).norm(dim=1) <= bound * apart.norm(dim=1)).all())

    def _together(self, batch: Batch, out: Tensor) -> None:
        with self._captured(out):
            self._loss(batch).backward()

    def _one_by_one(self, batch: Batch, out: Tensor) -> None:
        for i in range(len(batch.rows)):
            loss = self._loss(_row(batch, i))
            found = torch.autograd.grad(loss, list(self.trained.values()), allow_unused=True)
            parts = zip(found, self.trained.values(), strict=True)
            flat = [(torch.zeros_like(p) if g is None else g).flatten() for g, p in parts]
            out[i] = torch.cat(flat)

    def _loss(self, batch: Batch) -> Tensor:
        """Return the sum over rows of their mean losses."""
        row = batch.positions // batch.input_ids.shape[1]
        arguments = (self.model, batch.input_ids, batch.attention_mask)
        if self.exact_head:
            hidden = head_inputs(*arguments).flatten(0, 1)[batch.positions]
            log_probs = token_log_probs(self.model, hidden, batch.targets)
        else:
            _, log_probs = full_log_probs(*arguments, batch.positions, batch.targets)
        return -(log_probs / batch.n_tokens[row]).sum()

    @contextmanager
    def _captured(self, out: Tensor) -> Iterator[None]:
        """Let the backward pass write each layer's share of the rows' gradients into `out`.

        The weights are frozen meanwhile: their gradient summed over rows is not needed. Gradients
        reach the layers from the input embeddings instead.
        """
        embedding = self.model.get_input_embeddings()
        hooks = [embedding.register_forward_hook(_require_grad)]
        layers = {id(m.weight): m for m in self.model.modules() if isinstance(m, nn.Linear)}
        start = 0
        for p in self.trained.values():
            part = out[:, start : start + p.numel()].unflatten(1, p.shape)
            start += p.numel()
            hooks.append(layers[id(p)].register_forward_hook(partial(_capture, part=part)))
            p.requires_grad_(False)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for p in self.trained.values():
                p.requires_grad_(True)


def _row(batch: Batch, i: int) -> Batch:
    """Return row `i` of the batch, with its padding."""
    width = batch.input_ids.shape[1]
    own = batch.positions // width == i
    return Batch(
        batch.rows[i : i + 1],
        batch.input_ids[i : i + 1],
        batch.attention_mask[i : i + 1],
        batch.positions[own] - i * width,
        batch.targets[own],
        batch.n_tokens[i : i + 1],
    )


class _RowsAreMixed(Exception):
    """A layer sees tokens without telling whose they are."""


def _require_grad(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    output.requires_grad_(True)


def _capture(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor, *, part: Tensor) -> None:
    """Add the outer products of output gradients and inputs to part (B, outputs, inputs)."""
    inputs = args[0].detach()
    if inputs.ndim != 3 or len(inputs) != len(part):
        raise _RowsAreMixed

    def add(grad: Tensor) -> None:
        part.add_(torch.einsum("bto,bti->boi", grad.to(part), inputs.to(part)))

    if output.requires_grad:
        output.register_hook(add)
