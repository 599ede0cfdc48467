"""The figures of the diagnostics, as SVG text in the style of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cluster_sft.diagnostics.moments import Array
from cluster_sft.diagnostics.projection import Map
from cluster_sft.diagnostics.validity import PermutationTest
from cluster_sft.report.drawing import (
    INK,
    LIMIT,
    MUTED,
    SPARE,
    STYLES,
    SURFACE,
    new_figure,
    style,
    to_svg,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = tuple(
    STYLES[name][0] for name in ("cluster", "random", "uniform", "full", "ifd", "s2l", "base")
) + tuple(colour for colour, _ in SPARE)
BLUE, ORANGE = STYLES["cluster"][0], STYLES["random"][0]
MAX_STACKED = len(COLOURS)  # clusters that have a colour each; more are shaded cells
MAX_STEPS = 32  # steps of an epoch that are drawn
MAX_WRITTEN = 10  # clusters whose cosines are written into the cells


def write(out: Path, name: str, svg: str) -> None:
    """Write a figure into the folder `figures` of a leaf."""
    (out / "figures").mkdir(exist_ok=True)
    (out / "figures" / f"{name}.svg").write_text(svg)


def draw_map(
    found: Map, label_N: NDArray[np.integer], selected_N: NDArray[np.bool_], k: int
) -> str:
    """Draw rows where the map puts them: colour is the cluster, selected rows are solid."""
    with style():
        figure = new_figure(5.6)
        axes = figure.add_subplot()
        size = 26 if len(label_N) <= 800 else 12
        for c in range(k):
            colour = COLOURS[c % len(COLOURS)]
            for chosen in (False, True):
                rows = np.flatnonzero((label_N == c) & (selected_N == chosen))
                axes.scatter(
                    *found.points[rows].T,
                    s=size,
                    facecolors=colour if chosen else "none",
                    edgecolors=colour,
                    linewidths=0.9,
                    alpha=0.9 if chosen else 0.45,
                )
        for c in range(k):
            rows = np.flatnonzero(label_N == c)
            if len(rows):
                x, y = np.median(found.points[rows], axis=0)
                axes.annotate(
                    str(c),
                    (float(x), float(y)),
                    ha="center",
                    va="center",
                    fontweight="bold",
                    color=COLOURS[c % len(COLOURS)],
                    bbox={"facecolor": SURFACE, "edgecolor": COLOURS[c % len(COLOURS)], "pad": 2.5},
                )
        _marks_legend(axes, "selected", "not selected", MUTED)
        axes.set_xlabel(found.axes[0])
        axes.set_ylabel(found.axes[1])
        axes.grid(visible=False)
        axes.margins(0.04)
        axes.tick_params(labelbottom=False, labelleft=False, bottom=False)
        return to_svg(figure, "Map of the embedding")


def draw_composition(counts: Mapping[str, NDArray[np.int64]]) -> str:
    """Draw the rows of every cluster in the first steps of an epoch, a panel a way of batching."""
    with style():
        figure = new_figure(3.3)
        panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)
        most = float(max(count.max() for count in counts.values()))
        for axes, (name, count) in zip(panels.flat, counts.items(), strict=True):
            shown = count[:MAX_STEPS]
            if count.shape[1] <= MAX_STACKED:
                _stack(axes, shown)
                axes.locator_params(axis="x", integer=True)
            else:
                _shade(axes, shown.T.astype(np.float64), written=False, strongest=most)
                axes.set_xlim(-0.5, len(shown) - 0.5)
                ticks = _ticks(len(shown))
                axes.set_xticks(ticks, [str(step + 1) for step in ticks])
            rest = len(count) - len(shown)
            axes.set_title(f"{name} batches" + (f" (first {len(shown)} steps)" if rest else ""))
            axes.set_xlabel("Step of an epoch")
        stacked = next(iter(counts.values())).shape[1] <= MAX_STACKED
        panels[0, 0].set_ylabel("Rows, by cluster" if stacked else "Cluster, largest first")
        return to_svg(figure, "Clusters in the batches")


def _stack(axes: Axes, counts: NDArray[np.int64]) -> None:
    """Draw a bar a step, a piece a cluster, its number written on the first bar that has room."""
    steps, k = counts.shape
    below = np.zeros(steps)
    for c in range(k):
        axes.bar(
            np.arange(1, steps + 1),
            counts[:, c],
            bottom=below,
            width=0.86,
            color=COLOURS[c],
            linewidth=0,
        )
        if counts[0, c] >= 0.06 * counts[0].sum() and steps <= 16:
            middle = below[0] + counts[0, c] / 2
            axes.text(1, middle, str(c), ha="center", va="center", color=SURFACE, fontsize=8.5)
        below += counts[:, c]
    axes.set_xlim(0.4, steps + 0.6)


def draw_centroids(between: Array, preserved: Array) -> str:
    """Draw the cosines of clusters' centroids, and of each with that of its selected rows."""
    with style():
        k = len(between)
        figure = new_figure(max(3.4, min(5.4, 1.3 + 0.34 * k)))
        left, right = figure.subplots(1, 2, width_ratios=[1, 1.15])
        _shade(left, between, written=k <= MAX_WRITTEN)
        left.set_xlim(-0.5, k - 0.5)
        left.set_aspect("equal")
        left.set_title("Cosine of two clusters' centroids")
        left.set_xlabel("Cluster")
        left.set_ylabel("Cluster")
        known = np.flatnonzero(np.isfinite(preserved))
        right.hlines(known, preserved[known], 1, color=BLUE, linewidth=2)
        right.plot(preserved[known], known, "o", color=BLUE, markersize=6)
        right.axvline(0.99, color=LIMIT, linewidth=1.2, dashes=(4, 3))
        low = min(0.985, float(preserved[known].min(initial=1.0)))
        right.set_xlim(low - 0.12 * (1 - low), 1 + 0.02 * (1 - low))
        right.set_ylim(k - 0.4, -0.6)
        right.set_yticks(_ticks(k))
        right.set_title("Cosine of a centroid with its selected rows'")
        right.set_xlabel("Cosine   (dashed: 0.99)")
        right.set_ylabel("Cluster")
        right.grid(visible=True, axis="x")
        right.grid(visible=False, axis="y")
        return to_svg(figure, "Cosines of the clusters' centroids")


