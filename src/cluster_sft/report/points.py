"""Points and groups of a report, and the metrics that they carry.

A *point* is one trained model with its scores (or the untrained model, strategy `base`). Points
that differ in nothing but seeds form a *group*; its estimates are means over the seeds.
Points of several parameter files carry the file's name as the axis `configuration`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Value = str | float | int
CONFIGURATION = "configuration"


@dataclass(frozen=True)
class Metric:
    """One column of scores: where it stands in summary.csv and how people read it."""

    name: str
    stderr: str
    n: str
    title: str
    unit: str
    lower_is_better: bool = False
    scale: float = 1.0  # shown value = scale x stored value; 100 for shares in percent

    @property
    def phrase(self) -> str:
        """Return the title as it stands inside a sentence."""
        return self.title.replace("Held", "held", 1)

    @property
    def is_share(self) -> bool:
        """Tell whether the metric is a share of items, in [0, 1]."""
        return self.scale == 100.0


METRICS = (
    Metric(
        "heldout_nll",
        "heldout_nll_stderr",
        "heldout_n",
        "Held-out NLL",
        "nats per token",
        lower_is_better=True,
    ),
    Metric(
        "evalplus_base_pass1",
        "evalplus_base_stderr",
        "evalplus_n",
        "EvalPlus base pass@1",
        "%",
        scale=100.0,
    ),
    Metric(
        "evalplus_plus_pass1",
        "evalplus_plus_stderr",
        "evalplus_n",
        "EvalPlus plus pass@1",
        "%",
        scale=100.0,
    ),
    Metric("lm_eval_acc", "lm_eval_stderr", "lm_eval_n", "lm-eval accuracy", "%", scale=100.0),
)
COSTS = ("rows", "data_share", "train_tokens", "train_seconds")
CONTRACT = (
    *("strategy", "ratio", "seed", *COSTS),
    *("heldout_nll", "heldout_nll_stderr", "heldout_n"),
    *("evalplus_base_pass1", "evalplus_plus_pass1", "evalplus_n"),
    *("lm_eval_acc", "lm_eval_stderr", "lm_eval_n"),
)


@dataclass(frozen=True)
class Point:
    """One row of the summary: a strategy under its settings, and the leaves that hold its facts.

    `axes` are the swept keys other than strategy, ratio and train.seed. The untrained model is the
    point with strategy `base`, which has no select and train leaf.
    """

    strategy: str
    ratio: float | None = None
    seed: int | None = None
    axes: Mapping[str, Value] = field(default_factory=dict)
    cluster: Path | None = None
    select: Path | None = None
    train: Path | None = None
    evaluate: Mapping[str, Path] = field(default_factory=dict)
    prepare: Path | None = None
    embed: Path | None = None
    scores: Mapping[str, Path] = field(default_factory=dict)  # step of stage score -> its leaf
    diagnose: Path | None = None


@dataclass(frozen=True)
class Estimate:
    """A metric of a group: mean over its seeds, standard error, items, spread over seeds."""

    value: float
    stderr: float | None
    n: int | None
    sd: float | None  # sample standard deviation over seeds; None for a single seed


@dataclass(frozen=True)
class Group:
    """Points that differ in nothing but seeds."""

    strategy: str
    ratio: float | None
    axes: Mapping[str, Value]
    points: tuple[int, ...]  # positions in Results.points
    costs: Mapping[str, float | None]  # means of COSTS
    estimates: Mapping[str, Estimate]  # by metric name; absent where not run


def varying(groups: Sequence[Group]) -> tuple[str, ...]:
    """Return the settings that tell trained groups of one strategy apart: `ratio` and axes."""
    names = dict.fromkeys(["ratio", *(axis for group in groups for axis in group.axes)])
    trained = [group for group in groups if group.strategy != "base"]
    return tuple(
        name
        for name in names
        if len({v for g in trained if (v := setting(g, name)) is not None}) > 1
    )


def setting(group: Group | Point, name: str) -> Value | None:
    """Return a group's ratio or the value of one of its axes, None where it has none."""
    return group.ratio if name == "ratio" else group.axes.get(name)


def configurations(points: Sequence[Group | Point]) -> list[Value | None]:
    """Return the parameter files that points are of, in order; [None] where all are of one."""
    return list(dict.fromkeys(p.axes.get(CONFIGURATION) for p in points))
