"""Read params.yaml and its overlays: merged, checked, with faults in one line.

Legend: raw parameters are the mapping as it stands in the files, whose scalars print in paths.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from cluster_sft.errors import UserError
from cluster_sft.params import Params, Section
from cluster_sft.yaml_files import read_mapping

REPLACED = ("sweep", "fields")  # mappings whose keys are the user's own


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `over` laid on it; sections merge, everything else is replaced."""
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merge(out[key], value) if both and key not in REPLACED else value
    return out


def load(files: Sequence[Path]) -> dict[str, Any]:
    """Read and merge the files, later ones over earlier ones, and check the result.

    A file with every section, such as a preset, takes the place of one before it.

    Returns the raw mapping, whose scalars print in paths as they stand in the file; `typed` gives
    the typed view. In place of the files that `configurations` names stand their own mappings.

    Raises:
        UserError: a file or a key is at fault; the message names it.
    """
    read = [read_mapping(path) for path in files]
    first = max((i for i, given in enumerate(read) if _is_whole(given)), default=0)
    if undone := [
        path for path, given in zip(files[:first], read, strict=False) if not _is_whole(given)
    ]:
        raise UserError(
            f"{undone[0]}: has some sections only, and {files[first]}, which has all, would undo "
            "what it sets; name it after that file"
        )
    over: dict[str, Any] = {}
    for given in read[first + 1 :]:
        over = merge(over, given)
    raw = merge(read[first], over)
    where = ", ".join(str(f) for f in files[first:])
    check(raw, where=where)
    if named := raw.get("configurations"):
        if wrong := [name for name in named if not isinstance(name, str)]:
            raise UserError(f"{where}: configurations: must name parameter files, got {wrong[0]!r}")
        raw["configurations"] = [_configuration(Path(path), raw, over) for path in named]
    return raw


def _is_whole(given: Mapping[str, Any]) -> bool:
    fields = Params.model_fields.items()
    sections = [
        n for n, f in fields if isinstance(f.annotation, type) and issubclass(f.annotation, Section)
    ]
    return all(name in given for name in ("name", *sections))


def _configuration(path: Path, raw: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's parameters with strategies, study and sweep of `raw`, and its overlays."""
    shared = {
        "select": {"strategies": raw["select"]["strategies"]},
        "study": raw.get("study"),
        "sweep": raw.get("sweep") or {},
    }
    own = merge(merge(read_mapping(path), {k: v for k, v in over.items() if k != "name"}), shared)
    own = {**own, "configurations": []}
    check(own, where=str(path))
    return own


def check(raw: Mapping[str, Any], *, where: str) -> None:
    """Check types, and that every key is spelled out.

    Raises:
        UserError: a key is at fault or missing; the message gives the default.
    """
    for name, section in typed(raw, where=where):
        if isinstance(section, Section) and (missing := _missing(section, raw.get(name))):
            key, default = missing
            raise UserError(f"{where}: key '{name}.{key}' is missing; add it (default: {default})")


def _missing(section: Section, raw: object) -> tuple[str, str] | None:
    """Return a key that the file leaves to its default: DVC's templates need each spelled out."""
    given = raw if isinstance(raw, Mapping) else {}
    for key, value in section:
        if isinstance(value, Section):
            if found := _missing(value, given.get(key)):
                return f"{key}.{found[0]}", found[1]
        elif key not in given:
            return key, repr(value)
    return None


def typed(raw: Mapping[str, Any], *, where: str = "params.yaml") -> Params:
    """Return the typed parameters.

    Args:
        raw: the mapping, as merged.
        where: what says so, for messages: files, or the key that laid its values over them.

    Raises:
        UserError: an unknown key (the nearest name is given), a wrong type or a value out of range.
    """
    try:
        return Params.model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{where}: {describe(error, Params)}") from error


def describe(error: ValidationError, model: type[BaseModel]) -> str:
    """Return one line for the first fault: the key, the rule, the value got, the remedy."""
    faults = error.errors(include_url=False)
    first = faults[0]
    path = _path(first["loc"])
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        known = _fields(model, path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
        return f"unknown key {key!r}; {hint}"
    if first["type"] == "missing":
        return f"key {key!r} is missing; add it"
    rule = " or ".join(
        dict.fromkeys(
            re.sub(r"^(Value error, |Input )", "", f["msg"])
            for f in faults
            if _path(f["loc"]) == path
        )
    )
    if first["type"] == "value_error" and isinstance(first["input"], dict):
        return f"{key}: {rule}" if key else rule
    return f"{key}: {rule}, got {first['input']!r}"


def _path(location: tuple[int | str, ...]) -> list[str]:
    """Return the key's path without the names of union branches that pydantic puts into it."""
    branch = re.compile(r"(literal|constrained|float|int|none)\b")
    return [str(p) for p in location if not branch.match(str(p))]


def _fields(model: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        field = model.model_fields.get(part)
        inner = [field.annotation, *get_args(field.annotation)] if field else []
        model = next(
            (t for t in inner if isinstance(t, type) and issubclass(t, BaseModel)), Section
        )
    return list(model.model_fields)
