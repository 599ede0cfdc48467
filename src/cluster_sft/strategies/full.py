"""All rows, no budget: what every method is compared with."""

from __future__ import annotations

import numpy as np

from cluster_sft.strategies import Budget, Pool, Rule, Strategy


def choose(pool: Pool, budget: Budget | None, trimmed: list[np.ndarray], rule: Rule) -> np.ndarray:
    """Return every row, in order."""
    return np.arange(len(pool.label_N))


STRATEGY = Strategy(choose, ignores=("cluster", "ranking", "downsample", "ratio", "trim", "seed"))
