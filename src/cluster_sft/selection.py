"""Stage select: the rows that are trained on, with their weights, under the budget K m.

Reads clusters, dataset and, for a strategy that is scored, scores; writes subset.parquet,
subset.jsonl (the source's own rows with `cluster` and `weight` added, for any other trainer) and
summary.json.

Legend: N rows of the embedded data, K clusters, S selected rows; n_c rows of cluster c before any
selection, s_c of them selected.
"""

from __future__ import annotations

import json
import math
import mmap
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from cluster_sft import costs, strategies
from cluster_sft.artifacts import SUMMARY, read_json, read_table, write_json, write_table
from cluster_sft.batching import cluster_weights
from cluster_sft.errors import UserError
from cluster_sft.pools import CLUSTERS, read_pool, with_scores
from cluster_sft.strategies import Budget, Pool, Strategy

if TYPE_CHECKING:
    from cluster_sft.params import Launch
    from cluster_sft.stage_params import SelectParams

BLOCK_ROWS = 16384  # of the data, read at a time


def trim(pool: Pool, k: int, share: float) -> list[np.ndarray]:
    """Return the rows of each of the K clusters without the floor(share n_c) farthest of it.

    Rows without a direction count as farthest. Each array is int64 and ascending.
    """
    kept = []
    for cluster in range(k):
        rows = pool.members(cluster)
        n = len(rows) - math.floor(Fraction(str(share)) * len(rows))
        if n < len(rows):
            rows = np.sort(pool.by_distance(rows, farthest_first=False)[:n])
        kept.append(rows)
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
    scores: Path | None = None,
    out: Path,
    scratch: Path,
    launch: Launch,
) -> None:
    """Choose the rows of `params.strategy` and write the subset.

    Args:
        params: strategy, ranking, downsample, ratio, trim, seed.
        dataset: leaf of prepare.
        clusters: leaf of cluster; None for a strategy that ignores clusters.
        scores: leaf of score for the strategy; unused, and may be None, where it is not scored.
        out: empty folder for the payload.
        scratch: folder for the rows' text before it is put in order.
        launch: unused.

    Raises:
        UserError: the budget is empty or exceeds the scored rows, or clusters and dataset do not
            fit each other.
    """
    meter = costs.start()
    subset = select(params, dataset=dataset, clusters=clusters, scores=scores, out=out)
    write_rows(out / "subset.jsonl", subset, dataset, scratch=scratch)
    summary = read_json(out / SUMMARY)
    write_json(out / SUMMARY, {**summary, "cost": meter.stop(out)})
    rows, n = len(subset), summary["n"]
    print(f"select {params.strategy}: {rows:,} of {n:,} rows ({rows / n:.1%})", file=sys.stderr)


def select(
    params: SelectParams,
    *,
    dataset: Path,
    clusters: Path | None,
    scores: Path | None = None,
    out: Path,
) -> pl.DataFrame:
    """Choose the rows, write subset.parquet and summary.json, and return the subset.

    Reads no more of the data than its ids, and these only where there are no clusters; scores only
    for a strategy that is scored.
    """
    strategy = strategies.get(params.strategy)
    leaf, name = (dataset, "dataset.parquet") if clusters is None else (clusters, CLUSTERS)
    pool, k = read_pool(leaf, name)
    trimmed = trim(pool, k, params.trim)
    budget = budget_of(trimmed, params.ratio) if clusters else None
    if strategy.scored:
        pool = with_scores(pool, leaf, name, scores)
        _check_scored(pool, budget, params.strategy)
    chosen = strategy.choose(pool, budget, trimmed, params)
    n_rows = len(pool.label_N)
    _check(chosen, n_rows if budget is None else budget.rows, n_rows, params.strategy)
    sizes = np.bincount(pool.label_N, minlength=k)
    selected = np.bincount(pool.label_N[chosen], minlength=k)
    weights = _weights(strategy, sizes, selected)
    subset = _subset(read_table(leaf, name, ["id"])["id"], pool, chosen, weights)
    write_table(out, "subset.parquet", subset)
    summary = _summary(params, sizes, selected, weights, subset, budget)
    summary["displaced_share"] = _displaced_share(subset, clusters)
    if strategy.scored:
        summary |= {"scored": len(pool.scored()), **strategy.describe(pool, chosen)}
    write_json(out / SUMMARY, summary)
    return subset


def _subset(ids: pl.Series, pool: Pool, chosen: np.ndarray, weights: np.ndarray) -> pl.DataFrame:
    """Return the chosen rows as a table sorted by id."""
    order = np.argsort(chosen)
    rows = chosen[order]
    label_S = pool.label_N[chosen]
    # A cluster's rows stand in the order of choice, between those of other clusters or not.
    by_cluster = np.argsort(label_S, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(label_S, minlength=len(weights)))[:-1]])
    rank_S = np.empty(len(chosen), np.int64)
    rank_S[by_cluster] = np.arange(len(chosen)) - starts[label_S[by_cluster]]
    mask = np.zeros(len(ids), bool)
    mask[rows] = True
    label_S = label_S[order]
    subset = pl.DataFrame(
        {
            "id": ids.filter(pl.Series(mask)),
            "cluster": label_S,
            "distance": pool.distance_N[rows],
            "weight": weights[label_S],
            "rank": rank_S[order],
        },
        schema_overrides={"weight": pl.Float64},
    )
    return subset if subset["id"].is_sorted() else subset.sort("id")


