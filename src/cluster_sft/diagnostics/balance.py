"""How even a subset's weights are, and how much of the clusters is the length of the responses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cluster_sft.diagnostics.moments import Array


def effective_sample_size(weight_S: NDArray[np.floating]) -> float:
    """Return Kish's (sum w)^2 / sum w^2, the equally weighted rows that vary as little."""
    square = float(np.square(weight_S, dtype=np.float64).sum())
    return float(weight_S.sum(dtype=np.float64)) ** 2 / square if square > 0 else 0.0


def eta_squared(value_N: NDArray[np.number], label_N: NDArray[np.integer], k: int) -> float:
    """Return eta^2, the share of the variance of `value_N` that lies between the k clusters."""
    value_N = np.asarray(value_N, dtype=np.float64)
    away_N = value_N - value_N.mean()
    total = float(np.square(away_N).sum())
    if total <= 0:
        return 0.0
    count_K = np.bincount(label_N, minlength=k)
    mean_K = np.bincount(label_N, away_N, minlength=k) / np.maximum(count_K, 1)
    return float(count_K @ np.square(mean_K)) / total


def membership_r2(value_N: NDArray[np.number], label_N: NDArray[np.integer], k: int) -> Array:
    """Return, for each cluster against the rest, eta^2 of `value_N`, (k,).

    It is the squared point-biserial correlation of membership in that cluster with the value.
    """
    return np.array([eta_squared(value_N, (label_N == c).astype(np.int64), 2) for c in range(k)])
