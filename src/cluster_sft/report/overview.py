"""What stands around the scores: rows, clusterings, parameters and provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_sft.artifacts import MANIFEST, SUMMARY, read_json, read_table
from cluster_sft.report.labels import axis_name, label
from cluster_sft.report.points import CONFIGURATION, Point, setting, varying
from cluster_sft.report.results import Results, selected_sizes

REASONS = {"max_samples": "beyond max_samples"}
MAX_SUBSETS = 12  # bars; more are left to the table


@dataclass(frozen=True)
class Step:
    """One bar of the way from the source to the training subsets."""

    name: str
    rows: int
    kind: str  # "total", "dropped", or a strategy's name


@dataclass(frozen=True)
class Clustering:
    """One cluster leaf: what was found, and what selection by `cluster` kept of it."""

    title: str
    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    capacity: int
    displaced: int
    usage_at_r1: float
    selected: tuple[int, ...]  # empty where no point of strategy `cluster` used it
    displaced_share: float | None = None  # of the rows that strategy `cluster` selected

    @property
    def k(self) -> int:
        """Return the number of clusters."""
        return len(self.sizes)

    @property
    def rows(self) -> int:
        """Return the number of clustered rows."""
        return sum(self.sizes)


@dataclass(frozen=True)
class Source:
    """One leaf behind the report: where it lies and the key of what it holds."""

    stage: str
    leaf: str
    key: str


def way(results: Results, clusterings: Sequence[Clustering]) -> list[Step]:
    """Return the rows of the source, each drop by reason, what is left, and each subset.

    Empty where points are of several sources, or of none.
    """
    sources = {p.prepare for p in results.points if p.prepare is not None}
    if len(sources) != 1:
        return []
    (prepare,) = sources
    kept = read_table(prepare, "dataset.parquet", ["id"]).height
    heldout = read_table(prepare, "heldout.parquet", ["id"]).height
    dropped = [Step(reason, rows, "dropped") for reason, rows in drops(prepare)]
    total = kept + heldout + sum(step.rows for step in dropped)
    steps = [Step("source", total, "total"), *dropped]
    if heldout:
        steps.append(Step("held out", heldout, "dropped"))
    steps.append(Step("training set", kept, "total"))
    if clusterings and (lost := kept - clusterings[0].rows):
        steps.append(Step("no finite embedding", lost, "dropped"))
    if len(clusterings) == 1:
        balanced = clusterings[0].k * min(clusterings[0].sizes)
        steps.append(Step("balanced clusters, r = 1", balanced, "total"))
    return [*steps, *_subsets(results)]


def drops(prepare: Path) -> list[tuple[str, int]]:
    """Return why rows of the source were dropped and how many, the commonest reason first."""
    reasons = read_table(prepare, "dropped.parquet", ["reason"])["reason"].value_counts()
    reasons = reasons.sort(["count", "reason"], descending=[True, False])
    names, counts = reasons["reason"].to_list(), reasons["count"].to_list()
    told = [REASONS.get(name) or str(name).replace("_", " ") for name in names]
    return list(zip(told, counts, strict=True))


def _subsets(results: Results) -> list[Step]:
    """Return a bar for every subset of its own strategy and size; none where they are too many."""
    names = varying(results.groups)
    steps: list[Step] = []
    seen: set[tuple[str, int]] = set()
    for group in results.groups:
        rows = group.costs["rows"]
        if rows is None or (group.strategy, round(rows)) in seen:
            continue
        seen.add((group.strategy, round(rows)))
        steps.append(Step(f"subset: {label(group, names)}", round(rows), group.strategy))
    return steps if len(steps) <= MAX_SUBSETS else []


def clusterings(points: Sequence[Point]) -> list[Clustering]:
    """Return each cluster leaf once, in the points' order, named by what tells them apart."""
    leaves = list(dict.fromkeys(p.cluster for p in points if p.cluster is not None))
    found = []
    for leaf in leaves:
        summary = read_json(leaf / SUMMARY)
        users = [p for p in points if p.cluster == leaf and p.strategy == "cluster"]
        selected = selected_sizes(users[0], summary["k"]) if users else []
        found.append(
            Clustering(
                title=_cluster_title(summary, next(p for p in points if p.cluster == leaf)),
                sizes=tuple(summary["sizes"]),
                weights=tuple(summary["weights"]),
                capacity=summary["capacity"],
                displaced=summary["displaced"],
                usage_at_r1=summary["usage_at_r1"],
                selected=tuple(selected),
                displaced_share=_displaced_share(users),
            )
        )
    return found


