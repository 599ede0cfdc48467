"""Stage diagnose: do the premises of CluSTER hold for these data, this model and this subset.

Reads dataset, embeddings, clusters and subset, joined by id; clusters are those of the cluster
leaf, also where the strategy ignored them. What stage validate found of the clusters is repeated,
so that a leaf tells everything of its subset. Writes metrics.json (every number), summary.json
(cost and warnings), terms.csv, examples.csv, map.parquet and figures/*.svg.

Legend: N embedded rows, H hidden size, K clusters, S selected rows.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster_sft import costs
from cluster_sft.artifacts import SUMMARY, read_json, write_json
from cluster_sft.diagnostics import balance, geometry, meaning, premises
from cluster_sft.diagnostics.inputs import Inputs, read_inputs
from cluster_sft.diagnostics.numbers import finite

if TYPE_CHECKING:
    from cluster_sft.params import Launch
    from cluster_sft.stage_params import DiagnoseParams

METRICS = "metrics.json"


def run(
    params: DiagnoseParams,
    *,
    dataset: Path,
    embeddings: Path,
    clusters: Path,
    subset: Path,
    validity: Path,
    out: Path,
    scratch: Path,
    launch: Launch,
) -> None:
    """Measure what the method assumes, and write numbers, tables and figures.

    Args:
        params: map, examples, terms, seed.
        dataset: leaf of prepare.
        embeddings: leaf of embed.
        clusters: leaf of cluster.
        subset: leaf of select.
        validity: leaf of validate.
        out: empty folder for the payload.
        scratch: not used.
        launch: not used.

    Raises:
        UserError: leaves that do not fit each other.
    """
    meter = costs.start()
    inputs = read_inputs(dataset, embeddings=embeddings, clusters=clusters, subset=subset)
    seed = params.seed
    metrics = _counts(inputs)
    _add(metrics, geometry.measure_geometry(inputs, seed=seed, out=out))
    words = {"terms": params.terms, "examples": params.examples}
    _add(metrics, meaning.measure_meaning(inputs, **words, seed=seed, out=out))
    metrics["map"] = meaning.draw_map(inputs, method=params.map, seed=seed, out=out)
    metrics["validity"] = read_json(validity / METRICS)
    for path in (validity / "figures").glob("*.svg"):
        shutil.copyfile(path, out / "figures" / path.name)
    metrics = finite(metrics)
    write_json(out / METRICS, metrics)
    summary = {name: metrics[name] for name in ("k", "n", "rows")}
    summary["strategy"] = read_json(subset / SUMMARY).get("strategy")
    summary["warnings"] = premises.warnings(metrics)
    for line in summary["warnings"]:
        print(f"diagnose: {line}", file=sys.stderr)
    write_json(out / SUMMARY, summary | {"cost": meter.stop(out)})


def _counts(inputs: Inputs) -> dict[str, Any]:
    """Return sizes, weights and lengths, of everything and of every cluster."""
    k, label_N, tokens_N = inputs.k, inputs.label_N, inputs.tokens_N
    size_K = np.bincount(label_N, minlength=k)
    label_S = label_N[inputs.rows_S]
    rows_K = np.bincount(label_S, minlength=k)
    log_N = np.log(np.maximum(tokens_N, 1))
    r2_K = balance.membership_r2(log_N, label_N, k)
    weight_K = np.bincount(label_S, inputs.weight_S, minlength=k) / np.maximum(rows_K, 1)
    effective = balance.effective_sample_size(inputs.weight_S)
    return {
        "k": k,
        "n": len(label_N),
        "rows": len(label_S),
        "rows_without_embedding": inputs.unknown,
        "clusters": [
            {
                "cluster": c,
                "size": size_K[c],
                "rows": rows_K[c],
                "weight": weight_K[c] if rows_K[c] else None,
                "length_median": _median(tokens_N[label_N == c]),
                "length_median_others": _median(tokens_N[label_N != c]),
                "length_r2": r2_K[c],
            }
            for c in range(k)
        ],
        "weights": {
            "effective_sample_size": effective,
            "effective_share": effective / len(label_S),
            "smallest": inputs.weight_S.min(),
            "largest": inputs.weight_S.max(),
        },
        "length": {
            "eta2": balance.eta_squared(tokens_N, label_N, k),
            "eta2_log": balance.eta_squared(log_N, label_N, k),
            "mean": tokens_N.mean(),
            "mean_selected": tokens_N[inputs.rows_S].mean(),
        },
    }


def _median(values: np.ndarray) -> float | None:
    return float(np.median(values)) if len(values) else None


def _add(metrics: dict[str, Any], more: dict[str, Any]) -> None:
    """Lay `more` over the metrics; what it says of clusters joins what is known of each."""
    known = metrics["clusters"]
    for mine, new in zip(known, more.pop("clusters", known), strict=True):
        mine.update(new)
    metrics.update(more)
