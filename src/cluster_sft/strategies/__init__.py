"""Selection strategies, one file each: what to keep, given the clusters and a budget.

A file `NAME.py` here defines `STRATEGY` and nothing else need change: the registry finds it by its
name (`two_words.py` is `two-words`), `select.strategies` accepts it, both engines schedule it, and
the contract test covers it.

Legend: N rows of the embedded data, K clusters.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from cluster_sft.errors import UserError, known_names


class Rule(Protocol):
    """The part of `select:` that a strategy may read."""

    @property
    def ranking(self) -> str:
        """Return peripheral, core or random."""
        ...

    @property
    def downsample(self) -> str:
        """Return random or strategy."""
        ...

    @property
    def seed(self) -> int:
        """Return the seed of the random draws."""
        ...


@dataclass(frozen=True)
class Pool:
    """The rows to choose from.

    Attributes:
        label_N: int32, the cluster of each row; all 0 for a strategy that ignores clusters.
        distance_N: float32, the distance to the full cluster's centroid.
        last_N: bool, rows without a direction (||g(x)|| = 0): chosen when nothing else is left.
        scores: columns of scores.parquet by name, each (N,), for a strategy that is scored: `score`
            float64, NaN where the row is excluded, and of scores with groups also `source` and
            `group` int32, -1 where there is none.
    """

    label_N: np.ndarray
    distance_N: np.ndarray
    last_N: np.ndarray
    scores: dict[str, np.ndarray] = field(default_factory=dict)

    def members(self, cluster: int) -> np.ndarray:
        """Return the rows of a cluster, ascending, int64."""
        return np.flatnonzero(self.label_N == cluster)

    def demote(self, rows: np.ndarray) -> np.ndarray:
        """Return `rows` in the same order, those without a direction last."""
        last = self.last_N[rows]
        if not last.any():
            return rows
        return np.concatenate([rows[~last], rows[last]])

    def shuffled(self, cluster: int, seed: int) -> np.ndarray:
        """Return a cluster's rows in the one random order that every draw is a prefix of.

        One permutation per (seed, cluster), shared by down-sampling and random ranking, so that
        subsets nest in the ratio.
        """
        rows = self.members(cluster)
        return self.demote(np.random.default_rng([seed, cluster]).permutation(rows))

    def by_distance(self, rows: np.ndarray, *, farthest_first: bool) -> np.ndarray:
        """Return `rows` ordered by distance; ties go to the lower row."""
        rows = np.sort(rows)
        key = self.distance_N[rows]
        return self.demote(rows[np.argsort(-key if farthest_first else key, kind="stable")])

    def scored(self) -> np.ndarray:
        """Return the rows that have a score, ascending, int64."""
        return np.flatnonzero(~np.isnan(self.scores["score"]))

    def by_score(self, rows: np.ndarray) -> np.ndarray:
        """Return those of `rows` that have a score, best first; ties go to the lower row."""
        rows = np.sort(rows)
        key = self.scores["score"][rows]
        rows, key = rows[~np.isnan(key)], key[~np.isnan(key)]
        return self.demote(rows[np.argsort(-key, kind="stable")])


@dataclass(frozen=True)
class Budget:
    """K clusters, each cut to `n_min` rows, of which `m` are kept."""

    k: int
    n_min: int
    m: int

    @property
    def rows(self) -> int:
        """Return K m, the rows of every strategy under this budget."""
        return self.k * self.m


@dataclass(frozen=True)
class Strategy:
    """A strategy: its rule of choice and the preset of batches and weights that goes with it.

    Attributes:
        choose: (pool, budget, trimmed, rule) -> rows int64, distinct, best first; `trimmed[c]` are
            the rows of cluster c that `select.trim` leaves. `budget` is None if clusters are
            ignored.
        batches: how its rows are cut into steps when `train.batches` is `auto`.
        weights: how its rows are weighted when `train.weights` is `auto`.
        ignores: parameters that cannot change its rows: `cluster` for the whole clustering, or
            keys of `select:`; they stay out of its cache key.
        scored: it chooses by the scores of the scorer of its own name.
        describe: (pool, rows chosen) -> facts for the subset's summary.
    """

    choose: Callable[[Pool, Budget | None, list[np.ndarray], Rule], np.ndarray]
    batches: Literal["random", "stratified"] = "random"
    weights: Literal["none", "cluster"] = "none"
    ignores: tuple[str, ...] = ()
    scored: bool = False
    describe: Callable[[Pool, np.ndarray], dict[str, Any]] = lambda pool, chosen: {}


def best_scored(
    pool: Pool, budget: Budget | None, trimmed: list[np.ndarray], rule: Rule
) -> np.ndarray:
    """Return the K m rows of the highest scores, best first."""
    assert budget is not None
    return pool.by_score(pool.scored())[: budget.rows]


def names() -> list[str]:
    """Return the names of all strategies, sorted."""
    stems = (p.stem for p in Path(__file__).parent.glob("*.py"))
    return sorted(stem.replace("_", "-") for stem in stems if not stem.startswith("_"))


def get(name: str) -> Strategy:
    """Return the strategy called `name`.

    Raises:
        UserError: there is none; the nearest name is given.
    """
    known = names()
    if name not in known:
        remedy = known_names(name, known)
        raise UserError(f"select.strategies: unknown strategy {name!r}; {remedy}")
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}").STRATEGY