def _displaced_share(users: Sequence[Point]) -> float | None:
    """Return the share of displaced rows in the first subset of strategy `cluster`, if known."""
    leaf = users[0].select if users else None
    return read_json(leaf / SUMMARY).get("displaced_share") if leaf else None


def _cluster_title(summary: Mapping[str, Any], point: Point) -> str:
    swept = [k for k in point.axes if k.startswith("cluster.") and k != "cluster.k"]
    rest = [f"{axis_name(k)} = {point.axes[k]}" for k in swept if k != "cluster.alpha"]
    alpha = f"{axis_name('cluster.alpha')} = {summary['alpha']:g}"
    own = [str(name)] if (name := setting(point, CONFIGURATION)) is not None else []
    return ", ".join([*own, f"K = {summary['k']}", alpha, *rest])


def not_run(results: Results) -> list[tuple[str, str, str]]:
    """Return suite, reason, and the strategies concerned (`all` for everyone)."""
    everyone = len(results.points)
    rows = []
    grouped = results.skipped.group_by("suite", "reason", maintain_order=True).agg("point")
    for suite, reason, positions in grouped.iter_rows():
        names = dict.fromkeys(results.points[p].strategy for p in positions)
        rows.append((suite, reason, "all" if len(positions) == everyone else ", ".join(names)))
    return rows


def sources(points: Sequence[Point]) -> list[Source]:
    """Return every leaf behind the report with its key, once, stage by stage."""
    leaves: dict[Path, None] = {}
    for stage in ("prepare", "embed", "cluster", "select", "train"):
        leaves |= dict.fromkeys(leaf for p in points if (leaf := getattr(p, stage)) is not None)
    leaves |= dict.fromkeys(leaf for p in points for leaf in p.scores.values())
    leaves |= dict.fromkeys(leaf for p in points for leaf in p.evaluate.values())
    leaves |= dict.fromkeys(p.diagnose for p in points if p.diagnose is not None)
    found = []
    for leaf in leaves:
        manifest = manifest_of(leaf)
        if manifest:
            found.append(
                Source(manifest["stage"], _short(leaf, manifest["stage"]), manifest["key"])
            )
    return found


def _short(leaf: Path, stage: str) -> str:
    """Return a leaf's path from its stage on, which is the same in every checkout."""
    parts = leaf.parts
    return "/".join(parts[parts.index(stage) :]) if stage in parts else leaf.name


def parameters(points: Sequence[Point]) -> list[tuple[str, str, str]]:
    """Return stage, key and value (several where points differ), from the leaves' manifests."""
    values: dict[tuple[str, str], dict[str, None]] = {}
    for point in points:
        leaves = [
            *(getattr(point, s) for s in ("prepare", "embed", "cluster")),
            *point.scores.values(),
            *(getattr(point, s) for s in ("select", "train")),
            *point.evaluate.values(),
            point.diagnose,
        ]
        for leaf in leaves:
            if leaf is None or not (manifest := manifest_of(leaf)):
                continue
            for key, value in manifest["params"].items():
                values.setdefault((manifest["stage"], key), {})[_scalar(value)] = None
    return [(stage, key, ", ".join(found)) for (stage, key), found in values.items()]


def _scalar(value: Any) -> str:
    """Return a parameter as YAML spells it; whole floats as integers."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


def manifest_of(leaf: Path | None) -> dict[str, Any]:
    """Return a leaf's manifest; empty where the leaf was put together without one."""
    if leaf is None or not (leaf / MANIFEST).is_file():
        return {}
    return read_json(leaf / MANIFEST)
