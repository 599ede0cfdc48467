"""Which differences between groups exceed their error, and which do not.

Errors are taken over evaluated items, and over seeds where there are several. Groups that answered
the same items are compared item by item, else as if they had answered different ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cluster_sft.report.pairing import Z, margin, paired_error
from cluster_sft.report.points import (
    CONFIGURATION,
    METRICS,
    Estimate,
    Group,
    Metric,
    setting,
    varying,
)
from cluster_sft.report.results import Results

REFERENCES = ("base", "full")  # outside the budget: shown, never ranked
ONE_DRAW = (
    "It is for these subsets: each was drawn once, and the luck of the draw (select.seed) is not "
    "in it."
)


@dataclass(frozen=True)
class Difference:
    """A metric of one group minus that of another, with the half-width of its 95 % interval."""

    metric: Metric
    group: Group
    other: Group
    value: float
    margin: float | None  # None where a suite gave no error
    paired: bool

    @property
    def outcome(self) -> Literal["better", "worse", "within error", "error unknown"]:
        """Say how `group` stands to `other`."""
        if self.margin is None:
            return "error unknown"
        if abs(self.value) <= self.margin:
            return "within error"
        return "better" if (self.value < 0) == self.metric.lower_is_better else "worse"


def compare(results: Results, group: Group, other: Group, metric: Metric) -> Difference | None:
    """Compare two groups on a metric; None where one of them has no score."""
    mine, theirs = group.estimates.get(metric.name), other.estimates.get(metric.name)
    if mine is None or theirs is None:
        return None
    value = mine.value - theirs.value
    error = paired_error(results.items, metric, group, other)
    if error is not None:
        half = margin(error, metric, (group, other))
        return Difference(metric, group, other, value, half, paired=True)
    errors = [_spread(metric, mine), _spread(metric, theirs)]
    known = [e for e in errors if e is not None]
    half = margin(math.hypot(*known), metric, (group, other)) if len(known) == 2 else None
    return Difference(metric, group, other, value, half, paired=False)


def _spread(metric: Metric, estimate: Estimate) -> float | None:
    """Return the standard error for comparing, which for shares never vanishes.

    8 of 8 has the estimated error 0. One success and one failure are added to every share, as in
    the interval of Agresti and Caffo (2000) for a difference of proportions.
    """
    if estimate.stderr is None or not metric.is_share or not estimate.n:
        return estimate.stderr
    share = (estimate.value * estimate.n + 1) / (estimate.n + 2)
    return max(estimate.stderr, math.sqrt(share * (1 - share) / (estimate.n + 2)))


def interval(metric: Metric, group: Group) -> tuple[float, float] | None:
    """Return the 95 % interval of a group's metric; None without a standard error.

    Its quantile is that of `margin`. Shares get Wilson's score interval (1927), widened where seeds
    or several suites make the reported error larger than a plain binomial one.
    """
    estimate = group.estimates[metric.name]
    p, n, error = estimate.value, estimate.n, estimate.stderr
    if error is None:
        return None
    half = margin(error, metric, [group])
    if not metric.is_share or not n:
        return p - half, p + half
    z = half / error if error else Z
    binomial = p * (1 - p) / n
    if 0 < binomial < error**2:
        n = n * binomial / error**2
    center = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return max(0.0, center - half), min(1.0, center + half)


def against(
    results: Results, strategy: str, other: str, *, metrics: Sequence[Metric] = METRICS
) -> list[Difference]:
    """Compare two strategies on every metric wherever they share ratio and axes."""
    found = [compare(results, a, b, m) for a, b in pairs(results, strategy, other) for m in metrics]
    return [difference for difference in found if difference is not None]


def differences(
    results: Results, other: str, *, metrics: Sequence[Metric] = METRICS
) -> list[Difference]:
    """Compare every strategy with `other`.

    `full` stands against `other` at each of its ratios; the untrained model, of which that would
    say nothing, only where `other` is one group.
    """
    found: list[Difference] = []
    for strategy in dict.fromkeys(g.strategy for g in results.groups if g.strategy != other):
        mine = against(results, strategy, other, metrics=metrics)
        if strategy != "base" or len({id(d.other) for d in mine}) == 1:
            found += mine
    return found


def pairs(results: Results, strategy: str, other: str) -> list[tuple[Group, Group]]:
    """Return the groups of two strategies that share ratio and axes.

    Where `other` has one value of an axis, as `random` of the weights, it stands for all values.
    """
    mine = [g for g in results.groups if g.strategy == strategy]
    theirs = [g for g in results.groups if g.strategy == other]
    names = [
        name
        for name in varying(results.groups)
        if name in ("ratio", CONFIGURATION) or len({setting(g, name) for g in theirs}) > 1
    ]
    return [(a, b) for a in mine for b in theirs if _comparable(a, b, names)]


def _comparable(a: Group, b: Group, names: Sequence[str]) -> bool:
    """Whether two groups share every setting; one that ignores an axis fits any of its values."""
    return all(
        setting(a, name) == setting(b, name) or None in (setting(a, name), setting(b, name))
        for name in names
    )


def best(results: Results, metric: Metric) -> set[int]:
    """Return the groups (positions) that beat every rival by more than the difference's error.

    Rivals have the same budget: the same data, rows and epochs. Groups outside it (base, full)
    neither rank nor rival.
    """
    ranked = [
        (i, g)
        for i, g in enumerate(results.groups)
        if g.strategy not in REFERENCES and metric.name in g.estimates
    ]
    winners = set()
    for i, group in ranked:
        rivals = [g for j, g in ranked if j != i and _budget(g) == _budget(group)]
        found = [compare(results, group, rival, metric) for rival in rivals]
        if found and all(d is not None and d.outcome == "better" for d in found):
            winners.add(i)
    return winners


def _budget(group: Group) -> tuple[object, ...]:
    """Return what groups must share for one of them to be the best of a column."""
    return (setting(group, CONFIGURATION), group.costs["rows"], setting(group, "train.epochs"))


def drawn_once(results: Results) -> bool:
    """Tell whether all points of every group train on one subset: their seeds are of training."""
    drawn = [
        {results.points[p].select for p in group.points}
        for group in results.groups
        if group.strategy not in REFERENCES
    ]
    return bool(drawn) and all(len(leaves) == 1 for leaves in drawn)
