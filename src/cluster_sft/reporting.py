"""Stage report: every point of a run or a study, side by side.

Reads the leaves of all points and writes summary.csv (a row a point), means.csv (a row a group of
seeds), metrics.json (for `dvc metrics`), summary.md, plots/ (for `dvc plots`), figures/*.svg,
report.html, and the tables study, costs, complexity and datasets, each as .md, .csv and .tex. The
same leaves give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import polars as pl

from cluster_sft import strategies
from cluster_sft.artifacts import SUMMARY, read_json, write_json
from cluster_sft.report import (
    caveats,
    diagnoses,
    exports,
    figures,
    headline,
    html,
    overview,
    tables,
)
from cluster_sft.report.html import Title
from cluster_sft.report.labels import label
from cluster_sft.report.points import (
    CONFIGURATION,
    METRICS,
    Group,
    Metric,
    Point,
    setting,
    varying,
)
from cluster_sft.report.results import Results, collect

if TYPE_CHECKING:
    from cluster_sft.params import Launch

CSV, MEANS, METRICS_JSON, MARKDOWN, PAGE = (
    "summary.csv",
    "means.csv",
    "metrics.json",
    "summary.md",
    "report.html",
)


class ReportParams(Protocol):
    """What the plan hands over: names, and the points in order.

    A point is a mapping: strategy, ratio, seed, axes, and leaves by role.
    """

    @property
    def name(self) -> str:
        """Return the run's name."""
        ...

    @property
    def study(self) -> str | None:
        """Return the study's name, None for a run's own report."""
        ...

    @property
    def points(self) -> Sequence[Mapping[str, Any]]:
        """Return the points in order."""
        ...


def run(params: ReportParams, *, out: Path, scratch: Path, launch: Launch) -> None:
    """Write the report on the leaves that `params.points` names.

    Args:
        params: points as the plan describes them.
        out: empty folder for the payload.
        scratch: not used; the report is made in seconds.
        launch: not used; nothing here runs in parallel.

    Raises:
        UserError: there is no point, or a leaf lacks what its stage writes.
    """
    several = len({point.get("configuration") for point in params.points}) > 1
    points = [point_of(point, several=several) for point in params.points]
    write_report(points, title=Title(params.name, params.study), out=out)


def point_of(described: Mapping[str, Any], *, several: bool = False) -> Point:
    """Return a point from the plan's description of it.

    Roles of `leaves` are stage names, `evaluate:<suite>` and, of stage score, `score` and
    `score:<step>`. A strategy without a budget (`full`) ignores ratio, clusters and selection, so
    it carries none of their axes. `several`: points are of several parameter files.
    """
    leaves = {role: Path(leaf) for role, leaf in described["leaves"].items()}
    select, train = leaves.get("select"), leaves.get("train")
    axes = _axes_of(described, train)
    budgeted = select is not None and read_json(select / SUMMARY).get("budget") is not None
    if not budgeted:
        axes = {k: v for k, v in axes.items() if not k.startswith(("cluster.", "select."))}
    if several:
        axes = {CONFIGURATION: described["configuration"], **axes}
    return Point(
        strategy=described["strategy"],
        ratio=described["ratio"] if budgeted else None,
        seed=described["seed"] if train is not None else None,
        axes=axes,
        cluster=leaves.get("cluster") if budgeted else None,
        select=select,
        train=train,
        evaluate={
            role.removeprefix("evaluate:"): leaf
            for role, leaf in leaves.items()
            if role.startswith("evaluate:")
        },
        prepare=leaves.get("prepare"),
        embed=leaves.get("embed"),
        diagnose=leaves.get("diagnose"),
        scores={
            role.removeprefix("score:") if ":" in role else described["strategy"]: leaf
            for role, leaf in leaves.items()
            if role.split(":")[0] == "score"
        },
    )


def _axes_of(described: Mapping[str, Any], train: Path | None) -> dict[str, Any]:
    """Return the axes that tell a point apart: not those that its strategy ignores.

    `auto` is what training took it for, by the train leaf's manifest.
    """
    if train is None:
        return {}
    ignored = [f"select.{name}" for name in strategies.get(described["strategy"]).ignores]
    taken = overview.manifest_of(train).get("params", {})
    return {
        axis: taken.get(axis.removeprefix("train."), value) if value == "auto" else value
        for axis, value in described["axes"].items()
        if axis not in ("select.ratio", "train.seed", *ignored)
    }


def write_report(points: Sequence[Point], *, title: Title, out: Path) -> None:
    """Write every file of a report into the folder `out`.

    Raises:
        UserError: there is no point, or a leaf lacks what its stage writes.
    """
    results = collect(points)
    found = overview.clusterings(points)
    diagnosed = diagnoses.diagnoses(results)
    drawn = figures.draw(results, clusterings=found, way=overview.way(results, found))
    drawn |= diagnoses.figures(diagnosed)
    made = exports.blocks(results, title.name)
    results.summary.write_csv(out / CSV)
    _means(results).write_csv(out / MEANS)
    write_json(out / METRICS_JSON, _metrics(results))
    warnings = [*caveats.warnings(results, found), *diagnoses.warnings(diagnosed)]
    (out / MARKDOWN).write_text(_markdown(results, title, warnings))
    _write_plots(results, out / "plots")
    (out / "figures").mkdir()
    exports.write(results, made, title=title.study or title.name, out=out)
    for name, svg in drawn.items():
        (out / "figures" / f"{name}.svg").write_text(svg)
    page = html.render(
        results, title=title, clusterings=found, figures=drawn, made=made, diagnosed=diagnosed
    )
    (out / PAGE).write_text(page)


