"""Gradient-proxy embedding of samples: one forward pass, no backward pass.

For a supervised token y_t with head input h_t and probability p_t, the row y_t of the gradient of
its cross-entropy with respect to the head matrix is g_t = (p_t - 1) h_t. A sample's embedding is
the mean of g_t over its supervised tokens (CluSTER). Constant logit scales and softcaps, which
multiply that row, are left out.

Legend: B rows, T positions, H hidden size, M supervised positions of the batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cluster_sft.heads import (
    full_log_probs,
    head_inputs,
    head_is_exact,
    supervised_positions,
    token_log_probs,
)


@dataclass(frozen=True, slots=True)
class Proxy:
    """Gradient proxies of B rows; a row without supervised tokens has zeros throughout.

    Attributes:
        embedding: (B, H) float32 (float64 for a float64 model), g(x), not normalised.
        nll: (B,) of the same dtype, mean negative log-likelihood, nats per supervised token.
        n_tokens: (B,) int64, supervised tokens.
    """

    embedding: Tensor
    nll: Tensor
    n_tokens: Tensor


def gradient_proxy(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
) -> Proxy:
    """Return the gradient proxy of every row, from one forward pass in eval mode without autograd.

    Token t + 1 of a row is supervised if its label is not -100 and the mask is 1 at t and t + 1.
    The model's mode is as before afterwards. On the first call for a model, one row is compared
    with the model's complete forward; if its logits are made in an unknown way, full logits are
    used, with a warning.

    Args:
        model: a causal language model.
        input_ids: int (B, T); padding may be on either side, and is told from the mask.
        attention_mask: (B, T), 1 on real tokens.
        labels: int (B, T), -100 on everything that is not supervised.

    Raises:
        ValueError: the three tensors differ in shape, or the model has no output embeddings.
    """
    if not input_ids.shape == attention_mask.shape == labels.shape or input_ids.ndim != 2:
        raise ValueError(
            "input_ids, attention_mask and labels must have one shape (B, T), got "
            f"{tuple(input_ids.shape)}, {tuple(attention_mask.shape)}, {tuple(labels.shape)}"
        )
    device = model.device
    attention_mask = attention_mask.to(device)
    input_ids, labels = (x.to(device, torch.long) for x in (input_ids, labels))
    positions, targets, n_tokens = supervised(labels, attention_mask)
    with evaluating(model), torch.no_grad():
        exact = _exact_head(model, input_ids, attention_mask, labels)
        return proxies_at(
            model, input_ids, attention_mask, positions, targets, n_tokens, exact_head=exact
        )


def supervised(labels: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return where a batch is supervised: positions (M,), targets (M,), tokens of each row (B,).

    A position is the index, into the flattened (B * T) positions, whose head input predicts the
    target; positions ascend.
    """
    chosen = supervised_positions(labels, attention_mask)
    positions = chosen.flatten().nonzero()[:, 0]
    return positions, labels.roll(-1, dims=1)[chosen], chosen.sum(1)


def proxies_at(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    positions: Tensor,
    targets: Tensor,
    n_tokens: Tensor,
    *,
    exact_head: bool = True,
) -> Proxy:
    """Return the gradient proxies of a batch whose supervised positions are known.

    Nothing here waits for a GPU. Call it in eval mode without autograd.

    Args:
        model: a causal language model.
        input_ids: int (B, T).
        attention_mask: (B, T), or None where padding is on the right.
        positions: int (M,), as of `supervised`.
        targets: int (M,).
        n_tokens: int (B,), how many of the positions each row has.
        exact_head: `token_log_probs` is known to reproduce the model's logits.
    """
    if exact_head:
        hidden = head_inputs(model, input_ids, attention_mask).flatten(0, 1)[positions]
        log_probs = token_log_probs(model, hidden, targets)
    else:
        hidden, log_probs = full_log_probs(model, input_ids, attention_mask, positions, targets)
    gradients = hidden.to(log_probs.dtype) * log_probs.expm1().unsqueeze(1)
    return Proxy(
        embedding=_row_means(gradients, n_tokens),
        nll=_row_means(-log_probs.unsqueeze(1), n_tokens).squeeze(1),
        n_tokens=n_tokens,
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Hold `model` in eval mode; afterwards every submodule is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _row_means(values: Tensor, n_tokens: Tensor) -> Tensor:
    """Mean (B, C) of consecutive runs of the rows of `values` (M, C); an empty run gives zeros.

    Each run is summed on its own, so that a non-finite value stays in its row, and in a fixed
    order, on a GPU too.
    """
    sums = torch.segment_reduce(values, "sum", lengths=n_tokens, unsafe=True, initial=0)
    return sums / n_tokens.clamp(min=1).unsqueeze(1)


_EXACT: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def _exact_head(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
) -> bool:
    """Whether `token_log_probs` reproduces the model's logits; found out once for each model."""
    if model not in _EXACT:
        _, _, n_tokens = supervised(labels, attention_mask)
        if not len(n_tokens) or not n_tokens.max():
            return True
        row = slice(int(n_tokens.argmax()), int(n_tokens.argmax()) + 1)
        input_ids, attention_mask, labels = input_ids[row], attention_mask[row], labels[row]
        positions, targets, _ = supervised(labels, attention_mask)
        _EXACT[model] = head_is_exact(model, input_ids, attention_mask, positions, targets)
        if not _EXACT[model]:
            warnings.warn(unknown_head(model), stacklevel=3)
    return _EXACT[model]


def unknown_head(model: nn.Module) -> str:
    """Say in one line that complete logits are used for this model."""
    return (
        f"{type(model).__name__}: its logits are not head(h) with a known scale or softcap; "
        "the complete forward is used, which is slower and needs memory for all logits"
    )
