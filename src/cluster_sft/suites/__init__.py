"""Evaluation suites: a suite is a folder with a `suite.yaml`, a kind of suite is a file here.

Adding a suite is adding a folder `data/suites/NAME/`; `evaluate.suites` then accepts NAME. Adding a
kind is adding a file `KIND.py` here that defines `KIND`; the registry finds it by its name. Free of
torch: planning imports it, and each kind imports what it needs when it runs.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_sft.errors import UserError, known_names
from cluster_sft.yaml_files import read_mapping

SUITES = Path("data/suites")
SPEC = "suite.yaml"


@dataclass(frozen=True)
class Rule:
    """The parameters of an evaluation that a kind may read.

    Attributes:
        dtype: of the model's weights, bf16 or fp32.
        template: the training template, for prompts.
        limit: only so many rows, problems or questions; None for all.
        max_new_tokens: of each answer.
        allow_code_execution: whether model-written code may run.
    """

    dtype: str = "bf16"
    template: str = "auto"
    limit: int | None = None
    max_new_tokens: int = 512
    allow_code_execution: bool = False


@dataclass(frozen=True)
class Evaluation:
    """One suite to be run on one model.

    Attributes:
        suite: the suite's folder.
        spec: its suite.yaml, checked against the kind's options.
        params: what can change the scores.
        dataset: leaf of the prepared data.
        model: name of the model, or a directory.
        out: folder for `samples.jsonl`.
        scratch: folder for what may be lost.
        processes: how many sandboxes at a time.
    """

    suite: Path
    spec: Mapping[str, Any]
    params: Rule
    dataset: Path
    model: str
    out: Path
    scratch: Path
    processes: int = 1

    def write_samples(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write `samples.jsonl`: one JSON object for each thing the model was asked."""
        with (self.out / "samples.jsonl").open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False, sort_keys=True, default=str) + "\n")


@dataclass(frozen=True)
class Metric:
    """A score: its mean over `n` rows, problems or questions and the mean's standard error."""

    name: str
    value: float
    stderr: float | None
    n: int


@dataclass(frozen=True)
class Scores:
    """What a suite gave; with a `reason` it was not run and has no metrics."""

    metrics: list[Metric] = field(default_factory=list)
    reason: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)  # facts beside the scores


@dataclass(frozen=True)
class Kind:
    """A kind of suite.

    Attributes:
        run: scores a model.
        keys: the keys of `evaluate:` that can change its scores; others stay out of its cache key.
        options: keys of suite.yaml beside `kind`, with the type of each.
        required: those of them that must be given.
        check: raises a UserError if a spec's values make no sense; its path is put before.
        files: of a suite and its spec, the paths that it reads, each after the place that names it;
            those outside the suite's folder count in its cache key like those inside.
        fetch: brings what an evaluation reads from a network; returns those files.
    """

    run: Callable[[Evaluation], Scores]
    keys: tuple[str, ...] = ("limit",)
    options: Mapping[str, type | tuple[type, ...]] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    check: Callable[[Mapping[str, Any]], None] = lambda spec: None
    files: Callable[[Path, Mapping[str, Any]], Iterable[tuple[str, Path]]] = lambda suite, spec: []
    fetch: Callable[[Evaluation], list[Path]] = lambda evaluation: []


def kinds() -> list[str]:
    """Return the names of all kinds, sorted."""
    found = (path.stem for path in Path(__file__).parent.glob("*.py"))
    return sorted(name for name in found if not name.startswith("_"))


def get(kind: str) -> Kind:
    """Return the kind called `kind`.

    Raises:
        UserError: there is none; the nearest name is given.
    """
    if kind not in kinds():
        raise UserError(f"unknown kind of suite {kind!r}; {known_names(kind, kinds())}")
    return importlib.import_module(f"{__name__}.{kind}").KIND


def names() -> list[str]:
    """Return the names of all suites, sorted."""
    return sorted(path.parent.name for path in SUITES.glob(f"*/{SPEC}"))


def folder(name: str) -> Path:
    """Return the folder of the suite called `name`.

    Raises:
        UserError: there is none; the nearest name is given.
    """
    path = SUITES / name
    if not (path / SPEC).is_file():
        raise UserError(
            f"evaluate.suites: no suite {name!r}, {path / SPEC} does not exist; "
            f"{known_names(name, names())}"
        )
    return path


def read(suite: Path) -> dict[str, Any]:
    """Return the suite.yaml of a folder, checked against the options of its kind.

    Raises:
        UserError: it is missing, no YAML mapping, or it has an unknown, missing or mistyped key, or
            a value that its kind refuses.
    """
    path = suite / SPEC
    spec = read_mapping(path)
    if not isinstance(spec.get("kind"), str):
        raise UserError(f"{path}: must be a mapping with a key `kind`; known: {', '.join(kinds())}")
    try:
        options = get(spec["kind"])
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    for key, value in spec.items():
        if key == "kind":
            continue
        if key not in options.options:
            raise UserError(f"{path}: unknown key {key!r}; {known_names(key, options.options)}")
        wanted = options.options[key]
        # In Python True is an int; in a file of settings it is not.
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is int):
            raise UserError(f"{path}: {key} must be {_type_name(wanted)}, got {value!r}")
    if missing := [key for key in options.required if key not in spec]:
        raise UserError(f"{path}: kind {spec['kind']} needs the key {missing[0]!r}; add it")
    try:
        options.check(spec)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return spec


def kind(name: str) -> str:
    """Return the kind of the suite called `name`."""
    return read(folder(name))["kind"]


def keys(kind_name: str) -> tuple[str, ...]:
    """Return the keys of `evaluate:` that can change the scores of a kind."""
    return get(kind_name).keys


def outside_files(suite: Path) -> list[Path]:
    """Return the files and folders outside its own that the suite in a folder reads.

    Raises:
        UserError: its suite.yaml or a file of it has a fault, or names what does not exist.
    """
    spec, found, seen = read(suite), [], [suite.resolve()]
    for place, path in get(spec["kind"]).files(suite, spec):
        if not os.path.exists(path):  # unlike Path.exists, whatever is wrong with it
            raise UserError(f"{place}: {path} does not exist; put it there, or correct the path")
        if not any(path.resolve().is_relative_to(each) for each in seen):
            found.append(path)
            seen.append(path.resolve())
    return found


def _type_name(wanted: type | tuple[type, ...]) -> str:
    types = wanted if isinstance(wanted, tuple) else (wanted,)
    plain = {str: "text", int: "an integer", bool: "true or false"}
    plain |= {list: "a list", dict: "a mapping"}
    return " or ".join(plain.get(each, each.__name__) for each in types)
