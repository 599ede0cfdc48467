"""Proxy validity: do rows of one cluster push the model alike, by their true gradients.

T is the mean cosine of true per-sample gradients over pairs inside clusters minus the mean over
pairs of different clusters. Under the null hypothesis labels mean nothing: they are permuted,
keeping the clusters' sizes, and p = (1 + #{T_perm >= T}) / (1 + R), one-sided.

Legend: N rows, n sampled rows, K clusters, R permutations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster_sft.diagnostics.moments import Array

MIN_ROWS = 2  # of every cluster in the sample, for a pair inside it
BLOCK = 256  # permutations at a time
SLACK = 1e-12  # two sums of the same cosines in another order differ by less


@dataclass(frozen=True)
class PermutationTest:
    """The statistic, its distribution under the null hypothesis, and p.

    Attributes:
        statistic: T = intra - inter.
        intra: mean cosine over pairs inside clusters.
        inter: mean cosine over pairs of different clusters.
        permuted: (R,) float64, T under permuted labels.
        p_value: one-sided.
    """

    statistic: float
    intra: float
    inter: float
    permuted: Array
    p_value: float


def sample_rows(label_N: NDArray[np.integer], k: int, *, size: int, seed: int) -> NDArray[np.int64]:
    """Draw rows in proportion to the clusters' sizes, at least 2 of each, ascending.

    What the floor of size n_c / N leaves goes to the largest remainders, ties to the lower cluster.
    A cluster of one row gives that row. The minimum may make the sample larger than `size`.
    """
    count_K = np.bincount(label_N, minlength=k)
    n = int(count_K.sum())
    size = min(size, n)
    quota_K, rest_K = np.divmod(count_K * size, n)
    order = np.argsort(-rest_K, kind="stable")
    quota_K[order[: size - int(quota_K.sum())]] += 1
    quota_K = np.minimum(np.maximum(quota_K, MIN_ROWS), count_K)
    drawn = [
        np.random.default_rng([seed, c]).permutation(np.flatnonzero(label_N == c))[: quota_K[c]]
        for c in range(k)
    ]
    return np.sort(np.concatenate(drawn)).astype(np.int64)


def cosines(gram: Array) -> Array:
    """Return the cosines of vectors from their inner products, (n, n); NaN beside a zero vector."""
    norm = np.sqrt(np.maximum(np.diag(gram), 0))
    product = norm[:, None] * norm[None, :]
    return np.divide(gram, product, out=np.full_like(gram, np.nan), where=product > 0)


def permutation_test(
    cosine: Array, label_n: NDArray[np.integer], *, permutations: int, seed: int
) -> PermutationTest | None:
    """Test whether cosines are larger inside clusters than between them.

    Args:
        cosine: (n, n) float64, finite, symmetric.
        label_n: the cluster of every row.
        permutations: R.
        seed: of the permutations.

    Returns:
        None where there is no pair inside a cluster or none between two.
    """
    label_n = np.unique(label_n, return_inverse=True)[1]
    size_K = np.bincount(label_n)
    n = len(label_n)
    pairs = n * (n - 1)
    inside = int((size_K * (size_K - 1)).sum())
    if not inside or inside == pairs:
        return None
    off = cosine - np.diag(np.diag(cosine))
    total = float(off.sum())

    def statistic(labels: NDArray[np.integer]) -> Array:
        sums = _inside_sums(off, labels, len(size_K))
        return sums / inside - (total - sums) / (pairs - inside)

    observed = float(statistic(label_n[None])[0])
    rng = np.random.default_rng([seed, n])
    permuted = np.empty(permutations)
    for start in range(0, permutations, BLOCK):
        rows = min(BLOCK, permutations - start)
        labels = rng.permuted(np.tile(label_n, (rows, 1)), axis=1)
        permuted[start : start + rows] = statistic(labels)
    intra = float(_inside_sums(off, label_n[None], len(size_K))[0]) / inside
    reached = int((permuted >= observed - SLACK).sum())
    return PermutationTest(
        statistic=observed,
        intra=intra,
        inter=intra - observed,
        permuted=permuted,
        p_value=(1 + reached) / (1 + permutations),
    )


def mean_cosines(cosine: Array, label_n: NDArray[np.integer], k: int) -> Array:
    """Return the mean cosine over pairs of every two clusters, (K, K), a row never with itself.

    NaN where there is no pair.
    """
    off = cosine - np.diag(np.diag(cosine))
    member = (label_n[:, None] == np.arange(k)).astype(np.float64)
    size_K = member.sum(axis=0)
    pairs = np.outer(size_K, size_K) - np.diag(size_K)
    sums = member.T @ off @ member
    return np.divide(sums, pairs, out=np.full_like(sums, np.nan), where=pairs > 0)


def agreement(cosine: Array, other: Array) -> float | None:
    """Return Pearson's correlation of two kinds of cosines over all pairs of rows.

    None where either does not vary.
    """
    upper = np.triu_indices(len(cosine), 1)
    a, b = cosine[upper], other[upper]
    if len(a) < 2 or not a.std() or not b.std():
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _inside_sums(off: Array, labels: NDArray[np.integer], k: int) -> Array:
    """Sum cosines over ordered pairs inside clusters, for every row of labels (R, n)."""
    sums = np.zeros(len(labels))
    for c in range(k):
        member = (labels == c).astype(np.float64)
        sums += np.einsum("rn,rn->r", member @ off, member)
    return sums
