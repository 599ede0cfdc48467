"""What each method costs: passes, tokens, seconds, memory and bytes, for selection and training.

Selection is all that its subset needed beyond the prepared data: clusters only where a strategy
chooses, batches or weighs by them, embeddings only where it or its scorer reads them. Preparation
is shared by all methods and left out, as is evaluation. A method pays for the whole of what it
uses, even where another one had it computed already.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_sft import strategies
from cluster_sft.artifacts import SUMMARY, read_json
from cluster_sft.report.overview import manifest_of
from cluster_sft.report.points import Group, Point
from cluster_sft.report.results import Results

TRAIN = "train"


@dataclass(frozen=True)
class Cost:
    """What one or several stages cost, as `costs.Meter` states it."""

    forward_passes: float = 0
    backward_passes: float = 0
    tokens: float = 0
    seconds: float = 0
    peak_memory_bytes: float = 0
    bytes_stored: float = 0


@dataclass(frozen=True)
class Bill:
    """The cost of one group by step, in the order in which the steps run."""

    group: Group
    selection: Mapping[str, Cost]  # embed, cluster, steps of score, select
    training: Cost
    leaves: tuple[Path, ...]  # of selection, without select's own: equal ones are one computation

    @property
    def selected(self) -> Cost:
        """Return the cost of selection as a whole."""
        return total(list(self.selection.values()))

    @property
    def whole(self) -> Cost:
        """Return the cost of selection and training."""
        return total([*self.selection.values(), self.training])


def total(costs: Sequence[Cost]) -> Cost:
    """Add costs up; memory is the largest."""
    return Cost(
        sum(c.forward_passes for c in costs),
        sum(c.backward_passes for c in costs),
        sum(c.tokens for c in costs),
        sum(c.seconds for c in costs),
        max((c.peak_memory_bytes for c in costs), default=0),
        sum(c.bytes_stored for c in costs),
    )


def bills(results: Results) -> list[Bill]:
    """Return the cost of every trained group, averaged over its points.

    Raises:
        UserError: a leaf has no summary.
    """
    return [_bill(results, group) for group in results.groups if group.strategy != "base"]


def _bill(results: Results, group: Group) -> Bill:
    points = [results.points[p] for p in group.points]
    leaves = [selection_leaves(point) for point in points]
    steps = {step: _mean([read_cost(found[step]) for found in leaves]) for step in leaves[0]}
    trained = [read_cost(p.train) for p in points if p.train is not None]
    upstream = tuple(leaf for step, leaf in leaves[0].items() if step != "select")
    return Bill(group, steps, _mean(trained) if trained else Cost(), upstream)


def selection_leaves(point: Point) -> dict[str, Path]:
    """Return the leaves that a point's selection had to compute: step -> leaf, in order."""
    found: dict[str, Path] = {}
    uses_clusters = _uses_clusters(point)
    reads_embeddings = any("embeddings" in _inputs(leaf) for leaf in point.scores.values())
    if point.embed is not None and (uses_clusters or reads_embeddings):
        found["embed"] = point.embed
    if point.cluster is not None and uses_clusters:
        found["cluster"] = point.cluster
    found |= point.scores
    if point.select is not None:
        found["select"] = point.select
    return found


def _uses_clusters(point: Point) -> bool:
    """Tell whether a point's rows, batches or weights depend on clusters, not on K m alone.

    Rows do where the strategy's own batches are stratified, or a ranking inside clusters counts.
    """
    preset, taken = strategies.get(point.strategy), manifest_of(point.train).get("params", {})
    return (
        "stratified" in (preset.batches, taken.get("batches"))
        or taken.get("weights") == "cluster"
        or not {"cluster", "ranking"} & set(preset.ignores)
    )


def _inputs(leaf: Path) -> Mapping[str, Any]:
    return manifest_of(leaf).get("inputs", {})


def read_cost(leaf: Path) -> Cost:
    """Return what a leaf cost by its own summary.

    Raises:
        UserError: there is no summary.
    """
    return Cost(**read_json(leaf / SUMMARY)["cost"])


def _mean(costs: Sequence[Cost]) -> Cost:
    """Average costs over seeds; memory is the largest."""
    return Cost(
        statistics.fmean(c.forward_passes for c in costs),
        statistics.fmean(c.backward_passes for c in costs),
        statistics.fmean(c.tokens for c in costs),
        statistics.fmean(c.seconds for c in costs),
        max(c.peak_memory_bytes for c in costs),
        statistics.fmean(c.bytes_stored for c in costs),
    )
