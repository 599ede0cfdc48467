"""Random m rows of every cluster: balanced clusters without a ranking and without weights."""

from __future__ import annotations

import numpy as np

from cluster_sft.strategies import Budget, Pool, Rule, Strategy


def choose(pool: Pool, budget: Budget | None, trimmed: list[np.ndarray], rule: Rule) -> np.ndarray:
    """Return the first m rows of every cluster's permutation."""
    assert budget is not None
    return np.concatenate([pool.shuffled(c, rule.seed)[: budget.m] for c in range(budget.k)])


STRATEGY = Strategy(choose, batches="stratified", ignores=("ranking", "downsample"))
