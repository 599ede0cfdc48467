"""The premises of the method, and one line for each that fails on the data at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COSINE = 0.99  # of a centroid with that of its selected rows
LEVEL = 0.05  # of the permutation test
SAMPLE_SHARE = 0.5  # effective by actual sample size
LENGTH_R2 = 0.25  # of membership in one cluster with the response's length


def warnings(metrics: Mapping[str, Any]) -> list[str]:
    """Return a line for every premise that fails, from what metrics.json holds."""
    clusters = metrics["clusters"]
    return [
        *_missing(clusters),
        *_centroids(clusters),
        *_between(metrics["preservation"]),
        *_validity(metrics["validity"]),
        *_variance(metrics["variance"]["selected"]["e"], metrics["weights"]),
        *_weights(metrics["weights"], metrics["rows"]),
        *_length(clusters),
    ]


def _missing(clusters: Sequence[Mapping[str, Any]]) -> list[str]:
    lost = [c["cluster"] for c in clusters if not c["rows"]]
    if not lost:
        return []
    return [f"No row of {_named(lost)} is selected: what it teaches is not trained on."]


def _centroids(clusters: Sequence[Mapping[str, Any]]) -> list[str]:
    found = {
        name: {c["cluster"]: v for c in clusters if (v := c[f"cosine_{name}"]) is not None}
        for name in ("e", "g")
    }
    low = {c: v for values in found.values() for c, v in values.items() if v < COSINE}
    if not low:
        return []
    worst, where = min((v, name) for name, values in found.items() for v in values.values())
    return [
        f"The selected rows of {_named(sorted(low))} do not preserve the centroid: the lowest "
        f"cosine is {worst:.4f}, on {where}(x), below {COSINE}; the expected gradient is then not "
        "that of the full data. A higher ratio brings it closer."
    ]


def _between(preservation: Mapping[str, Any]) -> list[str]:
    value = preservation["largest_between_e"]
    if value is None or value < COSINE:
        return []
    return [
        f"The centroids of two different clusters have a cosine of {value:.4f}: directions hardly "
        "differ in these data, and a preserved centroid says little."
    ]


def _validity(validity: Mapping[str, Any]) -> list[str]:
    value, p = validity["statistic"], validity["p_value"]
    if value is None:
        return []
    rows = f"{validity['rows']} sampled rows"
    if value <= 0:
        return [
            f"True gradients agree no more inside clusters than between them (T = {value:.3g} over "
            f"{rows}): the clusters do not group rows by their gradient."
        ]
    if p > LEVEL:
        return [
            f"True gradients agree more inside clusters than between them by T = {value:.3g} only, "
            f"which chance explains (p = {p:.2g} over {rows})."
        ]
    return []


def _variance(variance: Mapping[str, Any], weights: Mapping[str, Any]) -> list[str]:
    ratio, weighted = variance["ratio"], weights["largest"] > weights["smallest"]
    if ratio is None or ratio < 1 or not weighted:
        return []
    return [
        f"Weighted stratified batches have {ratio:.2f} times the variance of random ones on the "
        "selected rows: balancing costs more here than stratifying gains."
    ]


def _weights(weights: Mapping[str, Any], rows: int) -> list[str]:
    if weights["effective_share"] >= SAMPLE_SHARE:
        return []
    return [
        f"The weights leave an effective sample of {weights['effective_sample_size']:.0f} of "
        f"{rows} rows ({weights['effective_share']:.0%}): a few heavy clusters dominate the "
        "gradient. A smaller alpha or fewer clusters even the weights."
    ]


def _length(clusters: Sequence[Mapping[str, Any]]) -> list[str]:
    worst = max(clusters, key=lambda c: c["length_r2"])
    if worst["length_r2"] < LENGTH_R2 or len(clusters) < 2:
        return []
    return [
        f"Cluster {worst['cluster']} is largely a matter of length: its responses have a median of "
        f"{worst['length_median']:.0f} tokens, the other rows' {worst['length_median_others']:.0f} "
        f"(r\u00b2 = {worst['length_r2']:.2f} of membership with log length)."
    ]


def _named(clusters: Sequence[int]) -> str:
    words = ", ".join(str(c) for c in clusters[:8]) + (" ..." if len(clusters) > 8 else "")
    return f"cluster {words}" if len(clusters) == 1 else f"clusters {words}"
