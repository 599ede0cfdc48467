"""How points, axes and numbers are named wherever a report shows them."""

from __future__ import annotations

from collections.abc import Sequence

from cluster_sft.report.points import CONFIGURATION, Estimate, Group, Metric, setting

AXES = {  # axis: (short name in labels, title on an axis)
    CONFIGURATION: ("configuration", "Configuration"),
    "ratio": ("r", "Selection ratio r"),
    "cluster.k": ("K", "Clusters K"),
    "cluster.alpha": ("\u03b1", "Capacity factor \u03b1"),
    "cluster.seed": ("cluster seed", "Seed of the clustering"),
    "select.ranking": ("ranking", "Ranking inside clusters"),
    "select.seed": ("selection seed", "Seed of the selection"),
    "train.workers": ("W", "Logical workers W"),
    "train.weights": ("weights", "Loss weights"),
    "train.batches": ("batches", "Batches"),
    "train.learning_rate": ("lr", "Learning rate"),
    "train.epochs": ("epochs", "Epochs"),
    "train.global_batch_size": ("batch", "Global batch, rows"),
}


def axis_title(axis: str) -> str:
    """Return the title of a figure's axis for a swept key."""
    return AXES[axis][1] if axis in AXES else axis


def axis_name(axis: str) -> str:
    """Return the short name of a swept key, for labels and column heads."""
    return AXES[axis][0] if axis in AXES else axis


def settings_text(group: Group, names: Sequence[str]) -> str:
    """Return a group's values of the named settings, as `r 0.5, K 8`."""
    found = [(name, setting(group, name)) for name in names]
    words = [
        str(value) if name == CONFIGURATION else f"{axis_name(name)} {value}"
        for name, value in found
        if value is not None
    ]
    return ", ".join(words)


def label(group: Group, names: Sequence[str]) -> str:
    """Return a group's name: its strategy, with the settings that tell groups apart."""
    if group.strategy == "base":  # the model before training, which no other setting touches
        names = [name for name in names if name == CONFIGURATION]
    text = settings_text(group, names)
    return f"{group.strategy}, {text}" if text else group.strategy


def show(metric: Metric, value: float) -> str:
    """Return a score as people read it: percent with one decimal, nats with three."""
    return f"{metric.scale * value:.1f}" if metric.is_share else f"{value:.3f}"


def show_estimate(metric: Metric, estimate: Estimate | None) -> str:
    """Return a score with its standard error; an en dash where there is none."""
    if estimate is None:
        return "\u2013"
    text = show(metric, estimate.value)
    return text if estimate.stderr is None else f"{text} \u00b1 {show(metric, estimate.stderr)}"


def show_count(value: float | None) -> str:
    """Return a count with thousands separators."""
    return "\u2013" if value is None else f"{round(value):,}"


def show_duration(seconds: float | None) -> str:
    """Return a duration in the unit that suits it."""
    if seconds is None:
        return "\u2013"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
