"""What clusters and selection do to means and variances of the proxies, measured and drawn.

Legend: N embedded rows, K clusters, S selected rows.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from cluster_sft.diagnostics import composition, diversity, figures, preservation, variance
from cluster_sft.diagnostics.inputs import Inputs
from cluster_sft.diagnostics.moments import Array, Moments, group_moments


def measure_geometry(inputs: Inputs, *, seed: int, out: Path) -> dict[str, Any]:
    """Return preservation, variances, diversity and composition of batches, and draw them."""
    k, label_N = inputs.k, inputs.label_N
    batch = composition.nominal_batch(len(inputs.rows_S), k)
    group_N = label_N + k * inputs.selected_N
    moments: dict[str, tuple[Moments, Moments]] = {}
    for name, scale_N in (("e", None), ("g", inputs.norm_N)):
        both = group_moments(inputs.x, group_N, 2 * k, scale_N=scale_N)
        moments[name] = both[:k] + both[k:], both[k:]
    kept = {name: preservation.preservation(*pair) for name, pair in moments.items()}
    full, selected = moments["e"]
    steps = {
        way: composition.epoch_steps(label_N[inputs.rows_S], k, batch=batch, seed=seed, batches=way)
        for way in ("random", "stratified")
    }
    made = {way: found for way, found in steps.items() if found is not None}
    spread = {
        way: diversity.batch_diversity(inputs.x, [inputs.rows_S[rows] for rows in found])
        for way, found in made.items()
    }
    counts = {w: composition.step_counts(s, label_N[inputs.rows_S], k) for w, s in made.items()}
    size_K, rows_K = full.count, selected.count
    diverse, diverse_kept = (m.count * diversity.diversity(m) for m in (full, selected))
    between = preservation.centroid_cosines(full)
    figures.write(out, "centroids", figures.draw_centroids(between, kept["e"].cosine))
    figures.write(out, "diversity", figures.draw_diversity(diverse, diverse_kept, spread))
    figures.write(out, "composition", figures.draw_composition(counts))
    return {
        "clusters": [
            {
                "gd": diverse[c] / max(size_K[c], 1),
                "n_gd": diverse[c],
                "gd_selected": diverse_kept[c] / max(rows_K[c], 1),
                "n_gd_selected": diverse_kept[c],
                **_kept(kept, c),
            }
            for c in range(k)
        ],
        "preservation": _preservation(kept, moments),
        "variance": _variances(moments, batch=batch, alpha=inputs.alpha),
        "diversity": _diversity(full, selected, spread),
        "composition": {way: composition.describe_counts(c) for way, c in counts.items()},
        "batch_rows": batch,
    }


def _kept(kept: dict[str, preservation.Preservation], c: int) -> dict[str, float]:
    return {
        f"{what}_{name}": getattr(found, what)[c]
        for name, found in kept.items()
        for what in ("cosine", "distance", "norm_ratio")
    }


def _preservation(
    kept: dict[str, preservation.Preservation], moments: dict[str, tuple[Moments, Moments]]
) -> dict[str, float]:
    found = {}
    for name, (full, _) in moments.items():
        cosine = kept[name].cosine
        known = cosine[np.isfinite(cosine)]
        found[f"lowest_{name}"] = known.min(initial=1.0) if len(known) else math.nan
        cosines = preservation.centroid_cosines(full)
        found[f"largest_between_{name}"] = preservation.largest_between(cosines)
    return found


def _variances(
    moments: dict[str, tuple[Moments, Moments]], *, batch: int, alpha: float
) -> dict[str, dict[str, Any]]:
    """Return, on e and g: all rows with replacement and without, selected rows without."""
    found: dict[str, dict[str, Any]] = {"all": {}, "all_without_replacement": {}, "selected": {}}
    for name, (full, selected) in moments.items():
        share_K = full.count / full.count.sum()
        found["all"][name] = variance.variances(full, batch=batch, alpha=alpha).described()
        for key, drawn in (("all_without_replacement", full), ("selected", selected)):
            those = variance.variances_drawn(drawn, share_K, batch=batch)
            found[key][name] = those.described()
    return found


def _diversity(full: Moments, selected: Moments, spread: dict[str, Array]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, moments in (("all", full), ("subset", selected)):
        one = moments.merged()
        gd = float(diversity.diversity(one)[0])
        found[name] = {"gd": gd, "n_gd": int(one.count[0]) * gd}
    for way, values in spread.items():
        found[f"{way}_batches"] = {"n_gd_mean": values.mean(), "n_gd_sd": values.std()}
    return found
