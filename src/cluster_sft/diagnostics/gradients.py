"""Inner products of true per-sample gradients, by the head's matrix alone or by every parameter.

A sample's loss is the mean over its supervised tokens. For the head's matrix W its gradient is

    G_i = (1 / |T_i|) sum_t ((p_t - y_t) f'(z_t)) outer h_t,    f: the logits' scale or softcap,

which is taken exactly, a block of the vocabulary's rows at a time, so that no G_i exists whole.
Gradients by every parameter come from one backward pass a sample, folded into `SKETCH` numbers
with random signs and offsets: inner products stay unbiased, and the cosine of two gradients errs by
about 1 / sqrt(SKETCH).

Legend: n samples, M supervised tokens of all of them, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear
from tqdm import tqdm
from transformers import PreTrainedModel

from cluster_sft.heads import IGNORED, head_inputs, head_is_exact, logit_transform
from cluster_sft.objective import RowLoss
from cluster_sft.token_batches import Batch, TokenStore, build_batch, plan_batches

SKETCH = 1 << 14
BLOCK_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}  # of one block of all samples' gradients
PARTS = 4  # of the symmetric products: 6 of 16 blocks are not computed
BAR = "diagnose: true gradients"


@dataclass(frozen=True)
class Gram:
    """Inner products of n gradients.

    Attributes:
        products: (n, n) float64.
        exact: no random projection.
        backward: samples that went through a backward pass.
    """

    products: NDArray[np.float64]
    exact: bool
    backward: int


def gram(model: PreTrainedModel, store: TokenStore, *, head: bool, batch_tokens: int) -> Gram:
    """Return the inner products of the rows' gradients.

    Where the head's logits are made in a way that `token_log_probs` does not know, gradients by the
    head come from backward passes too.

    Args:
        model: in eval mode, on its device.
        store: the tokens of n rows, every one with a supervised token.
        head: by the head's matrix alone; otherwise by every parameter.
        batch_tokens: of a forward pass, padding included.
    """
    if head and _known_head(model, store):
        return Gram(_head_gram(model, store, batch_tokens), exact=True, backward=0)
    sketches = sketch_gradients(model, store, head=head)
    return Gram(sketches @ sketches.T, exact=False, backward=len(sketches))


def _known_head(model: PreTrainedModel, store: TokenStore) -> bool:
    batch = build_batch(store, np.array([int(np.argmin(store.lengths))])).to(model.device)
    return head_is_exact(
        model, batch.input_ids, batch.attention_mask, batch.positions, batch.targets
    )


@torch.inference_mode()
def _head_gram(model: PreTrainedModel, store: TokenStore, batch_tokens: int) -> NDArray[np.float64]:
    """Return the Gram matrix of the gradients by the head's matrix, exactly, (n, n)."""
    hidden, targets, counts = _head_states(model, store, batch_tokens)
    head = cast("nn.Linear", model.get_output_embeddings())
    n, vocabulary = len(counts), head.weight.shape[0]
    width = max(n * hidden.shape[1], len(hidden)) * hidden.element_size()
    budget = BLOCK_BYTES.get(hidden.device.type, BLOCK_BYTES["cuda"])
    blocks = torch.arange(vocabulary).split(max(1, budget // width))
    products = hidden.new_zeros((n, n), dtype=torch.float64)
    scale = (1 / counts.to(hidden)).repeat_interleave(counts)[:, None]
    with tqdm(total=2 * len(blocks), desc=BAR, unit="block") as bar:
        log_z = hidden.new_full((len(hidden),), -torch.inf)
        for block in blocks:
            logits, _ = _logits(model, hidden, block, slope=False)
            log_z = torch.logaddexp(log_z, logits.logsumexp(dim=1))
            bar.update()
        for block in blocks:
            logits, slope = _logits(model, hidden, block, slope=True)
            residual = (logits - log_z[:, None]).exp()
            inside = (targets >= block[0]) & (targets <= block[-1])
            residual[inside.nonzero()[:, 0], targets[inside] - int(block[0])] -= 1
            residual *= slope * scale
            rows = [
                (d.T @ h).flatten()
                for d, h in zip(
                    residual.split(counts.tolist()), hidden.split(counts.tolist()), strict=True
                )
            ]
            _add_products(products, torch.stack(rows))
            bar.update()
    upper = products.triu()
    return (upper + upper.triu(1).T).cpu().numpy()


def _add_products(products: Tensor, rows: Tensor) -> None:
    """Add the inner products of rows, on and above the diagonal; some below it come along."""
    size = -(-len(rows) // PARTS)
    for start in range(0, len(rows), size):
        part = rows[start : start + size] @ rows[start:].T
        products[start : start + size, start:] += part.double()


def _head_states(
    model: PreTrainedModel, store: TokenStore, batch_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what enters the head and is predicted there: (M, H), (M,), and tokens a row (n,)."""
    plan = plan_batches(store.lengths, batch_tokens)
    hidden: dict[int, Tensor] = {}
    targets: dict[int, Tensor] = {}
    dtype = torch.promote_types(model.dtype, torch.float32)
    for number in tqdm(range(len(plan)), desc="diagnose: forward", unit="batch"):
        batch = build_batch(store, plan.rows(number)).to(model.device)
        states = head_inputs(model, batch.input_ids, batch.attention_mask).flatten(0, 1)
        sizes = batch.n_tokens.tolist()
        parts = states[batch.positions].to(dtype).split(sizes)
        hidden |= dict(zip(batch.rows.tolist(), parts, strict=True))
        targets |= dict(zip(batch.rows.tolist(), batch.targets.split(sizes), strict=True))
    rows = range(len(store.lengths))
    counts = torch.tensor([len(targets[i]) for i in rows], device=model.device)
    return torch.cat([hidden[i] for i in rows]), torch.cat([targets[i] for i in rows]), counts


def _logits(
    model: PreTrainedModel, hidden: Tensor, block: Tensor, *, slope: bool
) -> tuple[Tensor, Tensor]:
    """Return logits (M, v) of a block of the vocabulary, and their slope by the head's output."""
    head = cast("nn.Linear", model.get_output_embeddings())
    rows = slice(int(block[0]), int(block[-1]) + 1)
    bias = None if head.bias is None else head.bias[rows].to(hidden)
    raw = linear(hidden, head.weight[rows].to(hidden), bias)
    finish = logit_transform(model)
    if not slope:
        return finish(raw), raw
    found = torch.func.jvp(finish, (raw,), (torch.ones_like(raw),))
    return found[0], found[1]


def sketch_gradients(
    model: PreTrainedModel, store: TokenStore, *, head: bool
) -> NDArray[np.float64]:
    """Return (n, SKETCH) float64 projections of per-sample gradients, one backward pass each."""
    parameters = list(model.parameters())
    matrix = cast("nn.Parameter", cast("nn.Linear", model.get_output_embeddings()).weight)
    wanted = [matrix] if head else parameters
    loss_of = RowLoss(model, full_logits=head)
    sketches = []
    with _only_trainable(parameters, wanted), _head_alone(model, enabled=head), torch.enable_grad():
        for row in tqdm(range(len(store.lengths)), desc=BAR, unit="row"):
            batch = build_batch(store, np.array([row])).to(model.device)
            loss = loss_of(batch.input_ids, batch.attention_mask, _labels(batch)).sum()
            gradients = torch.autograd.grad(loss / batch.n_tokens.sum(), wanted, allow_unused=True)
            sketches.append(_fold(gradients).cpu().numpy())
    return np.stack(sketches)


def _labels(batch: Batch) -> Tensor:
    labels = torch.full_like(batch.input_ids, IGNORED)
    labels.flatten()[batch.positions + 1] = batch.targets
    return labels


def _fold(gradients: tuple[Tensor | None, ...]) -> Tensor:
    """Add up blocks of SKETCH numbers, each with its own random signs and offset, in float64.

    The same numbers for every sample, whatever the device: they come from the parameter's place.
    """
    total: Tensor | None = None
    for place, gradient in enumerate(gradients):
        if gradient is None:
            continue
        generator = torch.Generator().manual_seed(place)
        for part in gradient.flatten().float().split(SKETCH):
            signs = torch.randint(0, 2, (len(part),), generator=generator, dtype=torch.int8)
            offset = int(torch.randint(0, SKETCH, (), generator=generator))
            padded = part.new_zeros(SKETCH)
            padded[: len(part)] = part * (2 * signs - 1).to(part)
            rolled = padded.roll(offset).double()
            total = rolled if total is None else total + rolled
    assert total is not None, "no parameter has a gradient"
    return total


@contextmanager
def _only_trainable(parameters: list[nn.Parameter], wanted: list[nn.Parameter]) -> Iterator[None]:
    """Let autograd see `wanted` alone, and restore what it saw afterwards."""
    before = [p.requires_grad for p in parameters]
    chosen = {id(p) for p in wanted}
    for p in parameters:
        p.requires_grad_(id(p) in chosen)
    try:
        yield
    finally:
        for p, required in zip(parameters, before, strict=True):
            p.requires_grad_(required)


@contextmanager
def _head_alone(model: PreTrainedModel, *, enabled: bool) -> Iterator[None]:
    """Cut the graph at the head's input: a tied matrix then has the head's gradient alone."""
    if not enabled:
        yield
        return
    head = cast("nn.Module", model.get_output_embeddings())
    hook = head.register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:]))
    try:
        yield
    finally:
        hook.remove()
