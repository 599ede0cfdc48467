"""How good labels are, from the rows themselves: the same judge for every arm."""

from __future__ import annotations

from pathlib import Path

import numpy as np

BLOCK = 4096  # rows at a time


def inertia(path: Path, labels: np.ndarray, k: int) -> float:
    """Return the sum of squared distances to the means of `labels`, computed in float64."""
    centers, total = means(path, labels, k)
    counts = np.bincount(labels, minlength=k)
    return total - float(((centers**2).sum(axis=1) * counts).sum())


def means(path: Path, labels: np.ndarray, k: int) -> tuple[np.ndarray, float]:
    """Return the means (K, H) of `labels` and the sum of all squares, computed in float64."""
    x = np.load(path, mmap_mode="r")[: len(labels)]
    sums, total = np.zeros((k, x.shape[1])), 0.0
    for low in range(0, len(x), BLOCK):
        block = x[low : low + BLOCK].astype(np.float64)
        total += float((block**2).sum())
        for cluster in range(k):
            sums[cluster] += block[labels[low : low + BLOCK] == cluster].sum(axis=0)
    return sums / np.maximum(np.bincount(labels, minlength=k), 1)[:, None], total
