"""Nodes: one result each, with its leaf and its cache key.

A key is the digest of everything that can change a result: the stage, its typed parameters, the
keys of the nodes that it reads, its parsed code, the bytes of the files that it reads. The leaf's
path spells the axes and nothing else.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_sft import descriptors, digests, formats, strategies, suites
from cluster_sft._named_templates import named_template
from cluster_sft.errors import UserError
from cluster_sft.model_names import PYPI, model_folder
from cluster_sft.params import EvaluateRule, Params, Section
from cluster_sft.params_files import typed
from cluster_sft.stage_params import TrainParams
from cluster_sft.stages import (
    BASE,
    CHAIN,
    NAMES,
    PER_STRATEGY,
    ROOT,
    SCORING,
    STAGES,
    Stage,
    get,
    spec_of,
    step_of,
    token,
)
from cluster_sft.yaml_files import read_mapping

CACHE = Path("work/digests")
WEIGHTS = ("*.safetensors", "*.bin")  # in a model directory, so large that samples are digested


@dataclass(frozen=True)
class Node:
    """One result: what makes it, where it lies, and the key that tells it from every other."""

    stage: str
    leaf: str
    key: str
    params: Section
    inputs: dict[str, Node] = field(default_factory=dict)  # role -> the node read there
    order: tuple[Node, ...] = ()  # must exist first, yet cannot change the result
    files: dict[str, Path] = field(default_factory=dict)  # role -> file or folder read
    code: str = ""
    identity: dict[str, Any] = field(default_factory=dict)
    module: str = ""  # below cluster_sft, whose `run` makes it

    @property
    def stamp(self) -> str:
        """Return the path of the empty file that says: this leaf has this key."""
        return f"{self.leaf}/{stamp_name(self.key)}"

    @property
    def parents(self) -> tuple[Node, ...]:
        """Return every node that must exist before this one."""
        return tuple(dict.fromkeys((*self.inputs.values(), *self.order)))

    def __hash__(self) -> int:
        return hash(self.stamp)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self.stamp == other.stamp


def stamp_name(key: str) -> str:
    """Return the stamp's file name for a key."""
    return f"key-{key[:12]}"


@dataclass(frozen=True)
class Suite:
    """What planning needs of an evaluation suite: its kind, and the files that it reads by role."""

    kind: str
    files: dict[str, Path]

    @classmethod
    def read(cls, name: str) -> Suite:
        """Read the suite of a name."""
        folder = suites.folder(name)
        outside = {f"suite:{path}": path for path in suites.outside_files(folder)}
        return cls(suites.kind(name), {"suite": folder, **outside})


class Planner:
    """Builds the nodes of one set of raw parameters; each is built once.

    Args:
        raw: the parameters.
        known: suites that were read before, by name; others are added.
    """

    def __init__(self, raw: Mapping[str, Any], known: dict[str, Suite] | None = None) -> None:
        self.raw = raw
        self.params: Params = typed(raw)
        self._suites = {} if known is None else known
        self._made: dict[tuple[str, str], Node] = {}

    @property
    def k(self) -> int:
        """Return K: `auto` is the declared logical width, never the devices found."""
        k = self.params.cluster.k
        return self.params.train.workers if k == "auto" else k

    def node(self, stage: str, strategy: str = "", suite: str = "") -> Node:
        """Return the node of a stage, for a strategy and a suite where the stage has them."""
        scope = strategy if stage in PER_STRATEGY else ""
        found = self._made.get((stage, f"{scope}/{suite}"))
        if found is None:
            found = self._build(stage, scope, suite)
            self._made[stage, f"{scope}/{suite}"] = found
        return found

    def _build(self, stage: str, strategy: str, suite: str) -> Node:
        spec = spec_of(stage, strategy)
        values = {p: self._value(k, strategy) for p, k in spec.keys.items()}
        inputs, order = self._inputs(spec, stage, strategy)
        modules, dropped = [spec.module], set(spec.files)
        files = {name: Path(values[name]) for name in spec.files}
        if stage == "select":
            modules.append(f"strategies.{strategy}")
            dropped |= set(strategies.get(strategy).ignores)
        if stage == "evaluate":
            if suite not in self._suites:
                self._suites[suite] = Suite.read(suite)
            kind = self._suites[suite].kind
            files |= self._suites[suite].files
            modules.append(f"suites.{kind}")
            dropped |= set(EvaluateRule.model_fields) - set(suites.keys(kind))
            values["model"] = values["model"] if strategy == BASE else None
        if stage == "prepare":
            self._check_names()
        if "targets" in files:
            self._check_targets(files["targets"])
        files |= local_models(values)
        params = spec.params.model_validate(
            {k: v for k, v in values.items() if k in spec.params.model_fields}
        )
        if stage == "train":
            params = resolve_training(params, strategy)
            self._check_batch(params)
        return make_node(
            stage,
            self.leaf(stage, strategy, suite),
            params,
            inputs=inputs,
            order=order,
            files=files,
            modules=modules,
            ignored=dropped,
        )

    def _value(self, key: str, strategy: str) -> Any:
        if key == "strategy":
            return strategy
        if key == "cluster.k":
            return self.k
        value = get(self.params.model_dump(), key)
        return self.params.model.name if (key, value) == ("score.s2l.model", "auto") else value

    def _check_names(self) -> None:
        """Tell of an unknown format or template before a job starts."""
        if self.params.data.format != "auto":
            formats.get(self.params.data.format)
        if self.params.model.template != "auto":
            named_template(self.params.model.template)

    def _check_targets(self, path: Path) -> None:
        wanted = path.is_file() and descriptors.names_heldout(path)
        if wanted and not self.params.data.holdout:
            raise descriptors.no_heldout_rows(path)

    def _check_batch(self, params: TrainParams) -> None:
        if params.batches == "stratified" and params.global_batch_size < self.k:
            raise UserError(
                f"train.global_batch_size must be at least the number of clusters ({self.k}) for "
                f"stratified batches, got {params.global_batch_size}"
            )

    def _inputs(
        self, spec: Stage, stage: str, strategy: str
    ) -> tuple[dict[str, Node], tuple[Node, ...]]:
        """Return what is read, and what must only exist first: DVC knows no other dependency."""
        reads = {r: m for r, m in spec.reads.items() if (strategy, m) != (BASE, "train")}
        idle = [m for m in SCORING.get(stage, {}).values() if m not in reads.values()]
        if stage == "select" and "cluster" in strategies.get(strategy).ignores:
            idle.append(reads.pop("clusters"))
        if stage == "select" and not step_of("score", strategy):
            idle.append(reads.pop("scores"))
        inputs = {role: self.node(maker, strategy) for role, maker in reads.items()}
        return inputs, tuple(self.node(maker, strategy) for maker in idle)

    def leaf(self, stage: str, strategy: str = "", suite: str = "") -> str:
        """Return the leaf's path: stage first, then one slug a stage that it builds on."""
        known = {"strategy": strategy, "suite": suite}
        if stage in SCORING:
            parts = [token(strategy)]
        elif stage == "evaluate" and strategy == BASE:
            parts = [BASE, suite]
        else:
            parts = [
                NAMES.sub(lambda m: token(known.get(m[1]) or get(self.raw, m[1])), STAGES[s].slug)
                for s in CHAIN[stage]
            ]
        return "/".join([ROOT, token(self.params.name), stage, *parts])


