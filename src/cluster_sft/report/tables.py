"""Tables of a report, once as cells, then as Markdown or plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster_sft.report.comparison import Difference, best, differences
from cluster_sft.report.labels import (
    axis_name,
    label,
    settings_text,
    show,
    show_count,
    show_duration,
    show_estimate,
)
from cluster_sft.report.points import CONFIGURATION, METRICS, Group, Metric, setting, varying
from cluster_sft.report.results import Results

NONE = "\u2013"
SIGNS = {"better": "\u25b2", "worse": "\u25bc", "within error": "\u2248", "error unknown": "?"}


@dataclass(frozen=True)
class Cell:
    """One cell: its text, whether it is a proven best, and what a style sheet may know of it."""

    text: str
    best: bool = False
    style: str = ""  # a strategy's name, or an outcome of a comparison


@dataclass(frozen=True)
class Table:
    """Cells under heads; the first `words` columns are text, the others numbers."""

    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    words: int = 1


def metrics_of(results: Results) -> list[Metric]:
    """Return the metrics that any group has."""
    return [m for m in METRICS if any(m.name in g.estimates for g in results.groups)]


def results_table(results: Results) -> Table:
    """Return one row a group: its settings, its cost, its scores with standard errors."""
    names, metrics = varying(results.groups), metrics_of(results)
    winners = {metric.name: best(results, metric) for metric in metrics}
    rows = []
    for i, group in enumerate(results.groups):
        scores = [
            Cell(show_estimate(m, group.estimates.get(m.name)), best=i in winners[m.name])
            for m in metrics
        ]
        rows.append((*identity(group, names), *_costs(group), *scores))
    costs = ("rows", "share", "tokens", "time")
    heads = ("strategy", *(axis_name(n) for n in names), *costs, *(head(m) for m in metrics))
    return Table(heads, tuple(rows))


def identity(group: Group, names: Sequence[str], other: Group | None = None) -> list[Cell]:
    """Return a group's first cells: its strategy and its values of the named settings.

    In brackets stand those that only `other` has, which the group is compared with.
    """
    untouched = group.strategy == "base"  # by any setting but the configuration
    words = []
    for name in names:
        own = setting(group, name) if not untouched or name == CONFIGURATION else None
        theirs = setting(other, name) if other and not untouched else None
        text = NONE if theirs is None else f"({theirs})"
        words.append(Cell(text if own is None else str(own)))
    return [Cell(group.strategy, style=group.strategy), *words]


def _costs(group: Group) -> list[Cell]:
    share = group.costs["data_share"]
    return [
        Cell(show_count(group.costs["rows"])),
        Cell(NONE if share is None else f"{share:.1%}"),
        Cell(show_count(group.costs["train_tokens"])),
        Cell(show_duration(group.costs["train_seconds"])),
    ]


def head(metric: Metric) -> str:
    """Return a metric's column head: title, unit of shares, and which way is better."""
    arrow = "\u2193" if metric.lower_is_better else "\u2191"
    return f"{metric.title}{', %' if metric.is_share else ''}\u00a0{arrow}"


def differences_table(results: Results, other: str = "random") -> Table | None:
    """Return every group's difference to `other` with its 95 % margin; None without `other`."""
    names, metrics = varying(results.groups), metrics_of(results)
    found: dict[tuple[int, int], dict[str, Difference]] = {}
    position = {id(group): i for i, group in enumerate(results.groups)}
    for d in differences(results, other):
        found.setdefault((position[id(d.group)], position[id(d.other)]), {})[d.metric.name] = d
    if not found:
        return None
    rows = [
        (
            Cell(
                _pair_name(results.groups[i], results.groups[j], names),
                style=results.groups[i].strategy,
            ),
            *(_difference_cell(of_metric.get(m.name)) for m in metrics),
        )
        for (i, j), of_metric in found.items()
    ]
    heads = (f"minus {other}", *(head(m) for m in metrics))
    return Table(heads, tuple(rows))


def _pair_name(group: Group, other: Group, names: Sequence[str]) -> str:
    """Name a comparison by the group, and in brackets by what only the other side has."""
    own = label(group, names)
    if group.strategy == "base":
        return own
    theirs = settings_text(other, [name for name in names if setting(group, name) is None])
    return f"{own} ({theirs})" if theirs else own


def _difference_cell(difference: Difference | None) -> Cell:
    if difference is None:
        return Cell(NONE)
    metric, outcome = difference.metric, difference.outcome
    text = f"{metric.scale * difference.value:+.{1 if metric.is_share else 3}f}".replace(
        "-", "\u2212"
    )
    if difference.margin is not None:
        text += f" \u00b1 {show(metric, difference.margin)}"
    return Cell(f"{text} {SIGNS[outcome]}", style=outcome.replace(" ", "-"))


def seeds_table(results: Results) -> Table | None:
    """Return mean and standard deviation over seeds; None where every group has one seed."""
    groups = [g for g in results.groups if len(g.points) > 1]
    if not groups:
        return None
    names, metrics = varying(results.groups), metrics_of(results)
    rows = []
    for group in groups:
        cells = []
        for metric in metrics:
            estimate = group.estimates.get(metric.name)
            text = NONE if estimate is None else show(metric, estimate.value)
            if estimate is not None and estimate.sd is not None:
                text += f" \u00b1 {show(metric, estimate.sd)}"
            cells.append(Cell(text))
        rows.append((*identity(group, names), Cell(str(len(group.points))), *cells))
    heads = ("strategy", *(axis_name(n) for n in names), "seeds", *(head(m) for m in metrics))
    return Table(heads, tuple(rows))


def runs_table(results: Results) -> Table:
    """Return one row a point with its seed: the single runs behind the means."""
    axes = dict.fromkeys(axis for point in results.points for axis in point.axes)
    metrics = metrics_of(results)
    rows = []
    for row in results.summary.iter_rows(named=True):
        named = [row["ratio"], *(row[a] for a in axes), row["seed"]]
        words = [Cell(NONE if v is None else str(v)) for v in named]
        scores = [Cell(NONE if row[m.name] is None else show(m, row[m.name])) for m in metrics]
        costs = [Cell(show_count(row["train_tokens"])), Cell(show_duration(row["train_seconds"]))]
        rows.append((Cell(row["strategy"], style=row["strategy"]), *words, *costs, *scores))
    heads = ("strategy", "r", *(axis_name(a) for a in axes), "seed", "tokens", "time")
    return Table((*heads, *(head(m) for m in metrics)), tuple(rows))


def markdown(table: Table) -> str:
    """Return a table in GitHub's Markdown; proven bests are bold."""
    lines = [
        "| " + " | ".join(head.replace("|", "\\|") for head in table.heads) + " |",
        "| "
        + " | ".join("---" if i < table.words else "---:" for i in range(len(table.heads)))
        + " |",
    ]
    for row in table.rows:
        cells = [cell.text.replace("|", "\\|") for cell in row]
        cells = [f"**{t}**" if c.best else t for t, c in zip(cells, row, strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def text(table: Table) -> str:
    """Return a table for a terminal: aligned columns, a star behind proven bests."""
    body = [[cell.text + ("*" if cell.best else "") for cell in row] for row in table.rows]
    widths = [
        max(len(row[i]) for row in [list(table.heads), *body]) for i in range(len(table.heads))
    ]
    lines = []
    for row in [list(table.heads), ["\u2500" * w for w in widths], *body]:
        cells = [
            t.ljust(w) if i < table.words else t.rjust(w)
            for i, (t, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"
