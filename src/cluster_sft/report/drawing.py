"""How every figure looks: palette, type, axes, and SVG text that is the same for the same input.

Colours follow Okabe and Ito (2008), told apart with every common colour vision; each strategy
keeps its colour and its marker in all figures. Text stays text: layout is computed with DejaVu
Sans, which Matplotlib ships and which is wider than the system fonts put in its place by a viewer.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, SURFACE = "#1f2328", "#636c76", "#d9dee3", "#ffffff"
LIMIT = "#a40e26"  # lines that bound: the capacity
FONTS = "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
STYLES = {  # strategy: (colour, marker)
    "cluster": ("#0072b2", "o"),
    "random": ("#d55e00", "s"),
    "uniform": ("#009e73", "^"),
    "full": ("#b0578d", "v"),
    "ifd": ("#b27b00", "P"),
    "less": ("#2f97d3", "X"),
    "s2l": ("#6a3d9a", "p"),
    "base": ("#7d8590", "D"),
}
SPARE = (("#5a7d2a", "h"), ("#7a5c3e", "<"), ("#3d5a80", ">"), ("#a23e48", "d"))
DARK = {  # every colour's counterpart on a dark page, at equal or better contrast
    INK: "#e6edf3",
    MUTED: "#9aa4af",
    GRID: "#30363d",
    SURFACE: "#14181d",
    LIMIT: "#ff8f8f",
    "#0072b2": "#4da8e2",
    "#d55e00": "#f28a3c",
    "#009e73": "#37c495",
    "#b0578d": "#dc94c0",
    "#b27b00": "#dfb040",
    "#2f97d3": "#9ad3f3",
    "#6a3d9a": "#b294e0",
    "#7d8590": "#8b949e",
    "#5a7d2a": "#9cc062",
    "#7a5c3e": "#c3a27f",
    "#3d5a80": "#8fb0d9",
    "#a23e48": "#e58d95",
}
WIDTH = 9.2  # inches, the width of the page's column


def styles(strategies: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return colour and marker of each strategy; names without their own take spares by name."""
    unknown = sorted(set(strategies) - set(STYLES))
    spare = {name: SPARE[i % len(SPARE)] for i, name in enumerate(unknown)}
    return {name: STYLES.get(name) or spare[name] for name in strategies}


@contextmanager
def style() -> Iterator[None]:
    """Apply the house style while a figure is built and saved."""
    import matplotlib

    settings: Any = {
        "font.family": "DejaVu Sans",
        "font.size": 9.5,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 8,
        "axes.labelsize": 9.5,
        "axes.labelcolor": MUTED,
        "axes.edgecolor": MUTED,
        "axes.facecolor": SURFACE,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.titlecolor": INK,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "text.color": INK,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "xtick.major.size": 3,
        "ytick.major.size": 0,
        "lines.solid_capstyle": "round",
        "lines.solid_joinstyle": "round",
        "figure.facecolor": SURFACE,
        "savefig.facecolor": SURFACE,
        "svg.fonttype": "none",
        "svg.hashsalt": "cluster-sft",
        "text.usetex": False,
    }
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings)
        yield


def new_figure(height: float, *, width: float = WIDTH) -> Figure:
    """Return an empty figure, in inches; it belongs to no window and no global state."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08, wspace=0.04, hspace=0.04)  # type: ignore[union-attr]
    FigureCanvasSVG(figure)
    return figure


def to_svg(figure: Figure, title: str) -> str:
    """Return a figure as SVG text without date, version or machine in it.

    `title` becomes the picture's accessible name.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    svg = buffer.getvalue()
    svg = re.sub(r"'DejaVu Sans'(, [^;\"]*sans-serif)?", FONTS, svg)
    return svg.replace("<svg ", '<svg role="img" ', 1)


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move positions apart to at least `gap`, in order and as little as a simple sweep can.

    Positions stay within [low, high] where they fit.
    """
    order = np.argsort(np.asarray(values, dtype=float), kind="stable")
    placed = np.clip(np.asarray(values, dtype=float)[order], low, high)
    blocks: list[list[float]] = []  # [mean, size] of runs that touch
    for value in placed:
        blocks.append([float(value), 1.0])
        while len(blocks) > 1:
            (below, size_below), (above, size_above) = blocks[-2], blocks[-1]
            reach = gap * (size_below + size_above) / 2
            if above - below >= reach:
                break
            size = size_below + size_above
            middle = (below * size_below + above * size_above) / size
            half = gap * (size - 1) / 2
            blocks[-2:] = [[min(max(middle, low + half), max(high - half, low + half)), size]]
    result = np.empty(len(placed))
    start = 0
    for middle, size in blocks:
        count = int(size)
        result[start : start + count] = middle + gap * (np.arange(count) - (count - 1) / 2)
        start += count
    out = np.empty(len(placed))
    out[order] = result
    return [float(v) for v in out]


def label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]], *, height: float) -> None:
    """Write each line's name right of its end: (x, y, text, colour), moved apart where they touch.

    The y limits must be final. `height` is the axes' height in inches, roughly.
    """
    low, high = axes.get_ylim()
    shares = [(y - low) / (high - low) for _, y, _, _ in ends]
    gap = 13.0 / 72 / height
    for (x, y, text, colour), share in zip(ends, spread(shares, gap, 0.0, 1.0), strict=True):
        axes.annotate(
            text,
            xy=(x, y),
            xytext=(1.015, share),
            textcoords="axes fraction",
            color=colour,
            va="center",
            annotation_clip=False,
        )


def thousands(value: float) -> str:
    """Return a count with thin-space groups, as 4 535."""
    return f"{round(value):,}".replace(",", "\u202f")
