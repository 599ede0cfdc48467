"""Gradient diversity (Yin et al. 2018): how little the gradients of a set of rows agree.

GD = sum ||g_i||^2 / ||sum g_i||^2. Of n equal gradients it is 1/n, of n orthogonal ones of equal
length 1. It falls as 1/n with the size of a set, so that n GD, at least 1, is what compares sets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster_sft.diagnostics.moments import Array, Moments

MAX_STEPS = 200  # steps whose diversity is computed, spread evenly over the epoch


def diversity(moments: Moments) -> Array:
    """Return GD of every group, (G,); NaN where the gradients sum to zero or there are none."""
    norm = np.square(moments.total).sum(axis=1)
    return np.divide(moments.square, norm, out=np.full(len(norm), np.nan), where=norm > 0)


def batch_diversity(x: NDArray[np.floating], steps: Sequence[NDArray[np.int64]]) -> Array:
    """Return B GD of the rows of every step, (steps,); at most `MAX_STEPS` of them are taken.

    Args:
        x: (N, H) rows, in memory or memory-mapped.
        steps: row positions of every optimizer step.
    """
    taken = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MAX_STEPS)).round())
    values = []
    for step in taken.astype(int):
        batch = np.asarray(x[np.sort(steps[step])], dtype=np.float64)
        one = Moments(
            np.array([len(batch)]), batch.sum(axis=0, keepdims=True), np.array([(batch**2).sum()])
        )
        values.append(len(batch) * diversity(one)[0])
    return np.array(values)