def _check_scored(pool: Pool, budget: Budget | None, strategy: str) -> None:
    """Check that enough rows have a score."""
    n = len(pool.scored())
    if budget is not None and n < budget.rows:
        raise UserError(
            f"strategy {strategy!r} needs scores of at least {budget.rows} rows, its budget, got "
            f"{n}; lower select.ratio, or see the reasons in scores.parquet"
        )


def _check(chosen: np.ndarray, wanted: int, n: int, strategy: str) -> None:
    """Hold a strategy to its contract: exactly the budget, distinct rows, all in the pool."""
    fits = len(chosen) == wanted and (not wanted or 0 <= chosen.min() <= chosen.max() < n)
    if not fits or np.bincount(chosen, minlength=1).max() > 1:
        raise UserError(
            f"strategy {strategy!r} must return {wanted} distinct rows below {n}, "
            f"got {len(np.unique(chosen))} distinct of {len(chosen)}; correct its file"
        )


def _weights(strategy: Strategy, sizes: np.ndarray, selected: np.ndarray) -> np.ndarray:
    """Return the preset's weight of each cluster's rows, float64 (K,)."""
    if strategy.weights == "none":
        return np.ones(len(sizes))
    return cluster_weights(sizes, selected)


def _displaced_share(subset: pl.DataFrame, clusters: Path | None) -> float | None:
    """Return the share of the selected rows that the capacity kept out of their nearest cluster.

    They lie far from their own centroid, so a peripheral ranking favours them.
    """
    if clusters is None or not (clusters / "displaced.parquet").is_file():
        return None
    displaced = read_table(clusters, "displaced.parquet")
    return subset.join(displaced, on="id", how="semi").height / max(subset.height, 1)


def write_rows(path: Path, subset: pl.DataFrame, dataset: Path, *, scratch: Path) -> None:
    """Write the selected rows in the source's own shape and order, one JSON object a line.

    The data come sorted by id, the lines go out in the source's order. They pass through a file in
    `scratch`, so that memory holds three integers a row and never the text of all rows.

    Raises:
        UserError: the data are damaged or lack a row of the subset.
    """
    source_rows: list[np.ndarray] = []
    lengths: list[int] = []
    lines = scratch / "lines.jsonl"
    with lines.open("wb") as file:
        for block in _selected(subset, dataset / "dataset.parquet"):
            source_rows.append(block["source_row"].to_numpy())
            for record, cluster, weight in block.select("record", "cluster", "weight").iter_rows():
                line = _line(record, cluster, weight).encode()
                lengths.append(len(line))
                file.write(line)
    if len(lengths) < len(subset):
        raise UserError(f"{dataset}: lacks rows of the clusters; both must come from one run")
    order = np.argsort(np.concatenate(source_rows), kind="stable")
    ends = np.cumsum(lengths)
    with lines.open("rb") as file, path.open("wb") as target:
        text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        for start, end in zip((ends - lengths)[order].tolist(), ends[order].tolist(), strict=True):
            target.write(text[start:end])
        text.close()
    lines.unlink()


def _selected(subset: pl.DataFrame, dataset: Path) -> Iterator[pl.DataFrame]:
    """Yield the data's rows that are in the subset, a block at a time."""
    columns = ["id", "source_row", "record"]
    read_table(dataset.parent, dataset.name, columns[:2])  # checks the file
    try:
        for batch in pq.ParquetFile(dataset).iter_batches(BLOCK_ROWS, columns=columns):
            block = pl.DataFrame(pl.from_arrow(batch))
            # Both are sorted by id, so that a block meets a short piece of the subset.
            low = subset["id"].search_sorted(str(block["id"].min()), side="left")
            high = subset["id"].search_sorted(str(block["id"].max()), side="right")
            yield block.join(subset[low:high], on="id", how="inner", maintain_order="left")
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{dataset}: damaged ({str(error).splitlines()[0][:120]}); delete the leaf and run it "
            "again"
        ) from error


def _line(record: str, cluster: int, weight: float) -> str:
    """Return a source row's JSON text with cluster and weight added under names not yet taken."""
    added = {"cluster": cluster, "weight": weight}
    if any(f'"{name}"' in record for name in added):
        taken = json.loads(record)
        added = {f"cluster_sft_{k}" if k in taken else k: v for k, v in added.items()}
    # Spliced, not parsed and printed again, which would take six times as long.
    head, tail = record.rstrip().removesuffix("}"), json.dumps(added)[1:]
    return f"{head}, {tail}\n" if head.strip() != "{" else f"{head}{tail}\n"


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
