"""Stage select: the rows that are trained on, with their weights, under the budget K m.

Reads clusters and dataset; writes subset.parquet, subset.jsonl (the source's own rows with
`cluster` and `weight` added, for any other trainer) and summary.json.

Legend: N rows of the embedded data, K clusters, S selected rows; n_c rows of cluster c before any
selection, s_c of them selected.
"""

from __future__ import annotations

import json
import math
import sys
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from cluster_sft import strategies
from cluster_sft.artifacts import SUMMARY, read_json, read_table, write_json, write_table
from cluster_sft.batching import cluster_weights
from cluster_sft.errors import UserError
from cluster_sft.strategies import Budget, Pool, Strategy

if TYPE_CHECKING:
    from cluster_sft.params import Launch, SelectParams


def trim(pool: Pool, k: int, share: float) -> list[np.ndarray]:
    """Return the rows of each of the K clusters without the floor(share n_c) farthest of it.

    Rows without a direction count as farthest. Each array is int64 and ascending.
    """
    kept = []
    for cluster in range(k):
        rows = pool.members(cluster)
        n = len(rows) - math.floor(Fraction(str(share)) * len(rows))
        kept.append(np.sort(pool.by_distance(rows, farthest_first=False)[:n]))
    return kept


def budget_of(trimmed: list[np.ndarray], ratio: float) -> Budget:
    """Return the budget: m = r n_min rows of each cluster, rounded half up on exact decimals.

    Raises:
        UserError: m is 0.
    """
    n_min = min(len(rows) for rows in trimmed)
    m = math.floor(Fraction(str(ratio)) * n_min + Fraction(1, 2))
    if m == 0:
        raise UserError(
            f"select.ratio: must keep at least one row of the smallest cluster ({n_min} rows), got "
            f"{ratio}, which rounds to 0; raise the ratio or lower cluster.k"
        )
    return Budget(k=len(trimmed), n_min=n_min, m=m)


def run(
    params: SelectParams,
    *,
    dataset: Path,
    clusters: Path | None = None,
    out: Path,
    scratch: Path,
    launch: Launch,
) -> None:
    """Choose the rows of `params.strategy` and write the subset.

    Args:
        params: strategy, ranking, downsample, ratio, trim, seed.
        dataset: leaf of prepare.
        clusters: leaf of cluster; None for a strategy that ignores clusters.
        out: empty folder for the payload.
        scratch: unused; the stage takes seconds.
        launch: unused.

    Raises:
        UserError: the budget is empty or clusters and dataset do not fit each other.
    """
    strategy = strategies.get(params.strategy)
    table, pool, k = _pool(dataset, clusters)
    trimmed = trim(pool, k, params.trim)
    budget = budget_of(trimmed, params.ratio) if clusters else None
    chosen = strategy.choose(pool, budget, trimmed, params)
    _check(chosen, len(table) if budget is None else budget.rows, len(table), params.strategy)
    sizes = np.bincount(pool.label_N, minlength=k)
    selected = np.bincount(pool.label_N[chosen], minlength=k)
    weights = _weights(strategy, sizes, selected)
    subset = (
        table[chosen]
        .with_columns(
            weight=pl.Series(np.nan_to_num(weights[pool.label_N[chosen]]), dtype=pl.Float64)
        )
        .with_columns(rank=pl.int_range(pl.len(), dtype=pl.Int64).over("cluster"))
        .sort("id")
    )
    write_table(out, "subset.parquet", subset)
    write_rows(out / "subset.jsonl", subset, dataset)
    write_json(out / SUMMARY, _summary(params, sizes, selected, weights, subset, budget))


def _pool(dataset: Path, clusters: Path | None) -> tuple[pl.DataFrame, Pool, int]:
    """Return the table (id, cluster, distance), its arrays, and K."""
    if clusters is None:
        table = read_table(dataset, "dataset.parquet", ["id"]).with_columns(
            cluster=pl.lit(0, pl.Int32), distance=pl.lit(0.0, pl.Float32)
        )
        zero = np.zeros(len(table), bool)
    else:
        table = read_table(clusters, "clusters.parquet")
        summary = read_json(clusters / SUMMARY) if (clusters / SUMMARY).is_file() else {}
        zero = table["id"].is_in(summary.get("zero_rows", [])).to_numpy()
    labels = table["cluster"].to_numpy()
    k = int(labels.max()) + 1 if len(labels) else 0
    if k == 0 or np.bincount(labels, minlength=k).min() == 0:
        raise UserError(f"{clusters or dataset}: every cluster must hold a row, one is empty")
    return table, Pool(labels, table["distance"].to_numpy(), zero), k


def _check(chosen: np.ndarray, wanted: int, n: int, strategy: str) -> None:
    """Hold a strategy to its contract: exactly the budget, distinct rows, all in the pool."""
    fits = len(chosen) == wanted and len(np.unique(chosen)) == wanted
    if not fits or (wanted and not 0 <= chosen.min() <= chosen.max() < n):
        raise UserError(
            f"strategy {strategy!r} must return {wanted} distinct rows below {n}, "
            f"got {len(np.unique(chosen))} distinct of {len(chosen)}; correct its file"
        )


def _weights(strategy: Strategy, sizes: np.ndarray, selected: np.ndarray) -> np.ndarray:
    """Return the preset's weight of each cluster's rows, float64 (K,)."""
    if strategy.weights == "none":
        return np.ones(len(sizes))
    return cluster_weights(sizes, selected)


def write_rows(path: Path, subset: pl.DataFrame, dataset: Path) -> None:
    """Write the selected rows in the source's own shape and order, one JSON object a line."""
    records = read_table(dataset, "dataset.parquet", ["id", "source_row", "record"])
    joined = subset.join(records, on="id", how="left").sort("source_row")
    if joined["record"].null_count():
        raise UserError(f"{dataset}: lacks rows of the clusters; both must come from one run")
    with path.open("w", encoding="utf-8") as file:
        for row in joined.select("record", "cluster", "weight").iter_rows():
            record, added = json.loads(row[0]), {"cluster": row[1], "weight": row[2]}
            clash = {k: f"cluster_sft_{k}" for k in added if k in record}
            line = {**record, **{clash.get(k, k): v for k, v in added.items()}}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _summary(
    params: SelectParams,
    sizes: np.ndarray,
    selected: np.ndarray,
    weights: np.ndarray,
    subset: pl.DataFrame,
    budget: Budget | None,
) -> dict[str, Any]:
    weight_S = subset["weight"].to_numpy()
    n, rows = int(sizes.sum()), len(subset)
    print(f"select {params.strategy}: {rows:,} of {n:,} rows ({rows / n:.1%})", file=sys.stderr)
    return {
        "strategy": params.strategy,
        "n": n,
        "rows": rows,
        "budget": budget.rows if budget else None,
        "rows_per_cluster": budget.m if budget else None,
        "n_min": budget.n_min if budget else None,
        "data_share": rows / n,
        "effective_sample_size": float(weight_S.sum() ** 2 / np.square(weight_S).sum()),
        "clusters": [
            {"cluster": c, "size": int(sizes[c]), "rows": int(selected[c]), "weight": weights[c]}
            for c in range(len(sizes))
        ],
    }
