"""Greedy k-center: rows that leave no row of the data far from a chosen one.

Scorer `k-center` has put all rows in order, each the farthest from those before it (Gonzalez, 1985;
Sener and Savarese, 2018); a budget takes a beginning of that order, so that subsets nest in the
ratio. It follows outliers by design.
"""

from __future__ import annotations

from cluster_sft.strategies import Strategy, best_scored

STRATEGY = Strategy(best_scored, ignores=("ranking", "downsample", "seed"), scored=True)