def local_models(values: Mapping[str, Any]) -> dict[str, Path]:
    """Return the parameters that name a model directory on this machine, by role.

    Raises:
        UserError: a name that can only be a directory is none.
    """
    found = {}
    for role, key in (("model", "model.name"), ("s2l_model", "score.s2l.model")):
        if (name := values.get(role)) and (path := model_folder(name, key=key)):
            found[role] = path
    return found


def resolve_training(params: Section, strategy: str) -> TrainParams:
    """Return training's parameters with `auto` replaced by the strategy's preset.

    Raises:
        UserError: stratified batches of rows whose strategy knows no clusters.
    """
    assert isinstance(params, TrainParams)
    preset = strategies.get(strategy)
    if params.batches == "stratified" and "cluster" in preset.ignores:
        raise UserError(
            f"train.batches: stratified needs clusters, which strategy {strategy!r} ignores; set "
            f"it to auto, or take {strategy!r} out of select.strategies"
        )
    auto = {n: getattr(preset, n) for n in ("weights", "batches") if getattr(params, n) == "auto"}
    return params.model_copy(update={**auto, "strategy": strategy})


def make_node(
    stage: str,
    leaf: str,
    params: Section,
    *,
    inputs: Mapping[str, Node],
    order: tuple[Node, ...] = (),
    files: Mapping[str, Path],
    modules: list[str],
    ignored: set[str] | frozenset[str] = frozenset(),
    cache: Path = CACHE,
) -> Node:
    """Return the node with its key computed from all that can change its result."""
    identity = {
        k: _number(v) for k, v in params.model_dump(mode="json").items() if k not in ignored
    }
    for role, key in (("source", "data.source"), ("targets", "score.less.targets")):
        if role in files and files[role].is_dir():
            raise UserError(
                f"{files[role]}: {key} must name a file, got a folder; name the file in it"
            )
    code = digests.code_digest(modules)
    key = digests.digest(
        {
            "stage": stage,
            "params": {**identity, **_packaged(identity)},
            "inputs": {role: node.key for role, node in inputs.items()},
            "files": {role: content_digest(path, cache) for role, path in files.items()},
            "code": code,
        }
    )
    return Node(
        stage, leaf, key, params, dict(inputs), order, dict(files), code, identity, modules[0]
    )


def _packaged(identity: Mapping[str, Any]) -> dict[str, str]:
    """Return the version of the Python package that carries a model, if one does.

    A package that is missing has none here: planning needs no model.
    """
    found = {}
    for role in ("model", "s2l_model"):
        name = str(identity.get(role))
        # ValueError: no name at all
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
            if name.startswith(PYPI):
                version = importlib.metadata.version(name.removeprefix(PYPI))
                found[role] = f"{name}=={version}"
    return found


def _number(value: Any) -> Any:
    """Return numbers as floats where that is exact, so that 1 and 1.0 make one key."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if is_integer and abs(value) <= 2**53 else value


def content_digest(path: Path, cache: Path = CACHE) -> str:
    """Return the digest of a file, a suite's folder or a model directory that a stage reads.

    Raises:
        UserError: there is no such file.
    """
    if not path.exists():
        raise UserError(
            f"{path}: no such file; the key in params.yaml, or the flag, that names it must name "
            "one that exists"
        )
    if path.is_dir():
        is_model = (path / "config.json").is_file() and any(
            file for ending in WEIGHTS for file in path.glob(ending)
        )
        return (digests.sampled_digest if is_model else digests.tree_digest)(path, cache)
    found = digests.file_digest(path, cache)
    if path.suffix in (".yaml", ".yml") and read_mapping(path).get("corpus") == "python-stdlib":
        return digests.digest([found, sys.version])  # this corpus is the interpreter's own library
    return found
