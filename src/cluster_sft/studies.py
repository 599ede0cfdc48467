"""The figure of a study: scores against a swept axis, a line a strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cluster_sft import drawing
from cluster_sft.labels import axis_title, settings_text
from cluster_sft.points import METRICS, Group, Metric, Value, setting, varying
from cluster_sft.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_study(results: Results, axis: str) -> str:
    """Draw every metric against one swept axis, a line a strategy.

    Combinations of the other axes are thin lines, their mean is bold; a strategy that ignores the
    axis is a dashed level. Error bars: standard deviation over seeds, else one standard error.
    """
    metrics = [m for m in METRICS if any(m.name in g.estimates for g in results.groups)]
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
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in found)
    if numeric:
        return {value: float(value) for value in sorted(found)}
    return {value: float(i) for i, value in enumerate(found)}


def _draw_axis(
    axes: Axes, metric: Metric, groups: Sequence[Group], axis: str, ticks: Mapping[Value, float]
) -> None:
    """Draw one metric against one axis."""
    numeric = all(float(t) == v for v, t in ticks.items() if not isinstance(v, str))
    numeric = numeric and not any(isinstance(v, str | bool) for v in ticks)
    ends: list[tuple[float, float, str, str]] = []
    for strategy, (colour, marker) in drawing.styles([g.strategy for g in groups]).items():
        mine = [g for g in groups if g.strategy == strategy and metric.name in g.estimates]
        if not mine:
            continue
        placed = [g for g in mine if setting(g, axis) in ticks and strategy != "base"]
        if not placed:
            level = metric.scale * float(np.mean([g.estimates[metric.name].value for g in mine]))
            axes.axhline(level, color=colour, linewidth=1.2, dashes=(4, 3))
            ends.append((0.0, level, strategy, colour))
            continue
        x, y = _draw_strategy(axes, metric, placed, axis, ticks, (colour, marker), line=numeric)
        ends.append((x, y, strategy, colour))
    positions = list(ticks.values())
    if numeric and min(positions) > 0 and max(positions) / min(positions) >= 8:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(positions, [str(value) for value in ticks])
    axes.set_title(metric.title)
    axes.set_xlabel(axis_title(axis))
    axes.set_ylabel(metric.unit)
    axes.margins(x=0.06, y=0.1)
    axes.set_ylim(axes.get_ylim())
    drawing.label_ends(axes, ends, height=2.2)


def _draw_strategy(
    axes: Axes,
    metric: Metric,
    groups: Sequence[Group],
    axis: str,
    ticks: Mapping[Value, float],
    look: tuple[str, str],
    *,
    line: bool,
) -> tuple[float, float]:
    """Draw one strategy along an axis; return where its line ends."""
    colour, marker = look
    others = tuple(n for n in varying(groups) if n != axis)
    lines: dict[str, dict[float, Group]] = {}
    for group in groups:
        place = ticks[setting(group, axis)]  # type: ignore[index]
        lines.setdefault(settings_text(group, others), {})[place] = group
    means: dict[float, list[float]] = {}
    for along in lines.values():
        xs = sorted(along)
        found = [along[x].estimates[metric.name] for x in xs]
        ys = [metric.scale * e.value for e in found]
        for x, y in zip(xs, ys, strict=True):
            means.setdefault(x, []).append(y)
        if len(lines) > 1:
            axes.plot(
                xs, ys, "-" if line else "", marker=".", color=colour, linewidth=0.8, alpha=0.45
            )
            continue
        errors = [metric.scale * (e.sd if e.sd is not None else e.stderr or 0.0) for e in found]
        axes.errorbar(xs, ys, errors, fmt="none", ecolor=colour, elinewidth=1.3, alpha=0.6)
    xs = sorted(means)
    ys = [float(np.mean(means[x])) for x in xs]
    axes.plot(xs, ys, "-" if line else "", marker=marker, color=colour, linewidth=1.9, markersize=6)
    return xs[-1], ys[-1]
