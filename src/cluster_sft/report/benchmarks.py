"""Scores benchmark by benchmark, and the average of those that are shares.

A benchmark is one metric of one suite, as HumanEval+ is the plus score of suite `humaneval`. The
held-out loss is one too, but is in no average: it is not a share, and lower is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import polars as pl

from cluster_sft.report.pairing import ITEMS
from cluster_sft.report.points import (
    CONFIGURATION,
    METRICS,
    Estimate,
    Group,
    Metric,
    configurations,
    setting,
)
from cluster_sft.report.results import Results, estimate

TITLES = {
    "humaneval": "HumanEval",
    "mbpp": "MBPP",
    "medmcqa": "MedMCQA",
    "medqa": "MedQA",
    "pubmedqa": "PubMedQA",
    "mmlu-medical": "MMLU medical",
}
AVERAGE = Metric("average", "average_stderr", "average_n", "Average", "%", scale=100.0)
Row = dict[str, float | int | None]


def by_benchmark(results: Results) -> Results:
    """Return the results with an estimate a benchmark, and of `AVERAGE`, in every group.

    The average of a group is over all benchmarks that any group of its configuration has; a point
    that lacks one has none.
    """
    rows: list[Row] = [{} for _ in results.points]
    items = dict(results.items)
    averages: dict[int, pl.DataFrame] = {}
    for name in configurations(results.points):
        own = {i for i, p in enumerate(results.points) if setting(p, CONFIGURATION) == name}
        columns = _columns(results, own)
        for point in own:
            rows[point] = _scores(results, point, columns)
            average = _average(rows[point], [c for c in columns if c.is_share])
            rows[point] |= average
            frame = _average_items(results, point, columns) if average else None
            if frame is not None:
                averages[point] = frame
    every = [*benchmarks(results), AVERAGE]
    groups = tuple(_with_estimates(group, every, rows) for group in results.groups)
    return replace(results, groups=groups, items=items | {AVERAGE.name: averages})


def benchmarks(results: Results) -> list[Metric]:
    """Return the benchmarks that any group has: held-out losses first, then suites in order."""
    return _columns(results, set(range(len(results.points))))


def shown(results: Results) -> list[Metric]:
    """Return the benchmarks of results `by_benchmark`, and the average where it is of several."""
    found = [m for m in benchmarks(results) if any(m.name in g.estimates for g in results.groups)]
    shares = sum(m.is_share for m in found)
    return [*found, AVERAGE] if shares > 1 else found


def of_configuration(results: Results, name: object) -> Results:
    """Return the results with the groups of one configuration alone."""
    groups = tuple(g for g in results.groups if setting(g, CONFIGURATION) == name)
    own = {p for g in groups for p in g.points}
    return replace(results, groups=groups, scores=results.scores.filter(pl.col("point").is_in(own)))


def _columns(results: Results, own: set[int]) -> list[Metric]:
    known = {metric.name: metric for metric in METRICS}
    pairs = results.scores.filter(pl.col("point").is_in(own)).select("suite", "metric")
    found = [
        _benchmark(suite, known[name])
        for suite, name in pairs.unique(maintain_order=True).iter_rows()
        if name in known
    ]
    return sorted(found, key=lambda metric: metric.is_share)


def _benchmark(suite: str, metric: Metric) -> Metric:
    title = TITLES.get(suite, suite)
    if not metric.is_share:
        title = metric.title if suite == "heldout" else f"{metric.title} ({suite})"
    elif metric.name == "evalplus_plus_pass1":
        title += "+"
    name = f"{suite}/{metric.name}"
    return replace(metric, name=name, stderr=f"{name}_stderr", n=f"{name}_n", title=title)


def _scores(results: Results, point: int, columns: Sequence[Metric]) -> Row:
    row: Row = {}
    for found in results.scores.filter(pl.col("point") == point).iter_rows(named=True):
        for column in columns:
            if column.name == f"{found['suite']}/{found['metric']}":
                row |= {column.name: found["value"], column.stderr: found["stderr"]}
                row |= {column.n: found["n"]}
    return row


def _average(row: Row, columns: Sequence[Metric]) -> Row:
    """Return the unweighted mean of the benchmarks, its standard error and its items.

    Suites are independent of one another. Benchmarks of one suite (base and plus) grade the same
    answers, so their errors are added as if fully correlated, which is the largest they can be.
    """
    values = [row.get(c.name) for c in columns]
    if not columns or None in values:
        return {}
    per_suite: dict[str, float] = {}
    items: dict[str, int] = {}
    for column in columns:
        suite = column.name.split("/")[0]
        error, n = row.get(column.stderr), row.get(column.n)
        per_suite[suite] = per_suite.get(suite, 0.0) + (math.nan if error is None else error)
        items[suite] = int(n or 0)
    error = math.hypot(*per_suite.values()) / len(columns)
    return {
        AVERAGE.name: sum(v for v in values if v is not None) / len(columns),
        AVERAGE.stderr: None if math.isnan(error) else error,
        AVERAGE.n: sum(items.values()),
    }


def _average_items(results: Results, point: int, columns: Sequence[Metric]) -> pl.DataFrame | None:
    """Return what each item adds to the average, with weights that add up to 1.

    An item of a suite of n items counts once for each of the suite's benchmarks, 1 / (n J) each
    where J benchmarks are averaged. None where a benchmark's items are not known.
    """
    shares = [c for c in columns if c.is_share]
    parts = []
    for column in shares:
        items = results.items.get(column.name, {}).get(point)
        if items is None:
            return None
        scale = 1.0 / (float(items["weight"].sum()) * len(shares))
        suite = column.name.split("/")[0]
        parts.append(
            items.select(
                pl.format("{}/{}", pl.lit(suite), "id").alias("id"),
                (pl.col("weight") * scale).alias("weight"),
                (pl.col("total") * scale).alias("total"),
            )
        )
    stacked = pl.concat([pl.DataFrame(schema=ITEMS), *parts])
    return stacked.group_by("id", maintain_order=True).sum()


def _with_estimates(group: Group, columns: Sequence[Metric], rows: Sequence[Row]) -> Group:
    found: Mapping[str, Estimate] = {
        c.name: e for c in columns if (e := estimate(c, [rows[p] for p in group.points]))
    }
    return replace(group, estimates=found)