def _shade(axes: Axes, values: Array, *, written: bool, strongest: float | None = None) -> None:
    """Draw a matrix as cells: blue where positive, orange where negative, stronger where larger.

    `strongest` is the value of the fullest colour, by default the largest.
    """
    strongest = strongest or float(np.abs(values[np.isfinite(values)]).max(initial=0.0)) or 1.0
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    for row, column in np.ndindex(values.shape):
        value = values[row, column]
        if not np.isfinite(value):
            continue
        colour = BLUE if value >= 0 else ORANGE
        strength = abs(float(value)) / strongest
        shade = to_rgba(colour, 0.85 * strength)
        cell = Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=shade, linewidth=0)
        axes.add_patch(cell)
        if written:
            text = f"{value:.2f}".replace("-", "\u2212")
            ink = SURFACE if strength > 0.6 else INK
            axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=8.5)
    axes.set_ylim(values.shape[0] - 0.5, -0.5)
    axes.set_xticks(_ticks(values.shape[1]))
    axes.set_yticks(_ticks(values.shape[0]))
    axes.grid(visible=False)


def _ticks(k: int) -> NDArray[np.int64]:
    return np.arange(0, k, max(1, k // 12))


def draw_validity(test: PermutationTest, within: Array) -> str:
    """Draw T among its permutations, and the mean true cosine of every two clusters."""
    with style():
        k = len(within)
        figure = new_figure(max(3.3, min(5.4, 1.3 + 0.34 * k)))
        left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
        left.hist(test.permuted, bins=50, color=MUTED, alpha=0.55, linewidth=0)
        left.axvline(test.statistic, color=BLUE, linewidth=2)
        low, high = min(test.permuted.min(), test.statistic), max(test.permuted.max(), 0.0)
        high = max(high, test.statistic)
        left.set_xlim(low - 0.06 * (high - low), high + 0.06 * (high - low))
        left.set_ylim(0, left.get_ylim()[1] * 1.18)
        late = test.statistic > (low + high) / 2
        left.annotate(
            f"T = {test.statistic:.3g}, p = {test.p_value:.2g}".replace("-", "\u2212"),
            (test.statistic, 0.97),
            xycoords=("data", "axes fraction"),
            xytext=(-6 if late else 6, 0),
            textcoords="offset points",
            ha="right" if late else "left",
            va="top",
            color=BLUE,
            fontweight="bold",
        )
        left.set_title("Labels permuted: what chance gives")
        left.set_xlabel("Mean cosine inside minus between clusters, T")
        left.set_ylabel("Permutations")
        _shade(right, within, written=k <= MAX_WRITTEN)
        right.set_xlim(-0.5, k - 0.5)
        right.set_aspect("equal")
        right.set_title("Mean cosine of true gradients")
        right.set_xlabel("Cluster")
        right.set_ylabel("Cluster")
        return to_svg(figure, "Validity of the proxy")


def draw_diversity(full: Array, selected: Array, batches: Mapping[str, Array]) -> str:
    """Draw n GD of every cluster and of its selected rows, and of batches of either kind."""
    with style():
        figure = new_figure(3.4)
        left, right = figure.subplots(1, 2, width_ratios=[1.25, 1])
        k = len(full)
        place = np.arange(k)
        left.vlines(place, full, selected, color=BLUE, linewidth=1.6, alpha=0.55)
        hollow = {"markerfacecolor": SURFACE, "markeredgecolor": BLUE, "markersize": 6.5}
        left.plot(place, full, "o", **hollow)
        left.plot(place, selected, "o", color=BLUE, markersize=6.5)
        known = [v for v in (*full, *selected) if np.isfinite(v)]
        left.set_ylim(1, 1 + 1.35 * (max([1.001, *known]) - 1))  # 1: all rows alike
        _marks_legend(left, "selected rows", "all rows", BLUE)
        left.set_xticks(_ticks(k))
        left.set_xlim(-0.6, k - 0.4)
        left.set_title("n \u00b7 GD of the clusters")
        left.set_xlabel("Cluster, largest first")
        left.set_ylabel("n \u00b7 GD")
        _spread(right, batches)
        right.set_title("B \u00b7 GD of the batches of an epoch")
        right.set_ylabel("B \u00b7 GD")
        return to_svg(figure, "Gradient diversity")


def _spread(axes: Axes, values: Mapping[str, Array]) -> None:
    """Draw every value as a dot and the means as bars, a column a name."""
    colours = dict(zip(values, (ORANGE, BLUE), strict=False))
    for place, (name, column) in enumerate(values.items()):
        known = column[np.isfinite(column)]
        aside = 0.5 * (np.linspace(0.5, 1.5, len(known)) * 1.618 % 0.5 - 0.25)
        axes.plot(place + aside, known, "o", color=colours[name], markersize=4, alpha=0.5)
        if len(known):
            mean = known.mean()
            axes.hlines(mean, place - 0.28, place + 0.28, color=colours[name], linewidth=2.4)
            axes.annotate(f"{mean:.2f}", (place + 0.31, mean), va="center", color=INK, fontsize=9)
    axes.set_xticks(range(len(values)), list(values))
    axes.set_xlim(-0.6, len(values) - 0.25)
    axes.margins(y=0.12)


def _marks_legend(axes: Axes, solid: str, hollow: str, colour: str) -> None:
    from matplotlib.lines import Line2D

    def mark(text: str, *, filled: bool) -> Line2D:
        face = colour if filled else SURFACE
        return Line2D(
            [], [], linestyle="none", marker="o", color=colour, markerfacecolor=face, label=text
        )

    handles: Sequence[Line2D] = (mark(solid, filled=True), mark(hollow, filled=False))
    axes.legend(
        handles=handles, frameon=False, loc="upper right", fontsize=9, handletextpad=0.2, ncols=2
    )
