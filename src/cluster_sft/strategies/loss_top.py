"""The rows of the highest loss: those that the model, before training, predicts worst.

The score is the mean negative log-likelihood of a row's supervised tokens, which stage embed has
measured on its way. Cheap, and known to favour noise: a control for methods that choose hard rows.
"""

from __future__ import annotations

from cluster_sft.strategies import Strategy, best_scored

STRATEGY = Strategy(best_scored, ignores=("ranking", "downsample", "seed"), scored=True)
