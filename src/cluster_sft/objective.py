"""The weighted training objective: what a step's gradient is, whoever computes it.

Row i has the loss sum over its supervised tokens of l_it; a step's loss is the sum over its rows of
a coefficient times that. The coefficients are fixed before the step, from the global step's weights
and token counts, so that micro-batches, workers and processes only split a sum:

    sequence:  (1 / B_s) sum_i w_i (1 / |T_i|) sum_t l_it
    token:     sum_i w_i sum_t l_it / sum_i w_i |T_i|

Weights are never normalised inside a worker: with one cluster there they would cancel.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from cluster_sft.errors import UserError
from cluster_sft.heads import (
    full_log_probs,
    head_inputs,
    supervised_positions,
    token_log_probs,
)

LossReduction = Literal["sequence", "token"]


def row_coefficients(
    weights: ArrayLike, n_tokens: ArrayLike, *, loss_reduction: LossReduction
) -> NDArray[np.float64]:
    """Return c_i such that the step's loss is sum_i c_i sum_t l_it.

    A process that plays part of the step, one of P whose gradients are averaged, backpropagates
    P times the sum over its own rows.

    Args:
        weights: (B_s,) loss weights of the rows of the whole step.
        n_tokens: (B_s,) int, |T_i|, their supervised tokens, at least 1.
        loss_reduction: "sequence" for the mean of the rows' own means, "token" for the weighted
            mean over the step's tokens.

    Returns:
        (B_s,) float64.

    Raises:
        ValueError: a row without supervised tokens, or weights that sum to 0 over the tokens.
    """
    weight_B = np.asarray(weights, dtype=np.float64)
    tokens_B = np.asarray(n_tokens, dtype=np.float64)
    if (tokens_B < 1).any():
        row = int(np.argmax(tokens_B < 1))
        raise UserError(f"row {row} of the step has no supervised token, its loss is undefined")
    if loss_reduction == "sequence":
        return weight_B / (tokens_B * max(len(weight_B), 1))
    if loss_reduction != "token":
        raise UserError(f"loss_reduction must be sequence or token, got {loss_reduction!r}")
    total = float(weight_B @ tokens_B)
    if len(weight_B) and total <= 0:
        raise UserError(f"weights times supervised tokens must sum to more than 0, got {total}")
    return weight_B / total if len(weight_B) else weight_B.copy()


class RowLoss(nn.Module):
    """A causal model whose forward pass returns every row's summed cross-entropy.

    It is what is wrapped for data parallelism: everything that needs gradients, the LM head
    included, is used inside this module's forward. The full (B, T, V) logits never exist: only
    supervised positions go through the head, in chunks that the backward pass computes again.

    Args:
        model: a causal language model of Transformers.
        full_logits: take the losses from the model's complete forward instead, for a model whose
            logits are more than its head's output.
    """

    def __init__(self, model: PreTrainedModel, *, full_logits: bool = False) -> None:
        super().__init__()
        self.model = model
        self.full_logits = full_logits

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """Return sum_t l_it in nats, (B,) float32 or wider, from (B, T) int64 inputs."""
        marked = supervised_positions(labels, attention_mask)
        targets = labels.roll(-1, dims=1)[marked]
        if self.full_logits:
            positions = marked.flatten().nonzero()[:, 0]
            _, log_probs = full_log_probs(self.model, input_ids, attention_mask, positions, targets)
        else:
            hidden = head_inputs(self.model, input_ids, attention_mask)
            log_probs = token_log_probs(self.model, hidden[marked], targets)
        # A scatter and a sum, since the order in which index_add adds varies on a GPU.
        losses = log_probs.new_zeros(marked.shape).masked_scatter(marked, -log_probs)
        return losses.sum(dim=1)
