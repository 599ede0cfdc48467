"""LESS: the rows whose gradients point most the way of the target examples' gradients.

The score is the influence that scorer `less` computes (Xia et al., 2024, LESS: Selecting
Influential Data for Targeted Instruction Tuning); the K m rows of the highest are kept. Rows that
could not be scored are never chosen.
"""

from __future__ import annotations

from cluster_sft.strategies import Strategy, best_scored

STRATEGY = Strategy(best_scored, ignores=("ranking", "downsample", "seed"), scored=True)