def digest_of(leaf: Path) -> str:
    """Return what a terminal shows of a finished report: a compact table and the page's path."""
    means = pl.read_csv(leaf / MEANS, infer_schema_length=None)
    place = means.columns.index("rows")
    settings = [c for c in means.columns[:place] if c == "strategy" or means[c].n_unique() > 2]
    settings += ["seeds"] if means["seeds"].max() != 1 and "seeds" not in settings else []
    costs = [c for c in ("rows", "data_share", "train_tokens") if means[c].count()]
    metrics = [m for m in METRICS if means[m.name].count()]
    rows = []
    for row in means.iter_rows(named=True):
        words = [
            *(_plain(c, row[c]) for c in (*settings, *costs)),
            *(_score(m, row) for m in metrics),
        ]
        rows.append(tuple(tables.Cell(word) for word in words))
    heads = (*settings, *costs, *(m.name for m in metrics))
    return f"{tables.text(tables.Table(heads, tuple(rows)))}\nReport: {leaf / PAGE}\n"


def _plain(column: str, value: Any) -> str:
    if value is None:
        return tables.NONE
    if column == "data_share":
        return f"{value:.1%}"
    return f"{round(value):,}" if column in ("rows", "train_tokens") else str(value)


def _score(metric: Metric, row: Mapping[str, Any]) -> str:
    value, error = row[metric.name], row[f"{metric.name}_stderr"]
    if value is None:
        return tables.NONE
    return f"{value:.3f}" if error is None else f"{value:.3f} \u00b1 {error:.3f}"


def _key(group: Group, names: Sequence[str]) -> str:
    """Return a group's name in metrics.json: the strategy alone where that tells groups apart."""
    if group.strategy == "base":
        names = [name for name in names if name == CONFIGURATION]
    settings = [(n.split(".")[-1], setting(group, n)) for n in names]
    return "_".join([group.strategy, *(f"{n}-{v}" for n, v in settings if v is not None)])


def _metrics(results: Results) -> dict[str, dict[str, float]]:
    """Return {group: {metric: mean over seeds}}, costs included."""
    names = varying(results.groups)
    return {
        _key(g, names): {k: v for k, v in g.costs.items() if v is not None}
        | {k: e.value for k, e in g.estimates.items()}
        for g in results.groups
    }


def _means(results: Results) -> pl.DataFrame:
    """Return a row a group: every metric's mean, deviation over seeds and standard error."""
    axes = dict.fromkeys(axis for g in results.groups for axis in g.axes)
    rows = []
    for g in results.groups:
        row: dict[str, Any] = {"strategy": g.strategy, "ratio": g.ratio, "seeds": len(g.points)}
        row |= {axis: g.axes.get(axis) for axis in axes} | dict(g.costs)
        for metric in METRICS:
            e = g.estimates.get(metric.name)
            row[metric.name] = e and e.value
            row[f"{metric.name}_sd"] = e and e.sd
            row[f"{metric.name}_stderr"] = e and e.stderr
        rows.append(row)
    return pl.DataFrame(rows, infer_schema_length=None, strict=False)


def _markdown(results: Results, title: Title, warnings: Sequence[str]) -> str:
    """Return the report's words and tables without its figures."""
    parts = [f"# {title.study or title.name}\n", headline.compared(results) + "\n"]
    if found := headline.verdicts(results):
        parts.append("\n".join(f"- **{v.title}**: {v.text}" for v in found) + "\n")
    parts += [note + "\n" for note in headline.notes(results)]
    parts += ["## Results\n", tables.markdown(tables.results_table(results))]
    optional = [
        ("Difference to random", tables.differences_table(results)),
        ("Mean and standard deviation over seeds", tables.seeds_table(results)),
    ]
    for head, table in optional:
        if table is not None:
            parts += [f"### {head}\n", tables.markdown(table)]
    if skipped := overview.not_run(results):
        lines = [f"- **{s}**{'' if who == 'all' else f' ({who})'}: {r}" for s, r, who in skipped]
        parts += ["### Not run\n", "\n".join(lines) + "\n"]
    if warnings:
        parts += ["## Warnings\n", "\n".join(f"- {w}" for w in warnings) + "\n"]
    return "\n".join(parts)


def _write_plots(results: Results, folder: Path) -> None:
    """Write what `dvc plots` draws: a file of training steps a group, and the scores of all groups.

    Revisions lie over one another in a plot, so each plot holds one curve of a revision.
    """
    names = varying(results.groups)
    (folder / "loss").mkdir(parents=True)
    scores = []
    for group in results.groups:
        found = {m.name: e.value for m in METRICS if (e := group.estimates.get(m.name))}
        scores.append({"name": label(group, names)} | {m.name: found.get(m.name) for m in METRICS})
        steps = results.loss.filter(pl.col("point").is_in(list(group.points)))
        if len(steps):
            means = steps.group_by("step").agg(pl.exclude("point").mean()).sort("step")
            if not means["worker_cosine"].count():
                means = means.drop("worker_cosine")
            means.write_csv(folder / "loss" / f"{_key(group, names)}.csv")
    schema = {"name": pl.String} | {m.name: pl.Float64 for m in METRICS}
    pl.DataFrame(scores, schema=schema).write_csv(folder / "scores.csv")
