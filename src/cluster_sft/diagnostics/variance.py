"""Variance of a step's gradient estimate: random batches against the weighted stratified estimator.

With S_c^2 = (1/n_c) sum ||g_i - mu_c||^2, p_c = n_c / N and mu the mean of all rows:

    S^2 = sum p_c S_c^2 + sum p_c ||mu_c - mu||^2 = S_intra^2 + S_inter^2
    random batch of B:                    Var = S^2 / B
    G = sum p_c mean_c, B/K rows each:    Var = (K/B) sum p_c^2 S_c^2
                                              <= max(alpha, K ceil(N/K)/N) S_intra^2 / B

for draws with replacement. Without it, S^2/B gets the factor (N - B)/(N - 1) and each S_c^2/b_c the
factor (n_c - b_c)/(n_c - 1).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from cluster_sft.diagnostics.moments import Array, Moments


@dataclass(frozen=True)
class Variances:
    """Variances E ||G - E G||^2 of a step of B rows; None where the estimator is undefined.

    Attributes:
        s_intra: S_intra^2, the mean spread inside clusters.
        s_inter: S_inter^2, the spread of the cluster means.
        random: of a random batch.
        stratified: of the weighted stratified estimator.
        ratio: stratified by random.
        bound: of the stratified one from the capacity; only for draws with replacement.
        bound_below_random: S_inter^2 > (alpha - 1) S_intra^2, where the bound promises a gain.
    """

    s_intra: float
    s_inter: float
    random: float
    stratified: float | None
    ratio: float | None
    bound: float | None = None
    bound_below_random: bool | None = None

    def described(self) -> dict[str, float | bool | None]:
        """Return the numbers by name."""
        return asdict(self)


def variances(moments: Moments, *, batch: int, alpha: float) -> Variances:
    """Return the variances of a step of `batch` rows, drawn with replacement from all rows.

    Args:
        moments: of the K clusters.
        batch: B; the stratified estimator needs B >= K and takes B/K rows of every cluster.
        alpha: the clusters' capacity factor.
    """
    share_K, intra, inter = _decompose(moments)
    k, n = len(share_K), int(moments.count.sum())
    random = (intra + inter) / batch
    stratified = None
    if batch >= k and moments.count.all():
        stratified = k / batch * float(np.square(share_K) @ moments.spread)
    factor = max(alpha, k * math.ceil(n / k) / n)
    return Variances(
        s_intra=intra,
        s_inter=inter,
        random=random,
        stratified=stratified,
        ratio=_ratio(stratified, random),
        bound=factor * intra / batch,
        bound_below_random=factor * intra < intra + inter,
    )


def variances_drawn(drawn: Moments, share_K: Array, *, batch: int) -> Variances:
    """Return the variances of a step of `batch` rows, drawn without replacement from `drawn`.

    Args:
        drawn: moments of the rows of the K clusters that batches are drawn from.
        share_K: p_c, the shares that the stratified estimator weighs its clusters by.
        batch: B; where it exceeds a cluster's rows by the factor K, they are all in the step.
    """
    own_K, intra, inter = _decompose(drawn)
    k, n = len(own_K), int(drawn.count.sum())
    size = min(batch, n)
    random = (intra + inter) / size * (n - size) / max(n - 1, 1)
    stratified = None
    if batch >= k and drawn.count.all():
        taken_K = np.minimum(batch / k, drawn.count)
        left_K = (drawn.count - taken_K) / np.maximum(drawn.count - 1, 1)
        stratified = float((np.square(share_K) * drawn.spread * left_K / taken_K).sum())
    return Variances(intra, inter, random, stratified, _ratio(stratified, random))


def _decompose(moments: Moments) -> tuple[Array, float, float]:
    """Return p_c, S_intra^2 and S_inter^2."""
    share_K = moments.count / max(int(moments.count.sum()), 1)
    away = moments.mean - share_K @ moments.mean
    return share_K, float(share_K @ moments.spread), float(share_K @ np.square(away).sum(axis=1))


def _ratio(value: float | None, other: float) -> float | None:
    return None if value is None or other <= 0 else value / other
