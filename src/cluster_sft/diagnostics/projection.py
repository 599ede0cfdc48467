"""A 2-D map of the embedding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster_sft.diagnostics.moments import Array
from cluster_sft.errors import UserError

MAPS = ("pca", "tsne")
PERPLEXITY = 30.0


@dataclass(frozen=True)
class Map:
    """Where rows lie in the plane.

    Attributes:
        points: (N, 2) float64.
        axes: titles of the two axes.
        explained: shares of the variance along the axes; None for a map that has none.
    """

    points: Array
    axes: tuple[str, str]
    explained: tuple[float, float] | None


def project(x: NDArray[np.floating], *, method: str, seed: int) -> Map:
    """Project rows onto the plane, by scikit-learn.

    Args:
        x: (N, H).
        method: "pca" for the two principal axes, "tsne" for t-SNE from a start of PCA.
        seed: of whatever is random in the method.

    Raises:
        UserError: an unknown method.
    """
    if method not in MAPS:
        raise UserError(f"diagnose.map must be one of {', '.join(MAPS)}, got {method!r}")
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    x = np.asarray(x, dtype=np.float64)
    if min(x.shape) < 2 or (x == x[0]).all():
        return Map(np.zeros((len(x), 2)), ("", ""), None)
    if method == "tsne" and len(x) > 3:
        perplexity = min(PERPLEXITY, (len(x) - 1) / 3)
        model = TSNE(2, perplexity=perplexity, init="pca", random_state=seed)
        return Map(model.fit_transform(x).astype(np.float64), ("t-SNE 1", "t-SNE 2"), None)
    pca = PCA(2, random_state=seed)
    points = pca.fit_transform(x)
    first, second = (float(v) for v in pca.explained_variance_ratio_)
    titles = (f"PC 1 ({first:.1%} of the variance)", f"PC 2 ({second:.1%})")
    return Map(points, titles, (first, second))
