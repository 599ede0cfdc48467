"""The figure of how each stage's time grows with the rows of the data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.targets import Result


def draw_growth(found: dict[str, Result], path: Path) -> Path | None:
    """Draw the time of each stage over N, both on logarithmic axes; None without any result."""
    lines: dict[str, list[tuple[int, float]]] = {}
    if result := found.get("embedding"):
        lines["embed, tiny model"] = _line(result["growth"], "seconds")
    if result := found.get("clustering"):
        lines["cluster, whole fit"] = _line(result["growth"], "fit_seconds")
        lines["cluster, an iteration"] = _line(result["growth"], "per_iteration")
        if "peer_per_iteration" in result["growth"][0]:
            lines["k-means-constrained, an iteration"] = _line(
                result["growth"], "peer_per_iteration"
            )
        four = [a for a in result["assignments"] if a["k"] == 4]
        lines["assignment alone"] = _line(four, "ours_seconds")
        if "pot_seconds" in four[0]:
            lines["POT, assignment alone"] = _line(four, "pot_seconds")
    if result := found.get("selection"):
        chosen = [
            p for p in result["points"] if (p["part"], p["strategy"]) == ("choice", "cluster")
        ]
        lines["select"] = _line(chosen, "seconds")
    if not lines:
        return None
    with mpl.rc_context({"svg.hashsalt": "benchmarks", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(7.5, 4.5), layout="constrained")
        axes = figure.subplots()
        for name, points in lines.items():
            peer = name.startswith(("k-means", "POT"))
            axes.plot(*zip(*points, strict=True), "--s" if peer else "-o", label=name, markersize=4)
        axes.set(xscale="log", yscale="log", xlabel="rows N", ylabel="seconds")
        axes.grid(alpha=0.3)
        figure.legend(loc="outside right upper", frameon=False)
        figure.savefig(path, metadata={"Date": None})
    return path


def _line(points: Sequence[Result], name: str) -> list[tuple[int, float]]:
    return [(p["n"], p[name]["median"]) for p in points]
