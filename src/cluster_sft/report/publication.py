"""The tables of a study as publications print them: rows strategy x ratio, columns benchmarks."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from cluster_sft.report.benchmarks import benchmarks, by_benchmark, of_configuration, shown
from cluster_sft.report.comparison import (
    ONE_DRAW,
    Difference,
    best,
    differences,
    drawn_once,
)
from cluster_sft.report.labels import axis_name, show, show_duration
from cluster_sft.report.points import (
    CONFIGURATION,
    Estimate,
    Group,
    Metric,
    configurations,
    setting,
    varying,
)
from cluster_sft.report.results import Results
from cluster_sft.report.tables import NONE, SIGNS, Cell, Table, head, identity

CONTROL = "random"
MINUS = "\u2212"


@dataclass(frozen=True)
class Block:
    """One table, with what it shows: of one configuration where a study has several."""

    title: str
    table: Table
    note: str = ""


def score_blocks(results: Results) -> list[Block]:
    """Return a table a configuration: its benchmarks, their average and the training time.

    Cells are means over seeds with their standard deviation where there are several seeds.
    """
    detailed = by_benchmark(results)
    found = []
    for name in configurations(results.groups):
        part = of_configuration(detailed, name)
        title = "Scores" if name is None else f"Scores, {name}"
        found.append(Block(title, _scores(part), _score_note(part)))
    return found


def _scores(results: Results) -> Table:
    names, metrics = varying(results.groups), shown(results)
    winners = {metric.name: best(results, metric) for metric in metrics}
    several = any(len(g.points) > 1 for g in results.groups)
    rows = []
    for i, group in enumerate(results.groups):
        share = group.costs["data_share"]
        cells = [Cell(str(len(group.points)))] if several else []
        cells.append(Cell(NONE if share is None else f"{share:.1%}"))
        cells += [
            Cell(_mean(m, group.estimates.get(m.name)), best=i in winners[m.name]) for m in metrics
        ]
        cells.append(Cell(show_duration(group.costs["train_seconds"])))
        rows.append((*identity(group, names), *cells))
    heads = ["strategy", *(axis_name(n) for n in names), *(["seeds"] if several else []), "data"]
    heads += [*(head(m) for m in metrics), "training time"]
    return Table(tuple(heads), tuple(rows))


def _mean(metric: Metric, estimate: Estimate | None) -> str:
    if estimate is None:
        return NONE
    text = show(metric, estimate.value)
    return text if estimate.sd is None else f"{text} \u00b1 {show(metric, estimate.sd)}"


def _score_note(results: Results) -> str:
    metrics = benchmarks(results)
    shares = [m.title for m in metrics if m.is_share]
    counts = [g for g in results.groups if g.strategy != "base"]
    seeds = sorted({len(g.points) for g in counts})
    several = bool(seeds) and seeds[-1] > 1
    text = "Mean \u00b1 standard deviation over seeds. " if several else "One seed. "
    text += "Bold: better than every other row of the same budget by more than the 95 % margin."
    if len(shares) > 1:
        text += f" Average: of {', '.join(shares)}; the held-out NLL is no part of it."
    return text


def loss_blocks(results: Results) -> list[Block]:
    """Return a table a held-out loss: each group's difference to `random`, with its interval."""
    detailed = by_benchmark(results)
    found = []
    for name in configurations(results.groups):
        part = of_configuration(detailed, name)
        for metric in benchmarks(part):
            rows = [] if metric.is_share else differences(part, CONTROL, metrics=[metric])
            if rows:
                title = f"{metric.title} minus {CONTROL}"
                title += "" if name is None else f", {name}"
                table = _losses(part, metric, rows)
                note = _loss_note(rows, metric, one_draw=drawn_once(part))
                if any(cell.text.startswith("(") for row in table.rows for cell in row):
                    note += f" A setting in brackets is of {CONTROL} alone."
                found.append(Block(title, table, note))
    return found


