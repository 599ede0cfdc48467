"""What each evaluated item gave each point, so that models are compared item by item.

Every point answers the same items; what an item's difficulty adds to two scores cancels in their
difference. Legend: item i has weight t_i and total x_i, and a score is sum x_i / sum t_i.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from scipy.special import stdtrit

from cluster_sft.report.points import (
    CONFIGURATION,
    METRICS,
    Group,
    Metric,
    Point,
    configurations,
    setting,
)

SAMPLES = "samples.jsonl"
Z = 1.959963984540054  # two-sided 95 % of a normal distribution
ITEMS = {"id": pl.String, "weight": pl.Float64, "total": pl.Float64}
Items = Mapping[str, Mapping[int, pl.DataFrame]]  # metric or suite/metric -> point -> items


def _heldout(row: Mapping[str, Any]) -> tuple[str, float, float]:
    return row["id"], row["n_tokens"], row["nll"] * row["n_tokens"]


def _base(row: Mapping[str, Any]) -> tuple[str, float, float]:
    return row["task_id"], 1.0, float(row["base"] == "pass")


def _plus(row: Mapping[str, Any]) -> tuple[str, float, float]:
    return row["task_id"], 1.0, float(row["plus"] == "pass")


def _question(row: Mapping[str, Any]) -> tuple[str, float, float]:
    value = row["acc"] if "acc" in row else row["exact_match"]
    return f"{row['task']}/{row['doc_id']}", 1.0, float(value)


READERS: dict[str, Callable[[Mapping[str, Any]], tuple[str, float, float]]] = {
    "heldout_nll": _heldout,
    "evalplus_base_pass1": _base,
    "evalplus_plus_pass1": _plus,
    "lm_eval_acc": _question,
}


def read_items(points: Sequence[Point], scores: pl.DataFrame) -> Items:
    """Read the items of each metric of each suite, and of a metric that a single suite gave.

    Items whose score is not the reported one (several tasks of unequal size, several answers to a
    question) are left out: they cannot stand for it.
    """
    found: dict[str, dict[int, pl.DataFrame]] = {}
    for name in configurations(points):
        own = [i for i, p in enumerate(points) if setting(p, CONFIGURATION) == name]
        for metric in METRICS:
            mine = (pl.col("metric") == metric.name) & pl.col("point").is_in(own)
            reported = scores.filter(mine).select("point", "suite", "value")
            single = reported["suite"].n_unique() == 1
            for position, suite, value in reported.iter_rows():
                path = points[position].evaluate[suite] / SAMPLES
                items = _read(path, READERS[metric.name]) if path.is_file() else None
                if items is None or not math.isclose(
                    _score(items), value, rel_tol=1e-6, abs_tol=1e-9
                ):
                    continue
                for key in [f"{suite}/{metric.name}", *([metric.name] if single else [])]:
                    found.setdefault(key, {})[position] = items
    return found


def _read(
    path: Path, reader: Callable[[Mapping[str, Any]], tuple[str, float, float]]
) -> pl.DataFrame | None:
    """Read a samples file; None if it lacks what the reader wants or repeats an item."""
    try:
        rows = [reader(row) for row in _lines(path)]
    except (KeyError, TypeError, ValueError):
        return None
    frame = pl.DataFrame(rows, schema=ITEMS, orient="row")
    return frame if len(frame) and frame["id"].is_unique().all() else None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _score(items: pl.DataFrame) -> float:
    return float(items["total"].sum()) / float(items["weight"].sum())


def margin(error: float, metric: Metric, sides: Sequence[Group]) -> float:
    """Return the half-width of the 95 % interval of a difference with this standard error.

    The part sd^2 / n that n seeds of a side add rests on n - 1 degrees of freedom, what the items
    add on so many that it counts as known. Student's t then has
    error^4 / sum((sd^2 / n)^2 / (n - 1)) degrees of freedom (Welch, 1947; Satterthwaite, 1946):
    two seeds that disagree say little about a third.
    """
    doubt = 0.0
    for side in sides:
        n = len(side.points)
        if sd := side.estimates[metric.name].sd:
            doubt += (sd**2 / n) ** 2 / (n - 1)
    return error * (float(stdtrit(error**4 / doubt, 0.975)) if doubt else Z)


def paired_error(items: Items, metric: Metric, group: Group, other: Group) -> float | None:
    """Return the standard error of the difference of two scores on the same items, else None.

    With d_i the difference of an item's totals and D that of the scores, the residuals
    d_i - D t_i give the variance n / (n - 1) * sum (d_i - D t_i)^2 / (sum t_i)^2. For shares of
    equal items it is the one of Agresti and Min (2005), which stays positive where no item differs:
    (sum d_i^2 + 1 - (sum d_i)^2 / (n + 2)) / (n + 2)^2. Seeds add sd^2 / seeds of each side.
    """
    of_point = items.get(metric.name, {})
    mine, theirs = _over_seeds(of_point, group), _over_seeds(of_point, other)
    if mine is None or theirs is None:
        return None
    both = mine.join(theirs, on="id", how="inner", suffix="_other")
    n = len(both)
    if n != len(mine) or n != len(theirs) or n < 2:
        return None
    gap = (both["total"] - both["total_other"]).to_numpy()
    if metric.is_share and (both["weight"] == 1).all():
        variance = (np.square(gap).sum() + 1 - gap.sum() ** 2 / (n + 2)) / (n + 2) ** 2
    else:
        weight = both["weight"].to_numpy()
        residual = gap - gap.sum() / weight.sum() * weight
        variance = n / (n - 1) * np.square(residual).sum() / weight.sum() ** 2
    for side in (group, other):
        variance += (side.estimates[metric.name].sd or 0.0) ** 2 / len(side.points)
    return math.sqrt(float(variance))


def _over_seeds(of_point: Mapping[int, pl.DataFrame], group: Group) -> pl.DataFrame | None:
    """Return each item's weight and mean total over the seeds; None where seeds differ in items."""
    if any(point not in of_point for point in group.points):
        return None
    means = (
        pl.concat(of_point[point] for point in group.points)
        .group_by("id", maintain_order=True)
        .agg(pl.col("weight").first(), pl.col("total").mean(), pl.len().alias("seeds"))
    )
    return None if (means["seeds"] != len(group.points)).any() else means.drop("seeds")
