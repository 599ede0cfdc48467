"""The figures of a study: scores against a swept axis, a line a strategy or bars by value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cluster_sft.report import drawing
from cluster_sft.report.bars import draw_bars
from cluster_sft.report.benchmarks import by_benchmark, of_configuration, shown
from cluster_sft.report.labels import axis_title, settings_text
from cluster_sft.report.points import (
    CONFIGURATION,
    Estimate,
    Group,
    Metric,
    Value,
    configurations,
    setting,
    varying,
)
from cluster_sft.report.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_all(results: Results) -> dict[str, str]:
    """Return a figure an axis and configuration: name without suffix -> SVG text.

    Lines against an axis of numbers, bars for one of words. Bars show the ratio too, so that it has
    no figure of its own beside them.
    """
    detailed = by_benchmark(results)
    names = configurations(results.groups)
    drawn: dict[str, str] = {}
    for name in names:
        part = of_configuration(detailed, name)
        axes = varying(part.groups)
        words = [axis for axis in axes if not is_numeric(part.groups, axis)]
        for axis in axes:
            end = axis if name is None else f"{name}-{axis}"
            if axis in words:
                drawn[f"bars-{end}"] = draw_bars(part, axis)
            elif not (axis == "ratio" and words):
                drawn[f"study-{end}"] = draw_study(part, axis)
    if len(names) > 1 and not drawn:
        drawn[f"bars-{CONFIGURATION}"] = draw_bars(detailed, CONFIGURATION)
    return drawn


def is_numeric(groups: Sequence[Group], axis: str) -> bool:
    """Tell whether all values of an axis are numbers."""
    values = [v for g in groups if (v := setting(g, axis)) is not None]
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def draw_study(results: Results, axis: str) -> str:
    """Draw every benchmark of results `by_benchmark` against one swept axis, a line a strategy.

    Combinations of the other axes are thin lines, their mean is bold; a strategy that ignores the
    axis is a dashed level. Error bars: standard deviation over seeds, else one standard error.
    """
    metrics = shown(results)
    columns = min(2, len(metrics))
    lines = -(-len(metrics) // columns)
    figure = drawing.new_figure(3.1 * lines)
    panels = figure.subplots(lines, columns, squeeze=False)
    ticks = _ticks(results.groups, axis)
    for i, axes in enumerate(panels.flat):
        if i >= len(metrics):
            axes.set_visible(False)
            continue
        _draw_axis(axes, metrics[i], results.groups, axis, ticks)
    return drawing.to_svg(figure, f"Scores against {axis_title(axis)}")


def _ticks(groups: Sequence[Group], axis: str) -> dict[Value, float]:
    """Return where each value of an axis stands: numbers at their value, words in order."""
    found = dict.fromkeys(v for g in groups if (v := setting(g, axis)) is not None)
    if is_numeric(groups, axis):
        return {value: float(value) for value in sorted(found)}
    return {value: float(i) for i, value in enumerate(found)}


def _draw_axis(
    axes: Axes, metric: Metric, groups: Sequence[Group], axis: str, ticks: Mapping[Value, float]
) -> None:
    """Draw one metric against one axis."""
    numeric = is_numeric(groups, axis)
    ends: list[tuple[float, float, str, str]] = []
    mine = {g.strategy: [] for g in groups if metric.name in g.estimates}
    for group in groups:
        if metric.name in group.estimates:
            mine[group.strategy].append(group)
    looks = drawing.styles([g.strategy for g in groups])
    apart = min(3.0, 14.0 / max(1, len(mine) - 1))  # points; all of them stay inside the margins
    for i, (strategy, members) in enumerate(mine.items()):
        placed = [g for g in members if strategy != "base" and setting(g, axis) in ticks]
        colour, marker = looks[strategy]
        if placed:
            aside = apart * (i - (len(mine) - 1) / 2)
            look = Look(colour, marker, "-" if numeric else "none", aside)
            ends.append(
                (*_draw_strategy(axes, metric, placed, axis, ticks, look), strategy, colour)
            )
    axes.margins(x=0.1 if numeric else 0.2, y=0.1)
    axes.autoscale_view()
    for strategy, members in mine.items():
        if not any(strategy == end[2] for end in ends):
            values = [metric.scale * g.estimates[metric.name].value for g in members]
            ends.append(_draw_level(axes, float(np.mean(values)), strategy, looks[strategy][0]))
    positions = list(ticks.values())
    if numeric and min(positions) > 0 and max(positions) / min(positions) >= 8:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(positions, [str(value) for value in ticks])
    axes.set_title(metric.title)
    axes.set_xlabel(axis_title(axis))
    axes.set_ylabel(metric.unit)
    axes.set_ylim(axes.get_ylim())
    drawing.label_ends(axes, ends, height=2.2)


def _draw_level(
    axes: Axes, level: float, strategy: str, colour: str
) -> tuple[float, float, str, str]:
    """Draw a strategy that the axis does not touch as a dashed level; return its label.

    One so far off that it would squash the others is only named, with its value, at the edge.
    """
    low, high = axes.get_ylim()
    if low - (high - low) <= level <= high + (high - low):
        axes.axhline(level, color=colour, linewidth=1.2, dashes=(4, 3))
        return 0.0, level, strategy, colour
    arrow = "\u2191" if level > high else "\u2193"
    return 0.0, min(max(level, low), high), f"{strategy} {level:.3g} {arrow}", colour


@dataclass(frozen=True)
class Look:
    """How a strategy is drawn; `aside` (points) keeps equal values of strategies apart."""

    colour: str
    marker: str
    line: str
    aside: float


def _draw_strategy(
    axes: Axes,
    metric: Metric,
    groups: Sequence[Group],
    axis: str,
    ticks: Mapping[Value, float],
    look: Look,
) -> tuple[float, float]:
    """Draw one strategy along an axis; return where its line ends."""
    from matplotlib.transforms import offset_copy

    move = offset_copy(axes.transData, axes.get_figure(root=True), x=look.aside, units="points")
    others = tuple(n for n in varying(groups) if n != axis)
    lines: dict[str, dict[float, Estimate]] = {}
    for group in groups:
        place = ticks[setting(group, axis)]  # type: ignore[index]
        estimate = group.estimates[metric.name]
        lines.setdefault(settings_text(group, others), {})[place] = estimate
    means: dict[float, list[float]] = {}
    for along in lines.values():
        xs = sorted(along)
        ys = [metric.scale * along[x].value for x in xs]
        for x, y in zip(xs, ys, strict=True):
            means.setdefault(x, []).append(y)
            axes.update_datalim([(x, y)])  # moved lines do not count by themselves
            error = along[x].stderr if along[x].sd is None else along[x].sd
            if len(lines) == 1 and error:
                bar = [y - metric.scale * error, y + metric.scale * error]
                axes.plot([x, x], bar, color=look.colour, linewidth=1.4, alpha=0.55, transform=move)
                axes.update_datalim([(x, edge) for edge in bar])
        if len(lines) > 1:
            thin = {"linewidth": 0.8, "alpha": 0.45, "marker": ".", "transform": move}
            axes.plot(xs, ys, linestyle=look.line, color=look.colour, **thin)
    xs = sorted(means)
    ys = [float(np.mean(means[x])) for x in xs]
    bold = {"linewidth": 1.9, "marker": look.marker, "markersize": 6, "transform": move}
    axes.plot(xs, ys, linestyle=look.line, color=look.colour, **bold)
    return xs[-1], ys[-1]
