"""Bars: a study's scores against an axis of words, as weights on and off, and costs by step.

Shares stand on zero. The held-out loss has no zero to stand on that would show its differences, so
there the tops alone are drawn, as points with their errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cluster_sft.report import drawing
from cluster_sft.report.benchmarks import shown
from cluster_sft.report.costs import TRAIN, Bill
from cluster_sft.report.drawing import INK, MUTED
from cluster_sft.report.labels import axis_title, label, settings_text, show, show_duration
from cluster_sft.report.points import Group, Metric, varying
from cluster_sft.report.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

ROOM = 0.8  # of the distance of two places, for the bars of one
TINTS = (1.0, 0.62, 0.36, 0.22)  # of a strategy's colour, for its values of the axis
MOST_VALUES = {1: 18, 2: 9}  # that fit side by side into one of so many columns of panels


def draw_bars(results: Results, axis: str) -> str:
    """Draw every benchmark: a place for each setting of the other axes, a bar for each value.

    Where no other axis varies, the values are the places and each strategy is a bar. A strategy
    that ignores the axis has one bar a place. Error bars: standard deviation over seeds, else one
    standard error.

    Args:
        results: with estimates by benchmark, of one configuration or with it as the axis.
        axis: the swept key whose values stand side by side.
    """
    groups = [g for g in results.groups if g.strategy != "base" and g.estimates]
    others = tuple(n for n in varying(groups) if n != axis) or (axis,)
    places = _places(groups, others)
    side = None if others == (axis,) else axis
    looks = _looks(list(dict.fromkeys(_series(g, side) for g in groups)))
    metrics = shown(results)
    columns = min(2, len(metrics))
    lines = -(-len(metrics) // columns)
    figure = drawing.new_figure(2.7 * lines + 0.45)
    panels = figure.subplots(lines, columns, squeeze=False)
    for i, axes in enumerate(panels.flat):
        if i >= len(metrics):
            axes.set_visible(False)
            continue
        drawn = [(g, place) for g in groups for place in _own(g, others, places)]
        labelled = len(places) * len(looks) <= MOST_VALUES[columns]  # else the table has them
        _draw_panel(axes, metrics[i], drawn, side, looks, labelled=labelled)
        axes.set_xticks(range(len(places)), list(places))
        axes.set_xlim(-0.5, len(places) - 0.5)
    handles = [_handle(*look) for look in looks.values()]
    names = [", ".join(words) for words in looks]
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    return drawing.to_svg(figure, f"Scores by {axis_title(axis).lower()}")


def _places(groups: Sequence[Group], others: tuple[str, ...]) -> dict[str, int]:
    """Return a place for each setting of the other axes; groups that have none of them get all."""
    texts = dict.fromkeys(settings_text(g, others) for g in groups)
    named = [text for text in texts if text] or [""]
    return {text: i for i, text in enumerate(named)}


def _series(group: Group, side: str | None) -> tuple[str, ...]:
    """Return what a bar stands for: a strategy, and its value of the axis drawn side by side."""
    text = settings_text(group, (side,)) if side else ""
    return (group.strategy, text) if text else (group.strategy,)


def _looks(series: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], tuple[str, float]]:
    """Return colour and tint of each series: a strategy's colour, a tint for each of its values."""
    colours = drawing.styles([strategy for strategy, *_ in series])
    count: dict[str, int] = {}
    found = {}
    for key in series:
        tint = TINTS[count.get(key[0], 0) % len(TINTS)]
        count[key[0]] = count.get(key[0], 0) + 1
        found[key] = (colours[key[0]][0], tint)
    return found


def _handle(colour: str, tint: float) -> Patch:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, alpha=tint)


