"""Sums over groups of rows, from one pass over a table that may be larger than memory.

Every diagnostic of means and variances follows from a group's count, sum and sum of squared norms.

Legend: N rows, H features, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK_ROWS = 4096

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Moments:
    """What is known of G groups of vectors.

    Attributes:
        count: (G,) int64, rows of each group.
        total: (G, H) float64, their sum.
        square: (G,) float64, the sum of their squared norms.
    """

    count: NDArray[np.int64]
    total: Array
    square: Array

    @property
    def mean(self) -> Array:
        """Return the groups' means, (G, H); zeros for an empty group."""
        return self.total / np.maximum(self.count, 1)[:, None]

    @property
    def spread(self) -> Array:
        """Return S^2 = (1/n) sum ||x_i - mean||^2 of each group, (G,); 0 for an empty group."""
        mean_square = self.square / np.maximum(self.count, 1)
        return np.maximum(mean_square - np.square(self.mean).sum(axis=1), 0.0)

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of every group joined with the other's group of the same number."""
        return Moments(
            self.count + other.count, self.total + other.total, self.square + other.square
        )

    def __getitem__(self, groups: slice) -> Moments:
        """Return the moments of some of the groups."""
        return Moments(self.count[groups], self.total[groups], self.square[groups])

    def merged(self) -> Moments:
        """Return the moments of all groups together, as one group."""
        return Moments(
            self.count.sum(keepdims=True),
            self.total.sum(axis=0, keepdims=True),
            self.square.sum(keepdims=True),
        )


def group_moments(
    x: NDArray[np.floating],
    group_N: NDArray[np.integer],
    n_groups: int,
    *,
    scale_N: NDArray[np.floating] | None = None,
) -> Moments:
    """Return the moments of every group of rows, accumulated in float64.

    Args:
        x: (N, H), in memory or memory-mapped.
        group_N: the group of every row, in range(n_groups).
        n_groups: G.
        scale_N: a factor on every row; None for 1.
    """
    count = np.bincount(group_N, minlength=n_groups).astype(np.int64)
    total = np.zeros((n_groups, x.shape[1]))
    square = np.zeros(n_groups)
    for start, block in _blocks(x):
        groups = group_N[start : start + len(block)]
        if scale_N is not None:
            block = block * scale_N[start : start + len(block), None]
        square += np.bincount(groups, np.square(block).sum(axis=1), minlength=n_groups)
        for group in np.unique(groups):
            total[group] += block[groups == group].sum(axis=0)
    return Moments(count, total, square)


def _blocks(x: NDArray[np.floating]) -> Iterator[tuple[int, Array]]:
    for start in range(0, len(x), BLOCK_ROWS):
        yield start, np.asarray(x[start : start + BLOCK_ROWS], dtype=np.float64)
