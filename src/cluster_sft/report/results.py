"""The leaves of every point, read into tables and groups."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from cluster_sft.artifacts import SUMMARY, read_json, read_table
from cluster_sft.errors import UserError
from cluster_sft.report.pairing import Items, read_items
from cluster_sft.report.points import (
    CONFIGURATION,
    CONTRACT,
    COSTS,
    METRICS,
    Estimate,
    Group,
    Metric,
    Point,
    Value,
    setting,
)


@dataclass(frozen=True)
class Results:
    """Everything read from the leaves; the tables are in the points' order."""

    points: tuple[Point, ...]
    summary: pl.DataFrame  # summary.csv: one row a point
    scores: pl.DataFrame  # long: point, suite, kind, metric, value, stderr, n
    skipped: pl.DataFrame  # long: point, suite, reason
    loss: pl.DataFrame  # long: point, step, and what the training log holds
    groups: tuple[Group, ...]
    items: Items  # what each evaluated item gave each point


SCORES = {
    "point": pl.Int64,
    "suite": pl.String,
    "kind": pl.String,
    "metric": pl.String,
    "value": pl.Float64,
    "stderr": pl.Float64,
    "n": pl.Int64,
}
SKIPPED = {"point": pl.Int64, "suite": pl.String, "reason": pl.String}
LOSS = {
    "point": pl.Int64,
    "step": pl.Int64,
    "epoch": pl.Float64,
    "loss": pl.Float64,
    "grad_norm": pl.Float64,
    "lr": pl.Float64,
    "tokens": pl.Int64,
    "worker_cosine": pl.Float64,  # in the steps where it was measured
}


def collect(points: Sequence[Point]) -> Results:
    """Read the leaves of all points.

    Raises:
        UserError: there is no point, or a leaf lacks a file or a key that its stage writes.
    """
    if not points:
        raise UserError("report: there must be at least one point, got none")
    scores, skipped = _read_scores(points)
    summary = _summarize(points, scores)
    return Results(
        points=tuple(points),
        summary=summary,
        scores=scores,
        skipped=skipped,
        loss=_read_losses(points),
        groups=_group(points, summary),
        items=read_items(points, scores),
    )