def _draw_panel(
    axes: Axes,
    metric: Metric,
    drawn: Sequence[tuple[Group, int]],
    side: str | None,
    looks: Mapping[tuple[str, ...], tuple[str, float]],
    *,
    labelled: bool,
) -> None:
    width = ROOM / len(looks)
    order = {key: i for i, key in enumerate(looks)}
    for group, place in drawn:
        estimate = group.estimates.get(metric.name)
        if estimate is None:
            continue
        key = _series(group, side)
        x = place + width * (order[key] - (len(order) - 1) / 2)
        colour, tint = looks[key]
        value = metric.scale * estimate.value
        error = metric.scale * (estimate.sd if estimate.sd is not None else estimate.stderr or 0.0)
        if metric.is_share:
            axes.bar(x, value, width * 0.92, color=colour, alpha=tint, linewidth=0)
        else:
            axes.plot(x, value, "o", color=colour, alpha=tint, markersize=7)
        if error:
            axes.plot([x, x], [value - error, value + error], color=INK, linewidth=1.1, alpha=0.7)
        if labelled:
            _write_value(axes, metric, x, estimate.value, value + error)
    if metric.is_share:
        axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
    else:
        axes.margins(y=0.22)
    axes.set_title(metric.title)
    axes.set_ylabel(metric.unit)


def _write_value(axes: Axes, metric: Metric, x: float, value: float, top: float) -> None:
    axes.annotate(
        show(metric, value),
        (x, top),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=8,
        color=INK,
    )


def _own(group: Group, others: tuple[str, ...], places: Mapping[str, int]) -> list[int]:
    """Return a group's places; one without any setting of the other axes stands at each."""
    text = settings_text(group, others)
    return [places[text]] if text in places else list(places.values())


SHARED = ("embed", "cluster", "select")  # steps of no scorer


def draw_costs(found: Sequence[Bill], names: Sequence[str]) -> str:
    """Draw the seconds of every group, stacked by step: selection in colours, training in grey.

    Args:
        found: the bills, some of which have a time.
        names: the settings that tell groups apart.
    """
    steps = list(dict.fromkeys(s for b in found for s, c in b.selection.items() if c.seconds))
    steps.sort(key=lambda step: step == "select")
    looks = _step_looks(found, steps)
    figure = drawing.new_figure(1.35 + 0.3 * len(found))
    axes = figure.add_subplot()
    left = np.zeros(len(found))
    unit, scale = _unit(max(b.whole.seconds for b in found))
    for step in [*steps, TRAIN]:
        costs = [b.training if step == TRAIN else b.selection.get(step) for b in found]
        widths = np.array([c.seconds / scale if c else 0.0 for c in costs])
        colour, tint = looks[step]
        look = {"color": colour, "alpha": tint, "linewidth": 0}
        axes.barh(range(len(found)), widths, 0.66, left=left, label=step, **look)
        left += widths
    for i, bill in enumerate(found):
        axes.annotate(
            show_duration(bill.whole.seconds),
            (left[i], i),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    axes.set_yticks(range(len(found)), [label(b.group, names) for b in found], color=INK)
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * float(left.max()) if left.max() else 1.0)
    axes.set_xlabel(f"Time of selection and training, {unit}")
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    figure.legend(loc="outside lower center", ncols=6, frameon=False)
    return drawing.to_svg(figure, "Cost of selection and training")


def _step_looks(found: Sequence[Bill], steps: Sequence[str]) -> dict[str, tuple[str, float]]:
    """Return colour and tint of each step: a scorer's steps have its strategy's colour."""
    colours = drawing.styles([b.group.strategy for b in found])
    families = {s: b.group.strategy for b in found for s in b.selection if s not in SHARED}
    looks = {TRAIN: (MUTED, 1.0)}
    for step in steps:
        family = families.get(step)
        members = [s for s in steps if families.get(s) == family]
        colour = colours[family][0] if family else drawing.STYLES["uniform"][0]
        looks[step] = (colour, TINTS[members.index(step) % len(TINTS)])
    return looks


def _unit(seconds: float) -> tuple[str, float]:
    if seconds < 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)
