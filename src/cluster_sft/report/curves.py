"""The figure of training losses, a curve a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from cluster_sft.report import drawing
from cluster_sft.report.labels import label
from cluster_sft.report.points import Group, varying
from cluster_sft.report.results import Results

FEW_CURVES = 3  # loss curves that still get their range over seeds and their single steps
MARKED_STEPS = 40  # measurements of a curve that are still marked one by one
ENDS_LABELLED = 10  # loss curves that still get a label each


def draw_loss(results: Results) -> str:
    """Draw the training loss of every group: each step thin, a running mean bold."""
    figure = drawing.new_figure(3.6)
    axes = figure.add_subplot()
    looks = drawing.styles([g.strategy for g in results.groups])
    ends: list[tuple[float, float, str, str]] = []
    names = varying(results.groups)
    curves = {id(g): _mean_curve(results.loss, g) for g in results.groups}
    drawn = [curve for curve in curves.values() if curve is not None]
    equal = len({int(steps[-1]) for steps, *_ in drawn}) == 1
    few = len(drawn) <= FEW_CURVES
    for group in results.groups:
        curve = curves[id(group)]
        if curve is None:
            continue
        steps, loss, low, high = curve
        if not equal:
            steps = 100 * steps / steps[-1]
        colour = looks[group.strategy][0]
        if len(group.points) > 1 and few:
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        smooth = _running_mean(loss, max(1, round(len(loss) / 25)))
        if smooth is not loss and few:
            axes.plot(steps, loss, color=colour, linewidth=0.8, alpha=0.35)
        axes.plot(steps, smooth, color=colour, linewidth=1.9)
        ends.append((float(steps[-1]), float(smooth[-1]), label(group, names), colour))
    axes.set_xlabel("Optimizer step" if equal else "Optimizer steps done, %")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylabel("Training loss, nats per token")
    axes.margins(x=0.01)
    axes.set_ylim(axes.get_ylim())
    if len(ends) > ENDS_LABELLED:
        ends = _one_label_a_strategy(results, ends, looks)
    drawing.label_ends(axes, ends, height=2.9)
    return drawing.to_svg(figure, "Training loss")


def draw_worker_cosine(results: Results) -> str:
    """Draw the mean cosine of the workers' gradients over training, a curve a group."""
    figure = drawing.new_figure(3.2)
    axes = figure.add_subplot()
    looks = drawing.styles([g.strategy for g in results.groups])
    names = varying(results.groups)
    curves = [(g, _mean_curve(results.loss, g, "worker_cosine")) for g in results.groups]
    last = results.loss.group_by("point").agg(pl.col("step").max())["step"]
    equal = last.n_unique() == 1
    ends: list[tuple[float, float, str, str]] = []
    for group, curve in curves:
        if curve is None:
            continue
        steps, cosine, _, _ = curve
        if not equal:
            mine = results.loss.filter(pl.col("point").is_in(list(group.points)))
            steps = 100 * steps / max(mine["step"].to_list())
        colour, marker = looks[group.strategy]
        few = len(steps) <= MARKED_STEPS
        axes.plot(steps, cosine, marker if few else "", linestyle="-", color=colour, markersize=4.5)
        ends.append((float(steps[-1]), float(cosine[-1]), label(group, names), colour))
    axes.set_xlabel("Optimizer step" if equal else "Optimizer steps done, %")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylabel("Cosine of the workers' gradients")
    axes.margins(x=0.02, y=0.12)
    axes.set_ylim(axes.get_ylim())
    if len(ends) > ENDS_LABELLED:
        ends = _one_label_a_strategy(results, ends, looks)
    drawing.label_ends(axes, ends, height=2.5)
    return drawing.to_svg(figure, "Cosine of the workers' gradients")


def _mean_curve(
    loss: pl.DataFrame, group: Group, name: str = "loss"
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Return steps, and a column's mean, lowest and highest over seeds; None without any step."""
    mine = loss.filter(pl.col("point").is_in(list(group.points)) & pl.col(name).is_not_null())
    if not len(mine):
        return None
    value = pl.col(name)
    rows = (
        mine.group_by("step")
        .agg(value.mean().alias("mean"), value.min().alias("low"), value.max().alias("high"))
        .sort("step")
    )
    steps, mean, low, high = (rows[name].to_numpy() for name in ("step", "mean", "low", "high"))
    return steps, mean, low, high


def _running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Return the centred mean over up to 2 width - 1 values, shorter at both ends."""
    if width == 1:
        return values
    total = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    reach = np.minimum(np.minimum(at, len(values) - 1 - at), width - 1)
    return (total[at + reach + 1] - total[at - reach]) / (2 * reach + 1)


def _one_label_a_strategy(
    results: Results,
    ends: Sequence[tuple[float, float, str, str]],
    looks: Mapping[str, tuple[str, str]],
) -> list[tuple[float, float, str, str]]:
    """Replace the labels of many curves by one a strategy, at the mean of their ends."""
    merged = []
    for strategy in dict.fromkeys(g.strategy for g in results.groups):
        colour = looks[strategy][0]
        mine = [end for end in ends if end[3] == colour]
        if mine:
            x, y = np.mean([end[:2] for end in mine], axis=0)
            merged.append((float(x), float(y), strategy, colour))
    return merged
