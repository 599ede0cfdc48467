"""Stage diagnose: do the premises of CluSTER hold for these data, this model and this subset.

Reads dataset, embeddings, clusters and subset, joined by id; clusters are those of the cluster
leaf, also where the strategy ignored them. Writes metrics.json (every number), summary.json (cost
and warnings), terms.csv, examples.csv, map.parquet, permutations.npy and figures/*.svg.

Legend: N embedded rows, H hidden size, K clusters, S selected rows, n rows with true gradients.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cluster_sft import costs, models
from cluster_sft.artifacts import SUMMARY, read_json, write_json
from cluster_sft.diagnostics import (
    balance,
    figures,
    geometry,
    gradients,
    meaning,
    premises,
    validity,
)
from cluster_sft.diagnostics.inputs import Inputs, read_inputs, read_tokens
from cluster_sft.errors import UserError

if TYPE_CHECKING:
    from cluster_sft.params import DiagnoseParams, Launch

METRICS = "metrics.json"


def run(
    params: DiagnoseParams,
    *,
    dataset: Path,
    embeddings: Path,
    clusters: Path,
    subset: Path,
    out: Path,
    scratch: Path,
    launch: Launch,
) -> None:
    """Measure what the method assumes, and write numbers, tables and figures.

    Args:
        params: sample, permutations, gradients, map, examples, terms, seed, model, dtype.
        dataset: leaf of prepare.
        embeddings: leaf of embed.
        clusters: leaf of cluster.
        subset: leaf of select.
        out: empty folder for the payload.
        scratch: not used.
        launch: threads, and tokens of a forward pass.

    Raises:
        UserError: leaves that do not fit each other, no such model, or an unknown setting.
    """
    meter = costs.start()
    inputs = read_inputs(dataset, embeddings=embeddings, clusters=clusters, subset=subset)
    seed = params.seed
    metrics = _counts(inputs)
    _add(metrics, geometry.measure_geometry(inputs, seed=seed, out=out))
    words = {"terms": params.terms, "examples": params.examples}
    _add(metrics, meaning.measure_meaning(inputs, **words, seed=seed, out=out))
    metrics["map"] = meaning.draw_map(inputs, method=params.map, seed=seed, out=out)
    metrics["validity"], cost = measure_validity(inputs, params, out=out, launch=launch)
    metrics = finite(metrics)
    write_json(out / METRICS, metrics)
    summary = {name: metrics[name] for name in ("k", "n", "rows")}
    summary["strategy"] = read_json(subset / SUMMARY).get("strategy")
    summary["warnings"] = premises.warnings(metrics)
    for line in summary["warnings"]:
        print(f"diagnose: {line}", file=sys.stderr)
    write_json(out / SUMMARY, summary | {"cost": meter.stop(out, **cost)})


def finite(value: Any) -> Any:
    """Return a value fit for JSON: numbers that are not finite become None, NumPy's become ours."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [finite(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


def measure_validity(
    inputs: Inputs, params: DiagnoseParams, *, out: Path, launch: Launch
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the test on true gradients and what it costs; draw it."""
    rows = validity.sample_rows(inputs.label_N, inputs.k, size=params.sample, seed=params.seed)
    gram, tokens = _true_gradients(inputs, rows, params, launch)
    true = validity.cosines(gram.products)
    known = np.diag(gram.products) > 0
    true, label = true[np.ix_(known, known)], inputs.label_N[rows][known]
    x = inputs.x[rows[known]].astype(np.float64)
    proxy = validity.cosines(x @ x.T)
    test, own = (
        validity.permutation_test(c, label, permutations=params.permutations, seed=params.seed)
        for c in (true, np.nan_to_num(proxy))
    )
    cost = {"forward_passes": len(rows), "backward_passes": gram.backward, "tokens": tokens}
    within = validity.mean_cosines(true, label, inputs.k)
    if test is not None:
        np.save(out / "permutations.npy", test.permuted)
        figures.write(out, "validity", figures.draw_validity(test, within))
    return {
        "gradients": params.gradients,
        "exact": gram.exact,
        "rows": len(label),
        "rows_without_gradient": len(rows) - len(label),
        "permutations": params.permutations,
        "statistic": test and test.statistic,
        "intra": test and test.intra,
        "inter": test and test.inter,
        "p_value": test and test.p_value,
        "proxy_statistic": own and own.statistic,
        "proxy_correlation": validity.agreement(true, np.nan_to_num(proxy)),
        "mean_cosines": within,
    }, cost


def _true_gradients(
    inputs: Inputs, rows: np.ndarray, params: DiagnoseParams, launch: Launch
) -> tuple[gradients.Gram, int]:
    """Return the rows' Gram matrix and their tokens."""
    if params.gradients not in ("head", "all"):
        raise UserError(f"diagnose.gradients must be head or all, got {params.gradients!r}")
    store = read_tokens(inputs, rows)
    device = models.pick_device("auto")
    threads = torch.get_num_threads()
    torch.set_num_threads(launch.threads or threads)
    try:
        model = models.load_model(params.model, dtype=params.dtype, device=device)
        head = params.gradients == "head"
        gram = gradients.gram(model, store, head=head, batch_tokens=launch.batch_tokens)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"diagnose: {device} is out of memory; lower diagnose.sample, which is "
            f"{params.sample}, or launch.batch_tokens"
        ) from error
    finally:
        torch.set_num_threads(threads)
    return gram, int(store.lengths.sum())
