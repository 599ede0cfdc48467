"""The figures of a report, as SVG text: rows, clusters, loss, scores and swept axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cluster_sft.report import bars, costs, curves, drawing, studies
from cluster_sft.report.comparison import interval
from cluster_sft.report.drawing import INK, LIMIT, MUTED, SURFACE, thousands
from cluster_sft.report.labels import label, show
from cluster_sft.report.overview import Clustering, Step
from cluster_sft.report.points import METRICS, Group, Metric, varying
from cluster_sft.report.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_PANELS = 6  # clusterings drawn side by side
MAX_LABELLED = 24  # clusters with their numbers written on the bars
DENSE = 12  # rows of scores from which on their values are left to the table


def draw(
    results: Results, *, clusterings: Sequence[Clustering], way: Sequence[Step]
) -> dict[str, str]:
    """Return every figure that the results allow: file name without suffix -> SVG text."""
    drawn: dict[str, str] = {}
    with drawing.style():
        if way:
            drawn["rows"] = draw_rows(way)
        if clusterings:
            drawn["clusters"] = draw_clusters(clusterings)
        if len(results.loss):
            drawn["loss"] = curves.draw_loss(results)
        if results.loss["worker_cosine"].count():
            drawn["worker-cosine"] = curves.draw_worker_cosine(results)
        if any(group.estimates for group in results.groups):
            drawn["scores"] = draw_scores(results)
            drawn |= studies.draw_all(results)
        found = costs.bills(results)
        if any(bill.whole.seconds for bill in found):
            drawn["costs"] = bars.draw_costs(found, varying(results.groups))
    return drawn


def draw_rows(way: Sequence[Step]) -> str:
    """Draw rows kept and dropped by reason, from the source to each training subset."""
    figure = drawing.new_figure(0.9 + 0.27 * len(way))
    axes = figure.add_subplot()
    colours = {name: c for name, (c, _) in drawing.styles([s.kind for s in way]).items()}
    colours |= {"total": MUTED, "dropped": LIMIT}
    left = [0] * len(way)
    remaining = 0
    for i, step in enumerate(way):
        if step.kind == "dropped":
            remaining -= step.rows
            left[i] = remaining
        elif step.kind == "total":
            remaining = step.rows
    widest = max(step.rows for step in way)
    for i, step in enumerate(way):
        axes.barh(i, step.rows, left=left[i], height=0.62, color=colours[step.kind], linewidth=0)
        sign = "\u2212" if step.kind == "dropped" else ""
        axes.text(
            left[i] + step.rows + widest * 0.01,
            i,
            f"{sign}{thousands(step.rows)}",
            va="center",
            color=LIMIT if step.kind == "dropped" else INK,
        )
    axes.set_yticks(range(len(way)), [step.name for step in way], color=INK)
    axes.set_ylim(len(way) - 0.4, -0.6)
    axes.set_xlim(0, widest * 1.09)
    axes.set_xlabel("Rows")
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    return drawing.to_svg(figure, "Rows kept and dropped")


def draw_clusters(clusterings: Sequence[Clustering]) -> str:
    """Draw each clustering's sizes under the capacity, what was selected, and the loss weights."""
    shown = clusterings[:MAX_PANELS]
    columns = min(len(shown), 3)
    lines = -(-len(shown) // columns)
    figure = drawing.new_figure(3.9 * lines)
    grid = figure.add_gridspec(2 * lines, columns, height_ratios=[2.3, 1] * lines)
    for i, clustering in enumerate(shown):
        line, column = divmod(i, columns)
        sizes = figure.add_subplot(grid[2 * line, column])
        weights = figure.add_subplot(grid[2 * line + 1, column], sharex=sizes)
        _draw_sizes(sizes, clustering, wide=columns == 1)
        _draw_weights(weights, clustering, wide=columns == 1)
        if column == 0:
            sizes.set_ylabel("Rows")
            weights.set_ylabel("Weight $w_c$")
    return drawing.to_svg(figure, "Cluster sizes and loss weights")


def _draw_sizes(axes: Axes, clustering: Clustering, *, wide: bool) -> None:
    """Draw bars: all rows of a cluster light, its selected rows solid, the capacity as a line."""
    k = len(clustering.sizes)
    position = np.arange(k)
    colour = drawing.STYLES["cluster"][0]
    axes.bar(position, clustering.sizes, width=0.7, color=colour, alpha=0.28, linewidth=0)
    if clustering.selected:
        axes.bar(position, clustering.selected, width=0.7, color=colour, linewidth=0)
    top = 1.16 * max(*clustering.sizes, clustering.capacity)
    axes.set_ylim(0, top)
    axes.axhline(clustering.capacity, color=LIMIT, linewidth=1.2, dashes=(4, 3))
    axes.text(
        k - 0.5,
        clustering.capacity + top * 0.015,
        f"capacity {thousands(clustering.capacity)}",
        ha="right",
        va="bottom",
        color=LIMIT,
    )
    if k <= (MAX_LABELLED if wide else 8):
        _label_sizes(axes, clustering, line=top * 0.09)
    axes.set_title(clustering.title)
    axes.tick_params(labelbottom=False)


def _label_sizes(axes: Axes, clustering: Clustering, *, line: float) -> None:
    """Write the rows into the bars, or above where they would not fit; `line` is a text's height.

    Above a bar that almost reaches the capacity they would cross its line.
    """
    selected = clustering.selected or [0] * len(clustering.sizes)
    for c, (size, chosen) in enumerate(zip(clustering.sizes, selected, strict=True)):
        if chosen > line:
            axes.text(c, chosen / 2, thousands(chosen), ha="center", va="center", color=SURFACE)
        if chosen == size and chosen > line:
            continue  # is told
        fits = size - chosen > line
        inside = size > 2.5 * line and (fits or size <= clustering.capacity < size + line)
        axes.text(
            c,
            size + line * (-0.2 if inside else 0.15),
            thousands(size),
            ha="center",
            va="top" if inside else "bottom",
            color=SURFACE if inside and not fits else INK,
        )


def _draw_weights(axes: Axes, clustering: Clustering, *, wide: bool) -> None:
    """Draw each cluster's loss weight as a stem from 1, the weight of an unweighted row."""
    k = len(clustering.weights)
    position = np.arange(k)
    colour = drawing.STYLES["cluster"][0]
    weights = np.asarray(clustering.weights, dtype=float)
    axes.axhline(1.0, color=MUTED, linewidth=0.9)
    axes.vlines(position, 1.0, weights, color=colour, linewidth=2)
    axes.plot(position, weights, "o", color=colour, markersize=5.5)
    low, high = min(1.0, weights.min()), max(1.0, weights.max())
    labelled = k <= (MAX_LABELLED if wide else 8)
    room = max(high - low, 0.1) * (0.55 if labelled else 0.15)
    axes.set_ylim(low - room, high + room)
    axes.set_yticks([t for t in axes.get_yticks() if max(0.0, low - room) <= t <= high + room])
    if labelled:
        for c, weight in enumerate(weights):
            up = weight >= 1
            axes.annotate(
                f"{weight:.2f}",
                (c, weight),
                xytext=(0, 5 if up else -5),
                textcoords="offset points",
                ha="center",
                va="bottom" if up else "top",
                color=INK,
            )
    axes.set_xlabel("Cluster, largest first")
    axes.set_xlim(-0.6, k - 0.4)
    stride = max(1, k // 16)
    axes.set_xticks(position[::stride], [str(c) for c in position[::stride]])


def draw_scores(results: Results) -> str:
    """Draw every group's scores with 95% intervals, one panel a metric."""
    metrics = [m for m in METRICS if any(m.name in g.estimates for g in results.groups)]
    groups = [g for g in results.groups if g.estimates]
    columns = min(2, len(metrics))
    lines = -(-len(metrics) // columns)
    dense = len(groups) > DENSE
    figure = drawing.new_figure(lines * (0.95 + (0.2 if dense else 0.36) * len(groups)))
    panels = figure.subplots(lines, columns, sharey=True, squeeze=False)
    names = varying(results.groups)
    for i, axes in enumerate(panels.flat):
        if i >= len(metrics):
            axes.set_visible(False)
            continue
        _draw_metric(axes, metrics[i], groups, values=not dense)
        axes.set_yticks(range(len(groups)), [label(g, names) for g in groups], color=INK)
        axes.set_ylim(len(groups) - 0.55, -0.75)
    return drawing.to_svg(figure, "Scores with 95% intervals")


def _draw_metric(axes: Axes, metric: Metric, groups: Sequence[Group], *, values: bool) -> None:
    """Draw one metric: a point and an interval a group, and the untrained model as a line."""
    looks = drawing.styles([g.strategy for g in groups])
    for i, group in enumerate(groups):
        estimate = group.estimates.get(metric.name)
        if estimate is None:
            axes.text(
                0.02, i, "not run", transform=axes.get_yaxis_transform(), va="center", color=MUTED
            )
            continue
        colour, marker = looks[group.strategy]
        value = metric.scale * estimate.value
        bounds = interval(metric, group)
        if bounds:
            low, high = (metric.scale * bound for bound in bounds)
            axes.hlines(i, low, high, color=colour, linewidth=2.2, alpha=0.55)
        axes.plot(value, i, marker, color=colour, markersize=6.5)
        if values:
            axes.annotate(
                show(metric, estimate.value),
                (value, i),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=8.5,
                bbox={"facecolor": SURFACE, "edgecolor": "none", "pad": 0.6},
                color=INK,
            )
        if group.strategy == "base":
            axes.axvline(value, color=colour, linewidth=0.9, dashes=(3, 3), zorder=0.5)
    axes.set_title(metric.title)
    better = "\u2190 lower is better" if metric.lower_is_better else "higher is better \u2192"
    axes.set_xlabel(f"{metric.unit}   ({better})")
    axes.margins(x=0.08)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
