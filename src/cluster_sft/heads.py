"""The language-model head apart from the body: its inputs, and log-probabilities of given tokens.

The head takes a fifth of a small model's forward pass and nearly all of its memory. Only supervised
positions need it, so the body runs alone and the head is applied to those positions in chunks: the
logits of a whole batch never exist.

Legend: B rows, T positions, H hidden size, M chosen positions, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

IGNORED = -100  # the label of what is not supervised
# Rows whose logits exist at once. On a CPU the float32 copy of bf16 logits and its softmax are five
# times as fast in pieces that stay in the cache; on a GPU small pieces cost launches.
CHUNK_ROWS = {"cpu": 256, "cuda": 1024}
SOFTMAX_BYTES = {"cpu": 1 << 21, "cuda": 1 << 28}
# Mean difference of log p, relative to 1 + mean |log p|, within which two routes are one: rounding
# of the logits, far below what a forgotten scale, bias or softcap does.
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 2e-2,
    torch.float16: 5e-3,
}


def supervised_positions(labels: Tensor, attention_mask: Tensor) -> Tensor:
    """Mark the positions that predict a supervised token.

    Position t counts if labels[t + 1] is not -100 and neither t nor t + 1 is padding.

    Args:
        labels: (B, T) int64, -100 where nothing is supervised.
        attention_mask: (B, T), 1 on tokens and 0 on padding, on either side.

    Returns:
        (B, T) bool; the last column is False.
    """
    mask = attention_mask.bool()
    marked = torch.zeros_like(mask)
    marked[:, :-1] = (labels[:, 1:] != IGNORED) & mask[:, 1:] & mask[:, :-1]
    return marked


def head_inputs(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    """Return what enters the head of `model`, (B, T, H), without computing logits.

    The model's own forward runs with a head that is handed zero positions, so that it returns in
    the ordinary way: hooks of wrappers such as FSDP all fire. It works under autograd, and inside
    the forward of another module, such as one that DDP wraps.

    Args:
        model: in whatever mode it is.
        input_ids: int (B, T).
        attention_mask: (B, T), 1 on real tokens; position ids are counted from it. None: padding,
            if any, is on the right, where a causal model cannot see it.
    """
    captured: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        captured.append(args[0])
        return (args[0][:, :0], *args[1:])

    _forward(model, input_ids, attention_mask, before_head=keep)
    return captured[0]


def token_log_probs(model: PreTrainedModel, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability of each target under the head of `model`, in nats.

    The head is the model's own, its bias, logit scale and softcap included. Differentiable;
    under autograd a chunk's logits are computed again in the backward pass, not kept.

    Args:
        model: whose head to apply.
        hidden: (M, H), rows of `head_inputs`.
        targets: int (M,), the token that each row predicts.

    Returns:
        (M,) float32; float64 for a float64 model.
    """
    finish = logit_transform(model)
    head = _head(model)

    def chunk_log_probs(rows: Tensor, tokens: Tensor) -> Tensor:
        return _log_probs(finish(head(rows)), tokens)

    parts = []
    size = _by_device(CHUNK_ROWS, hidden)
    for rows, tokens in zip(hidden.split(size), targets.split(size), strict=True):
        if torch.is_grad_enabled() and len(targets) > size:
            part = checkpoint(
                chunk_log_probs, rows, tokens, use_reentrant=False, preserve_rng_state=False
            )
        else:
            part = chunk_log_probs(rows, tokens)
        parts.append(part)
    return torch.cat(parts)


def full_log_probs(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    positions: Tensor,
    targets: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return head inputs (M, H) and log p (M,) at `positions` from the model's complete forward.

    For models whose logits `token_log_probs` does not reproduce. Needs memory for (B, T, V).

    Args:
        model: in whatever mode it is.
        input_ids: int (B, T).
        attention_mask: as in `head_inputs`.
        positions: int (M,), indices into the flattened (B * T) positions.
        targets: int (M,).
    """
    captured: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        captured.append(args[0])

    logits = _forward(model, input_ids, attention_mask, before_head=keep)
    size = _by_device(CHUNK_ROWS, logits)
    parts = [
        _log_probs(logits.flatten(0, 1)[rows], tokens)
        for rows, tokens in zip(positions.split(size), targets.split(size), strict=True)
    ]
    return captured[0].flatten(0, 1)[positions], torch.cat(parts)


@torch.no_grad()
def head_is_exact(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    positions: Tensor,
    targets: Tensor,
    *,
    masked: bool = True,
) -> bool:
    """Say whether body plus `token_log_probs` reproduces the model's complete forward on a batch.

    The head alone is compared, on the same inputs, and then the inputs too: a difference of either
    beyond rounding is a no.

    Args:
        model: in whatever mode it is.
        input_ids: int (B, T).
        attention_mask: (B, T), for the complete forward.
        positions: int (M,), as in `full_log_probs`.
        targets: int (M,).
        masked: the body gets the mask too; otherwise it is on trial without.
    """
    hidden, full = full_log_probs(model, input_ids, attention_mask, positions, targets)
    bare = head_inputs(model, input_ids, attention_mask if masked else None)
    bare = bare.flatten(0, 1)[positions]
    routes = [token_log_probs(model, hidden, targets), token_log_probs(model, bare, targets)]
    bound = TOLERANCE.get(hidden.dtype, 1e-4) * (1 + full.abs().mean())
    return all(bool((route - full).abs().mean() <= bound) for route in routes)


def logit_transform(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return what `model` does to its head's output before the softmax.

    Known by the names of their settings: a factor (Cohere `logit_scale`, Falcon-H1
    `lm_head_multiplier`), a divisor (Granite `logits_scaling`) and a softcap c tanh(z / c) (Gemma 2
    `final_logit_softcapping`). `head_is_exact` finds out about any other.
    """
    config = model.config.get_text_config()
    factor = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):
        if isinstance(value := getattr(config, name, None), int | float):
            factor *= value
    if isinstance(value := getattr(config, "logits_scaling", None), int | float):
        factor /= value
    softcap = getattr(config, "final_logit_softcapping", None)

    def finish(logits: Tensor) -> Tensor:
        if factor != 1.0:
            logits = logits * factor
        return torch.tanh(logits / softcap) * softcap if softcap else logits

    return finish


def _log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    size = max(1, _by_device(SOFTMAX_BYTES, logits) // (logits.shape[1] * dtype.itemsize))
    parts = [
        functional.cross_entropy(rows.to(dtype), targets, reduction="none")
        for rows, targets in zip(logits.split(size), tokens.split(size), strict=True)
    ]
    return -torch.cat(parts)


def _by_device(sizes: dict[str, int], tensor: Tensor) -> int:
    return sizes.get(tensor.device.type, sizes["cuda"])


def _forward(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    *,
    before_head: Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...] | None],
) -> Tensor:
    inputs = {"input_ids": input_ids, "use_cache": False}
    if attention_mask is not None:
        inputs["attention_mask"] = attention_mask
        if _takes_position_ids(type(model)):
            inputs["position_ids"] = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
    hook = _head(model).register_forward_pre_hook(before_head)
    try:
        return model(**inputs).logits
    finally:
        hook.remove()


def _head(model: PreTrainedModel) -> nn.Module:
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(
            f"{type(model).__name__} has no output embeddings; a causal language model is needed"
        )
    return head


@cache
def _takes_position_ids(kind: type[nn.Module]) -> bool:
    return "position_ids" in inspect.signature(kind.forward).parameters
