"""IFD: the rows whose response the instruction helps least to predict, though it does help.

The score is the instruction-following difficulty of scorer `ifd` (Li et al., 2024, From Quantity to
Quality): the response's loss given the instruction over its loss without. The highest up to 1 are
kept. Above 1 the instruction misleads: such rows are taken, lowest first, only if the others do not
fill the budget.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cluster_sft.strategies import Budget, Pool, Rule, Strategy

MISLEADING = 1.0  # a score above it: the response is more likely without its instruction


def choose(pool: Pool, budget: Budget | None, trimmed: list[np.ndarray], rule: Rule) -> np.ndarray:
    """Return K m rows: up to 1 the highest first, then those above 1, the lowest first."""
    assert budget is not None
    rows = pool.scored()
    score = pool.scores["score"][rows]
    above = rows[score > MISLEADING]
    above = above[np.argsort(pool.scores["score"][above], kind="stable")]
    helped = pool.by_score(rows[score <= MISLEADING])
    return pool.demote(np.concatenate([helped, above]))[: budget.rows]


def describe(pool: Pool, chosen: np.ndarray) -> dict[str, Any]:
    """Return how many chosen rows have a score above 1."""
    return {"above_one": int((pool.scores["score"][chosen] > MISLEADING).sum())}


STRATEGY = Strategy(
    choose, ignores=("ranking", "downsample", "seed"), scored=True, describe=describe
)
