"""CluSTER: balance the clusters, keep of each what its centroid represents least.

Every cluster is cut to `n_min` rows, at random or by the ranking itself (`select.downsample`), and
the best `m` by `select.ranking` are kept: `peripheral` (farthest from the centroid), `core`
(nearest) or `random`. Distances are to the full cluster's centroid. The loss is weighted by
w_c = n_c K / N: the expected update is then that of the full data, exactly for random rows of a
cluster, for others as far as they keep its centroid (stage diagnose measures it).
"""

from __future__ import annotations

import numpy as np

from cluster_sft.strategies import Budget, Pool, Rule, Strategy


def choose(pool: Pool, budget: Budget | None, trimmed: list[np.ndarray], rule: Rule) -> np.ndarray:
    """Return m rows of every cluster, best first."""
    assert budget is not None
    kept = [_keep(pool, budget, c, rows, rule) for c, rows in enumerate(trimmed)]
    return np.concatenate(kept)


def _keep(pool: Pool, budget: Budget, cluster: int, rows: np.ndarray, rule: Rule) -> np.ndarray:
    order = pool.shuffled(cluster, rule.seed)
    if len(rows) < len(order):
        left = np.zeros(len(pool.label_N), bool)
        left[rows] = True
        order = order[left[order]]
    if rule.ranking == "random":
        return order[: budget.m]
    if rule.downsample == "random":
        rows = order[: budget.n_min]
    return pool.by_distance(rows, farthest_first=rule.ranking == "peripheral")[: budget.m]


STRATEGY = Strategy(choose, batches="stratified", weights="cluster")
