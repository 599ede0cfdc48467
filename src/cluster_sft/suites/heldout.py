"""Held-out loss: mean negative log-likelihood per supervised token on rows kept out of training.

Legend: n rows, row i has t_i supervised tokens with summed NLL x_i.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cluster_sft.suites import Evaluation, Kind, Metric, Scores

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

# Fixed, since batches decide how low-precision sums are rounded; a longer row is a batch by itself.
BATCH_TOKENS = 4096
IGNORED = -100


def run(evaluation: Evaluation) -> Scores:
    """Score the held-out rows, the first `limit` by id, and write id, n_tokens and nll of each.

    `nll` in samples.jsonl is a row's mean over its supervised tokens, in nats, so that differences
    between models can be computed row by row.
    """
    from cluster_sft.artifacts import read_table
    from cluster_sft.models import load_model

    rows = read_table(evaluation.dataset, "heldout.parquet", ["id", "input_ids", "labels"])
    rows = rows.sort("id").head(evaluation.params.limit or len(rows))
    if rows.is_empty():
        return Scores(reason="no held-out rows; set data.holdout above 0")
    model = load_model(evaluation.model, dtype=evaluation.params.dtype, device="auto")
    ids, labels = rows["input_ids"].to_list(), rows["labels"].to_list()
    total, count = summed_nll(model, ids, labels)
    evaluation.write_samples(
        {"id": name, "n_tokens": int(t), "nll": float(x / t)}
        for name, x, t in zip(rows["id"], total, count, strict=True)
    )
    value, stderr = ratio(total, count)
    return Scores([Metric("heldout_nll", value, stderr, len(rows))])


def summed_nll(
    model: PreTrainedModel, ids: list[list[int]], labels: list[list[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the summed NLL in nats, float64 (n,), and the supervised tokens, int64 (n,), of rows.

    Args:
        model: in eval mode.
        ids: tokens of each row.
        labels: like `ids`, -100 on everything that is not supervised; position 0 predicts nothing
            and is never counted.
    """
    import torch
    from tqdm import tqdm

    from cluster_sft.heads import head_is_exact

    total = np.zeros(len(ids))
    count = np.zeros(len(ids), np.int64)
    with torch.inference_mode(), tqdm(total=len(ids), desc="held-out loss", unit="row") as bar:
        shortest = min(range(len(ids)), key=lambda i: len(ids[i]))
        exact = head_is_exact(model, *_tensors(model, [ids[shortest]], [labels[shortest]]))
        for batch in _batches([len(row) for row in ids]):
            inputs = _tensors(model, [ids[i] for i in batch], [labels[i] for i in batch])
            nll = -_log_probs(model, inputs, exact=exact).double()
            row = inputs.positions // inputs.input_ids.shape[1]
            sums = torch.zeros(len(batch), dtype=torch.float64, device=model.device)
            total[batch] = sums.index_add_(0, row, nll).cpu().numpy()
            count[batch] = torch.bincount(row, minlength=len(batch)).cpu().numpy()
            bar.update(len(batch))
    return total, count


def ratio(total: np.ndarray, count: np.ndarray) -> tuple[float, float | None]:
    """Return r = sum x / sum t and its standard error over rows; None for a single row.

    The error is the linearised one of a ratio estimator: with residuals e_i = x_i - r t_i,
    se^2 = n / (n - 1) * sum e_i^2 / (sum t)^2 (Cochran, Sampling Techniques, section 6.4).
    """
    n, tokens = len(total), int(count.sum())
    value = float(total.sum() / tokens)
    if n < 2:
        return value, None
    residual = total - value * count
    return value, math.sqrt(n / (n - 1) * float(residual @ residual)) / tokens


class _Inputs(NamedTuple):
    """Right-padded rows (B, T) and the M supervised positions in them, flattened."""

    input_ids: Tensor
    attention_mask: Tensor
    positions: Tensor  # of the token before each supervised one
    targets: Tensor


def _tensors(model: PreTrainedModel, ids: list[list[int]], labels: list[list[int]]) -> _Inputs:
    import torch

    input_BT, label_BT = _padded(ids, 0), _padded(labels, IGNORED)
    mask_BT = np.arange(input_BT.shape[1]) < np.array([[len(row)] for row in ids])
    shifted = np.full_like(label_BT, IGNORED)
    shifted[:, :-1] = label_BT[:, 1:]
    positions = np.flatnonzero(shifted != IGNORED)
    arrays = (input_BT, mask_BT.astype(np.int64), positions, shifted.ravel()[positions])
    return _Inputs(*(torch.from_numpy(array).to(model.device) for array in arrays))


def _log_probs(model: PreTrainedModel, inputs: _Inputs, *, exact: bool) -> Tensor:
    from cluster_sft.heads import full_log_probs, head_inputs, token_log_probs

    if not exact:
        return full_log_probs(model, *inputs)[1]
    hidden = head_inputs(model, inputs.input_ids, inputs.attention_mask)
    return token_log_probs(model, hidden.flatten(0, 1)[inputs.positions], inputs.targets)


def _batches(lengths: list[int]) -> list[list[int]]:
    """Cut rows, longest first, into batches of at most BATCH_TOKENS, padding included."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    for i in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= BATCH_TOKENS:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _padded(rows: list[list[int]], fill: int) -> np.ndarray:
    array = np.full((len(rows), max(map(len, rows))), fill, np.int64)
    for i, row in enumerate(rows):
        array[i, : len(row)] = row
    return array


KIND = Kind(run)