def _read_scores(points: Sequence[Point]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Read every scores.json into a long table of metrics and one of suites that were not run."""
    scores: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for position, point in enumerate(points):
        for suite, leaf in point.evaluate.items():
            found = read_json(leaf / "scores.json")
            if found["status"] != "run":
                skipped.append({"point": position, "suite": suite, "reason": found["reason"]})
                continue
            scores += [
                {"point": position, "suite": suite, "kind": found["kind"], "metric": m["name"]}
                | {key: m.get(key) for key in ("value", "stderr", "n")}
                for m in found["metrics"]
            ]
    return pl.DataFrame(scores, schema=SCORES), pl.DataFrame(skipped, schema=SKIPPED)


def _read_losses(points: Sequence[Point]) -> pl.DataFrame:
    """Stack the training logs of all points; columns that a log lacks are null."""
    logs = [pl.DataFrame(schema=LOSS)]
    for position, point in enumerate(points):
        if point.train is None:
            continue
        path = point.train / "train_log.jsonl"
        try:
            log = pl.read_ndjson(path, infer_schema_length=None)
        except (OSError, pl.exceptions.PolarsError) as error:
            raise UserError(f"{path}: missing or damaged ({error}); run train again") from error
        columns = [
            (pl.col(name) if name in log.columns else pl.lit(None)).cast(dtype).alias(name)
            for name, dtype in LOSS.items()
            if name != "point"
        ]
        logs.append(log.select(pl.lit(position, pl.Int64).alias("point"), *columns))
    return pl.concat(logs)


def _summarize(points: Sequence[Point], scores: pl.DataFrame) -> pl.DataFrame:
    """Build summary.csv: the contract's columns, then swept axes, errors and single suites."""
    rows: list[dict[str, Any]] = []
    for position, point in enumerate(points):
        own = [i for i, p in enumerate(points) if _configuration(p) == _configuration(point)]
        peers = scores.filter(pl.col("point").is_in(own))
        mine = scores.filter(pl.col("point") == position)
        rows.append(
            {"strategy": point.strategy, "ratio": point.ratio, "seed": point.seed}
            | _read_costs(point)
            | dict(point.axes)
            | _suite_means(mine, peers)
            | _single_suites(mine, scores)
        )
    extra = dict.fromkeys(key for row in rows for key in row if key not in CONTRACT)
    integers = {"seed", "rows", "train_tokens", "heldout_n", "evalplus_n", "lm_eval_n"}
    return pl.DataFrame(
        [
            _column(name, [row.get(name) for row in rows], integer=name in integers)
            for name in (*CONTRACT, *extra)
        ]
    )


def _configuration(point: Point) -> Value | None:
    return setting(point, CONFIGURATION)


def _column(name: str, values: list[Any], *, integer: bool) -> pl.Series:
    """Type a column: text if it holds any text or flag, else integers or floats."""
    if any(isinstance(v, str | bool) for v in values):
        words = [
            None if v is None else str(v).lower() if v in (True, False) else str(v) for v in values
        ]
        return pl.Series(name, words, dtype=pl.String)
    integer = integer or (
        any(v is not None for v in values) and all(type(v) in (int, type(None)) for v in values)
    )
    return pl.Series(name, values, dtype=pl.Int64 if integer else pl.Float64, strict=False)


def _read_costs(point: Point) -> dict[str, float | int | None]:
    """Return rows, share of data, training tokens and seconds; all None without training."""
    costs: dict[str, float | int | None] = dict.fromkeys(COSTS)
    if point.select is not None:
        summary = read_json(point.select / SUMMARY)
        costs |= {key: summary[key] for key in ("rows", "data_share")}
    if point.train is not None:
        summary = read_json(point.train / SUMMARY)
        costs |= {key: summary[key] for key in ("train_tokens", "train_seconds")}
    return costs


def _suite_means(mine: pl.DataFrame, peers: pl.DataFrame) -> dict[str, Any]:
    """Return each metric's unweighted mean over its suites, its standard error and its items.

    Suites that ran for no peer are left out; a point that lacks one of the others has no mean,
    because means over different suites do not compare. Suites are independent: the error of the
    mean of J suites is sqrt(sum of squared errors) / J.
    """
    cells: dict[str, Any] = {}
    for metric in METRICS:
        suites = peers.filter(pl.col("metric") == metric.name)["suite"].n_unique()
        found = mine.filter(pl.col("metric") == metric.name)
        if not suites or len(found) < suites:
            continue
        cells[metric.name] = found["value"].mean()
        if not found["stderr"].null_count():
            cells[metric.stderr] = math.sqrt((found["stderr"] ** 2).sum()) / suites
        if not found["n"].null_count():
            cells[metric.n] = found["n"].sum()
    return cells


def _single_suites(mine: pl.DataFrame, scores: pl.DataFrame) -> dict[str, Any]:
    """Return `<suite>_<metric>` columns for metrics that several suites, or none of ours, hold."""
    known = {metric.name for metric in METRICS}
    several = {
        name
        for (name,), part in scores.group_by("metric")
        if name not in known or part["suite"].n_unique() > 1
    }
    cells: dict[str, Any] = {}
    for row in mine.iter_rows(named=True):
        if row["metric"] in several:
            stem = f"{row['suite']}_{row['metric']}"
            cells |= {stem: row["value"], f"{stem}_stderr": row["stderr"], f"{stem}_n": row["n"]}
    return cells


def _group(points: Sequence[Point], summary: pl.DataFrame) -> tuple[Group, ...]:
    """Gather points that differ in nothing but seeds, in order of first appearance."""
    members: dict[tuple[Any, ...], list[int]] = {}
    for position, point in enumerate(points):
        axes = tuple((k, v) for k, v in point.axes.items() if not k.endswith(".seed"))
        members.setdefault((point.strategy, point.ratio, axes), []).append(position)
    rows = summary.to_dicts()
    return tuple(
        Group(
            strategy=strategy,
            ratio=ratio,
            axes=dict(axes),
            points=tuple(positions),
            costs={name: _mean([rows[p][name] for p in positions]) for name in COSTS},
            estimates={
                m.name: found
                for m in METRICS
                if (found := estimate(m, [rows[p] for p in positions])) is not None
            },
        )
        for (strategy, ratio, axes), positions in members.items()
    )


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def estimate(metric: Metric, rows: Sequence[Mapping[str, Any]]) -> Estimate | None:
    """Average a metric over seeds: a row of the summary each. None where none has it.

    All seeds answer the same items, so item error does not shrink with the number of seeds:
    variance of the mean = mean squared item error + sd^2 / seeds.
    """
    rows = [row for row in rows if row.get(metric.name) is not None]
    if not rows:
        return None
    values = [row[metric.name] for row in rows]
    errors = [e for row in rows if (e := row.get(metric.stderr)) is not None]
    sd = statistics.stdev(values) if len(values) > 1 else None
    stderr = None
    if len(errors) == len(rows):
        stderr = math.sqrt(statistics.fmean(e * e for e in errors) + (sd or 0.0) ** 2 / len(rows))
    return Estimate(statistics.fmean(values), stderr, rows[0].get(metric.n), sd)


def selected_sizes(point: Point, k: int) -> list[int]:
    """Count the selected rows of each of the k clusters; empty without a selection."""
    if point.select is None:
        return []
    counts = read_table(point.select, "subset.parquet", ["cluster"])["cluster"].value_counts()
    found = dict(counts.iter_rows())
    return [found.get(c, 0) for c in range(k)]
