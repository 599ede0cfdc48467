"""S2L: equal shares of every group of rows whose loss falls alike while a small model trains.

Scorer `s2l` has grouped the rows of each source by their loss trajectories (Yang et al., 2024,
SmallToLarge). The budget is poured over sources and then over a source's groups, smallest first:
what is left is divided equally among those not yet served; who has less gives all. Groups of at
most 2 rows only fill what the others leave. Draws are random, seeded by (seed, source, group).
"""

from __future__ import annotations

import numpy as np

from cluster_sft.errors import UserError
from cluster_sft.strategies import Budget, Pool, Rule, Strategy

TINY = 2  # rows of a group that is too small to stand for a way of learning


def choose(pool: Pool, budget: Budget | None, trimmed: list[np.ndarray], rule: Rule) -> np.ndarray:
    """Return K m rows, source by source."""
    assert budget is not None
    if not {"source", "group"} <= pool.scores.keys():
        raise UserError(
            "strategy 's2l' needs the columns source and group, which scores.parquet lacks; give "
            "the leaf of score s2l"
        )
    rows = pool.scored()
    last = pool.last_N[rows]
    chosen = _pour(pool, rows[~last], budget.rows, rule.seed)
    rest = np.random.default_rng([rule.seed]).permutation(rows[last])
    return np.concatenate([chosen, rest])[: budget.rows]


def quotas(sizes: np.ndarray, budget: int) -> np.ndarray:
    """Return what each of the pots gives of `budget`, int64, smallest pot first, ties by position.

    The s-th of S gives floor(left / (S - s)), or all it has if that is less.
    """
    given, left = np.zeros(len(sizes), np.int64), budget
    for place, pot in enumerate(np.argsort(sizes, kind="stable")):
        given[pot] = min(int(sizes[pot]), left // (len(sizes) - place))
        left -= int(given[pot])
    return given


def _pour(pool: Pool, rows: np.ndarray, budget: int, seed: int) -> np.ndarray:
    parts = _split(rows, pool.scores["source"][rows])
    given = quotas(np.array([len(part) for part in parts], np.int64), budget)
    pairs = zip(parts, given, strict=True)
    return np.concatenate([rows[:0], *(_from_source(pool, p, int(n), seed) for p, n in pairs)])


def _from_source(pool: Pool, rows: np.ndarray, budget: int, seed: int) -> np.ndarray:
    """Return `budget` rows of one source."""
    if budget == 0:
        return rows[:0]
    source = int(pool.scores["source"][rows[0]])
    groups = _split(rows, pool.scores["group"][rows])
    large = [g for g in groups if len(g) > TINY]
    given = quotas(np.array([len(g) for g in large], np.int64), budget)
    drawn = []
    for members, n in zip(large, given, strict=True):
        salt = [seed, source, int(pool.scores["group"][members[0]])]
        drawn.append(np.random.default_rng(salt).permutation(members)[:n])
    tiny = np.concatenate([rows[:0], *(g for g in groups if len(g) <= TINY)])
    rest = np.random.default_rng([seed, source]).permutation(tiny)
    return np.concatenate([*drawn, rest])[:budget]


def _split(rows: np.ndarray, key: np.ndarray) -> list[np.ndarray]:
    """Return the rows of each key, keys ascending, rows ascending."""
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.diff(key[order])) + 1
    return np.split(rows[order], starts) if len(rows) else []


STRATEGY = Strategy(choose, ignores=("ranking", "downsample"), scored=True)