def _losses(results: Results, metric: Metric, found: Sequence[Difference]) -> Table:
    names = varying(results.groups)
    rows = []
    for d in found:
        estimate = d.group.estimates[metric.name]
        span = NONE
        if d.margin is not None:
            span = f"{_signed(d.value - d.margin)} to {_signed(d.value + d.margin)}"
        words = [
            Cell(_mean(metric, estimate)),
            Cell(_mean(metric, d.other.estimates[metric.name])),
            Cell(_signed(d.value)),
            Cell(f"{span} {SIGNS[d.outcome]}", style=d.outcome.replace(" ", "-")),
        ]
        rows.append((*identity(d.group, names, d.other), Cell(str(len(d.group.points))), *words))
    heads = ("strategy", *(axis_name(n) for n in names), "seeds", head(metric), CONTROL)
    return Table((*heads, "difference", "95 % interval"), tuple(rows))


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", MINUS)


def _loss_note(found: Sequence[Difference], metric: Metric, *, one_draw: bool) -> str:
    paired = all(d.paired for d in found)
    how = "row by row on the same rows" if paired else "not row by row: rows or seeds differ"
    return (
        f"Difference in {metric.unit}, compared {how}, averaged over seeds; negative is better. "
        "The interval covers the evaluated rows and, where there are several, the seeds. "
        f"{ONE_DRAW + ' ' if one_draw else ''}"
        "\u25b2 better, \u25bc worse, \u2248 within the error."
    )


def frame(results: Results) -> pl.DataFrame:
    """Return study.csv: a row a group, with mean, deviation and error of every benchmark."""
    detailed = by_benchmark(results)
    columns = shown(detailed)
    axes = list(dict.fromkeys(a for g in results.groups for a in g.axes if a != CONFIGURATION))
    losses = {
        id(d.group): d
        for name in configurations(results.groups)
        for d in _main_losses(detailed, name)
    }
    seconds = results.summary["train_seconds"].to_list()
    rows = [
        _identity(group, axes)
        | {k: v for m in columns for k, v in _cells(m, group.estimates.get(m.name)).items()}
        | _interval(losses.get(id(group)))
        | _times([seconds[p] for p in group.points])
        for group in detailed.groups
    ]
    return pl.DataFrame(rows, infer_schema_length=None, strict=False)


def _main_losses(results: Results, configuration: object) -> list[Difference]:
    """Return the differences of the groups that have a single one to `random`."""
    part = of_configuration(results, configuration)
    losses = [m for m in benchmarks(part) if not m.is_share]
    found = differences(part, CONTROL, metrics=losses) if len(losses) == 1 else []
    times = Counter(id(d.group) for d in found)
    return [d for d in found if times[id(d.group)] == 1]


def _identity(group: Group, axes: Sequence[str]) -> dict[str, Any]:
    configuration = setting(group, CONFIGURATION)
    named: dict[str, Any] = {} if configuration is None else {CONFIGURATION: configuration}
    named |= {
        "strategy": group.strategy,
        "ratio": group.ratio,
        **{axis: setting(group, axis) for axis in axes},
    }
    return named | {
        "seeds": len(group.points),
        **{k: group.costs[k] for k in ("rows", "data_share")},
    }


def _cells(metric: Metric, estimate: Estimate | None) -> dict[str, float | None]:
    name = metric.name.replace("/", "_")
    return {
        f"{name}_mean": estimate and estimate.value,
        f"{name}_sd": estimate and estimate.sd,
        f"{name}_stderr": estimate and estimate.stderr,
    }


def _interval(d: Difference | None) -> dict[str, float | None]:
    margin = d.margin if d else None
    return {
        "heldout_nll_minus_random": d.value if d else None,
        "heldout_nll_minus_random_low": d.value - margin if d and margin is not None else None,
        "heldout_nll_minus_random_high": d.value + margin if d and margin is not None else None,
    }


def _times(seconds: Sequence[float | None]) -> dict[str, float | None]:
    known = [s for s in seconds if s is not None]
    return {
        "train_seconds_mean": statistics.fmean(known) if known else None,
        "train_seconds_sd": statistics.stdev(known) if len(known) > 1 else None,
    }
