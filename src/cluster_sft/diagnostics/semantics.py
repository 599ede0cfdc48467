"""What clusters are about: terms of instructions, nearest and farthest rows, categories.

Legend: N rows, K clusters.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

MAX_FEATURES = 50_000
# Words of letters, digits and the signs that code and chemistry use inside them.
TOKEN = r"(?u)\b[^\W\d_][\w+#'-]*[\w+#]|\b[^\W\d_]\b"


def top_terms(
    texts: list[str], label_N: NDArray[np.integer], k: int, *, terms: int
) -> pl.DataFrame:
    """Return each cluster's terms whose mean TF-IDF exceeds that of the other rows the most.

    TF-IDF is scikit-learn's, with sublinear term frequencies, rows of unit length and without
    English function words. Ties go to the alphabet.

    Returns:
        Columns cluster, rank, term, score (the excess) and share (of the cluster's rows that hold
        the term); at most `terms` rows a cluster, none where no word is left.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    schema = {
        "cluster": pl.Int32,
        "rank": pl.Int32,
        "term": pl.String,
        "score": pl.Float64,
        "share": pl.Float64,
    }
    vectorizer = TfidfVectorizer(
        stop_words="english",
        sublinear_tf=True,
        min_df=2,
        max_features=MAX_FEATURES,
        token_pattern=TOKEN,
    )
    try:
        matrix = vectorizer.fit_transform(texts)
    except ValueError:  # no word is in two texts
        return pl.DataFrame(schema=schema)
    names = vectorizer.get_feature_names_out()
    total = np.asarray(matrix.sum(axis=0)).ravel()
    rows = []
    for c in range(k):
        mine = np.flatnonzero(label_N == c)
        if not len(mine):
            continue
        own = matrix[mine]
        inside = np.asarray(own.sum(axis=0)).ravel()
        excess = inside / len(mine) - (total - inside) / max(len(texts) - len(mine), 1)
        share = np.asarray((own > 0).sum(axis=0)).ravel() / len(mine)
        best = np.argsort(-excess, kind="stable")[:terms]
        rows += [
            (c, rank, names[j], float(excess[j]), float(share[j]))
            for rank, j in enumerate(best)
            if excess[j] > 0
        ]
    return pl.DataFrame(rows, schema=schema, orient="row")


def extreme_rows(
    distance_N: NDArray[np.floating], label_N: NDArray[np.integer], k: int, *, examples: int
) -> pl.DataFrame:
    """Return each cluster's rows nearest to and farthest from its centroid, ties to the lower row.

    Returns:
        Columns cluster, kind ("nearest" or "farthest"), rank, row (position).
    """
    rows = []
    for c in range(k):
        mine = np.flatnonzero(label_N == c)
        near = mine[np.argsort(distance_N[mine], kind="stable")]
        far = mine[np.argsort(-distance_N[mine], kind="stable")]
        for kind, order in (("nearest", near), ("farthest", far)):
            rows += [(c, kind, rank, int(row)) for rank, row in enumerate(order[:examples])]
    schema = {"cluster": pl.Int32, "kind": pl.String, "rank": pl.Int32, "row": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def category_agreement(
    category_N: pl.Series, label_N: NDArray[np.integer], k: int
) -> tuple[list[tuple[str, int, int] | None], int, int]:
    """Return each cluster's dominant category with its rows, and how many rows agree with it.

    Args:
        category_N: text or null; rows without a category do not count. Ties go to the alphabet.
        label_N: the cluster of every row.
        k: K.

    Returns:
        For each cluster (category, rows of it, rows with any category), None without one; then the
        sums of both counts.
    """
    frame = pl.DataFrame({"category": category_N, "cluster": label_N}).drop_nulls()
    counts = frame.group_by("cluster", "category").len()
    counts = counts.sort("cluster", "len", "category", descending=[False, True, False])
    found: list[tuple[str, int, int] | None] = [None] * k
    for (cluster,), part in counts.group_by("cluster", maintain_order=True):
        category, rows = part["category"][0], int(part["len"][0])
        found[int(str(cluster))] = (category, rows, int(part["len"].sum()))
    known = [entry for entry in found if entry is not None]
    return found, sum(entry[1] for entry in known), sum(entry[2] for entry in known)


def shorten(text: str, length: int) -> str:
    """Return a text on one line, cut to `length` characters with an ellipsis."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "\u2026"
