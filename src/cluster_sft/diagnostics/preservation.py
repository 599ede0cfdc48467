"""Centroid preservation: does the mean over a cluster's selected rows point where its own does.

CluSTER's expected gradient is sum_c p_c mean over c's selected rows. It is that of the full data
to the extent that each of these means equals the mean over all rows of its cluster.

Legend: K clusters, H features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster_sft.diagnostics.moments import Array, Moments


@dataclass(frozen=True)
class Preservation:
    """Means over all rows against means over selected rows; NaN where no row is selected.

    Attributes:
        cosine: (K,) float64.
        distance: (K,) float64, Euclidean.
        norm_ratio: (K,) float64, the norm over selected rows by the norm over all.
    """

    cosine: Array
    distance: Array
    norm_ratio: Array


def preservation(full: Moments, selected: Moments) -> Preservation:
    """Compare, cluster by cluster, the mean over all rows with the mean over selected rows."""
    a, b = full.mean, selected.mean
    norm_a, norm_b = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    known = (norm_a > 0) & (selected.count > 0)
    product = np.einsum("kh,kh->k", a, b)
    cosine = np.where(known & (norm_b > 0), product, np.nan) / np.where(known, norm_a * norm_b, 1)
    return Preservation(
        cosine=np.where(np.isfinite(cosine), np.clip(cosine, -1, 1), np.nan),
        distance=np.where(known, np.linalg.norm(a - b, axis=1), np.nan),
        norm_ratio=np.where(known, norm_b, np.nan) / np.where(known, norm_a, 1),
    )


def centroid_cosines(moments: Moments) -> Array:
    """Return the cosine of every two groups' means, (G, G); NaN with a zero mean."""
    mean = moments.mean
    norm = np.linalg.norm(mean, axis=1)
    unit = np.where(norm[:, None] > 0, mean, np.nan) / np.where(norm > 0, norm, 1)[:, None]
    return np.clip(unit @ unit.T, -1, 1)


def largest_between(cosines: Array) -> float:
    """Return the largest cosine between two different groups; NaN where there is only one."""
    others = cosines[~np.eye(len(cosines), dtype=bool)]
    others = others[np.isfinite(others)]
    return float(others.max()) if others.size else float("nan")
