"""params.yaml to nodes: the leaf and the cache key of every result, for both engines and the CLI.

A node is one result. Its *leaf* is a path that spells the ablated keys (axes) and nothing else; its
*key* is the digest of everything that can change it: typed parameters, keys of the nodes it reads,
parsed code, bytes of the files that it reads. A changed key is a missing stamp `key-<12 hex>`, so
neither file times nor an engine's memory matter. Free of torch: the Snakefile imports it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_sft import strategies
from cluster_sft.errors import UserError
from cluster_sft.nodes import Node, Planner, Suite, make_node
from cluster_sft.params import TOKEN, Section
from cluster_sft.params_files import typed
from cluster_sft.stages import (
    AXES,
    BASE,
    CHAIN,
    METHODS,
    NAMES,
    ROOT,
    SCORING,
    STAGES,
    get,
    replace,
    token,
)


@dataclass(frozen=True)
class Point:
    """One row of a report: a strategy at one place of the sweep, with the nodes that made it."""

    strategy: str
    raw: Mapping[str, Any]
    nodes: dict[str, Node]
    suites: dict[str, Node]
    axes: dict[str, Any]


def points(raw: Mapping[str, Any]) -> list[Point]:
    """Return base and strategies x sweep, in order, each distinct result once.

    Raises:
        UserError: a swept key is no axis, a value does not fit its key, or a strategy is unknown.
    """
    found: list[Point] = []
    seen: set[tuple[str, str]] = set()
    read: dict[str, Suite] = {}
    for configuration in configurations(raw):
        planners = [(axes, Planner(at, read)) for axes, at in _grid(configuration)]
        named = planners[0][1].params.select.strategies
        for name in named:
            strategies.get(name)  # `base` is no strategy: it is in every report
        for strategy in [BASE, *named]:
            for axes, planner in planners:
                point = _point(planner, strategy, axes)
                trained = point.nodes.get("train")
                mark = (str(configuration["name"]), trained.key if trained else BASE)
                if mark not in seen:
                    seen.add(mark)
                    found.append(point)
    return found


def configurations(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parameters whose points a report shows: `raw` alone, or its `configurations`.

    Raises:
        UserError: two have one name and so one folder.
    """
    found: list[Mapping[str, Any]] = list(raw.get("configurations") or [])
    names = [own["name"] for own in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"configurations: two files have the name {twice[0]!r}; give each its own")
    return found or [raw]


