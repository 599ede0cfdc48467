"""Random rows as long as CluSTER's: what is left of a gain once length is accounted for.

CluSTER's own subset under the same rule is counted by response length; as many rows of every length
are drawn at random from the whole pool. Where few rows share a length, so that a draw could only
give CluSTER's own rows again, neighbouring lengths are counted together.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cluster_sft.strategies import Budget, Pool, Rule, Strategy, cluster

BIN_ROWS = 16  # that share a length, or whose lengths are counted together


def choose(pool: Pool, budget: Budget | None, trimmed: list[np.ndarray], rule: Rule) -> np.ndarray:
    """Return K m rows whose lengths are distributed as those of CluSTER's K m rows."""
    assert budget is not None
    bin_N = bins(pool.scores["score"])
    wanted = np.bincount(bin_N[cluster.choose(pool, budget, trimmed, rule)] + 1)[1:]
    shuffled = np.random.default_rng([rule.seed]).permutation(len(bin_N))
    order = pool.demote(shuffled[bin_N[shuffled] >= 0])
    # Of each bin the first so many, in the order in which `random` takes rows.
    grouped = order[np.argsort(bin_N[order], kind="stable")]
    sizes = np.bincount(bin_N[order], minlength=len(wanted))
    starts = np.cumsum(sizes) - sizes
    place = np.arange(len(grouped)) - np.repeat(starts, sizes)
    limit = np.concatenate([wanted, np.zeros(len(sizes) - len(wanted), np.int64)])
    fits = np.zeros(len(bin_N), bool)
    fits[grouped[place < np.repeat(limit, sizes)]] = True
    return np.concatenate([order[fits[order]], order[~fits[order]]])[: budget.rows]


def bins(length_N: np.ndarray) -> np.ndarray:
    """Return the bin of each length, int64, ascending with it; -1 for NaN.

    Equal lengths share a bin. A bin is closed once it holds `BIN_ROWS` rows, so that every length
    that so many rows have is matched exactly; the bin of the longest, and one before such a length,
    may hold fewer.
    """
    lengths, inverse, counts = np.unique(length_N, return_inverse=True, return_counts=True)
    known = int((~np.isnan(lengths)).sum())
    bin_of = np.full(len(lengths), -1, np.int64)
    number, held = 0, 0
    for i in range(known):
        if held and counts[i] >= BIN_ROWS:  # stands alone; what came before is a bin of its own
            number, held = number + 1, 0
        bin_of[i] = number
        held += counts[i]
        if held >= BIN_ROWS:
            number, held = number + 1, 0
    return bin_of[inverse]


def describe(pool: Pool, chosen: np.ndarray) -> dict[str, Any]:
    """Return the mean length of the rows chosen."""
    return {"mean_length": float(pool.scores["score"][chosen].mean())}


STRATEGY = Strategy(choose, scored=True, describe=describe)
