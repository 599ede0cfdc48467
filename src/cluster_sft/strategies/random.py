"""Uniformly random rows under the budget: the baseline that most methods do not beat."""

from __future__ import annotations

import numpy as np

from cluster_sft.strategies import Budget, Pool, Rule, Strategy


def choose(pool: Pool, budget: Budget | None, trimmed: list[np.ndarray], rule: Rule) -> np.ndarray:
    """Return the first K m rows of one permutation of all rows, so that subsets nest."""
    assert budget is not None
    order = np.random.default_rng([rule.seed]).permutation(len(pool.label_N))
    return pool.demote(order)[: budget.rows]


STRATEGY = Strategy(choose, ignores=("ranking", "downsample"))