def configuration_of(leaf: str, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters that a leaf belongs to: `raw`, or of `configurations` the one named."""
    named = {str(own["name"]): own for own in configurations(raw)}
    return named.get(next(iter(Path(leaf).parts[1:]), ""), raw)


def _grid(raw: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    sweep = dict(raw.get("sweep") or {})
    if bad := [k for k in sweep if k not in AXES]:
        raise UserError(f"sweep: {bad[0]!r} is no axis; axes: {', '.join(AXES)}")
    for values in itertools.product(*sweep.values()):
        at: Mapping[str, Any] = raw
        for key, value in zip(sweep, values, strict=True):
            at = replace(at, key, value)
        typed(at, where="sweep")
        yield dict(zip(sweep, values, strict=True)), at


def _point(planner: Planner, strategy: str, axes: dict[str, Any]) -> Point:
    suite_nodes = {s: planner.node("evaluate", strategy, s) for s in planner.params.evaluate.suites}
    nodes = {s: planner.node(s) for s in ("prepare", "embed", "cluster")}
    if strategy == BASE:
        return Point(strategy, planner.raw, nodes, suite_nodes, {})
    nodes |= {s: planner.node(s, strategy) for s in ("select", "train", "diagnose")}
    for stage, step in METHODS.get(strategy, {}).items():
        nodes["score" if stage == "score" else f"score:{step}"] = planner.node(stage, strategy)
    return Point(strategy, planner.raw, nodes, suite_nodes, axes)


class ReportParams(Section):
    """What the report shows beside its inputs: its name, and which points in which order."""

    name: str
    study: str | None
    points: list[dict[str, Any]]


def report(raw: Mapping[str, Any], *, study: str | None = None) -> Node:
    """Return the report node: over strategies x sweep for a study, else over the strategies."""
    rows = points(raw if study else {**raw, "sweep": {}, "configurations": []})
    name = token(typed(raw).name)
    leaf = f"{ROOT}/{name}/" + (f"studies/{token(study)}" if study else "report")
    inputs: dict[str, Node] = {}
    described = []
    for row in rows:
        roles = {**row.nodes, **{f"evaluate:{s}": n for s, n in row.suites.items()}}
        for node in roles.values():
            inputs[node.leaf] = node
        described.append(
            {
                "strategy": row.strategy,
                "configuration": row.raw["name"],
                "ratio": get(row.raw, "select.ratio"),
                "seed": get(row.raw, "train.seed"),
                "axes": row.axes,
                "leaves": {role: node.leaf for role, node in roles.items()},
            }
        )
    return make_node(
        "report",
        leaf,
        ReportParams(name=name, study=study, points=described),
        inputs=inputs,
        files={},
        modules=["reporting"],
    )


def target(raw: Mapping[str, Any]) -> Node:
    """Return what a plain run makes: the study's report if `study` is set, else the report.

    Raises:
        UserError: a sweep without a study's name.
    """
    for key in ("sweep", "configurations"):
        if raw.get(key) and not raw.get("study"):
            raise UserError(f"{key}: needs a name for its report; set the key `study`")
    return report(raw, study=raw.get("study"))


def ancestry(node: Node) -> dict[str, Node]:
    """Return a node and everything upstream of it, by stamp, upstream first."""
    found: dict[str, Node] = {}
    for parent in node.parents:
        found |= ancestry(parent)
    return {**found, node.stamp: node}


def at(leaf: str, raw: Mapping[str, Any]) -> Node:
    """Return the node that a leaf's path names: axes from the path, all other keys from `raw`.

    Raises:
        UserError: the path is no leaf of this project, or of another `name`.
    """
    parts = Path(leaf).parts
    if parts[2:3] not in [("report",), ("studies",)]:
        raw = configuration_of(leaf, raw)
    name = typed(raw).name
    if len(parts) < 3 or parts[0] != ROOT or parts[1] != name:
        raise UserError(f"{leaf}: a leaf starts with {ROOT}/{name}/, the `name` in params.yaml")
    stage, slugs = parts[2], parts[3:]
    if stage == "report" and not slugs:
        return report(raw)
    if stage == "studies" and len(slugs) == 1:
        return report(raw, study=slugs[0])
    return _at(leaf, stage, slugs, raw)


def _at(leaf: str, stage: str, slugs: tuple[str, ...], raw: Mapping[str, Any]) -> Node:
    known = {"strategy": "", "suite": ""}
    if stage in SCORING and len(slugs) == 1:
        strategies.get(slugs[0])
        known = {"strategy": slugs[0], "suite": ""}
        raw = {**raw, "sweep": {}}
    elif stage == "evaluate" and slugs[:1] == (BASE,) and len(slugs) == 2:
        known = {"strategy": BASE, "suite": slugs[1]}
        raw = {**raw, "sweep": {}}
    elif stage not in CHAIN or len(slugs) != len(CHAIN[stage]):
        raise UserError(f"{leaf}: no such leaf; `cluster-sft ls` lists those of params.yaml")
    else:
        for part, upstream in zip(slugs, CHAIN[stage], strict=True):
            for key, text in _axes(leaf, part, STAGES[upstream].slug).items():
                if key in known:
                    known[key] = text
                else:
                    raw = replace(raw, key, _scalar(text))
    node = Planner(raw).node(stage, **known)
    if node.leaf != str(Path(leaf)):
        raise UserError(f"{leaf}: values are written otherwise there; did you mean {node.leaf}?")
    return node


def _axes(leaf: str, part: str, slug: str) -> dict[str, str]:
    literals, names = NAMES.split(slug)[::2], NAMES.findall(slug)
    match = re.fullmatch(f"({TOKEN.pattern})".join(map(re.escape, literals)), part)
    if not match:
        raise UserError(f"{leaf}: {part!r} is not of the form {slug}")
    return dict(zip(names, match.groups(), strict=True))


def _scalar(text: str) -> Any:
    """Return the scalar that a token spells; the leaf rebuilt from it must equal the one given."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)
