"""Task files of lm-eval: what they read, and a copy with what is relative in them resolved."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster_sft.errors import UserError
from cluster_sft.suites import _benchmarks

BUILT_IN = "lm_eval/"  # in `include:` of a local task file: lm-eval's own folder of tasks
# As `dataset_path` these are no data sets but formats of the files that `data_files` names.
FORMATS = ("arrow", "csv", "json", "parquet", "text")


def read(folder: Path) -> dict[Path, dict[str, Any]]:
    """Return the task files of a folder and what they include of it, by their path in it.

    Raises:
        UserError: there is no such folder, a file is no YAML mapping, or it includes what is
            neither in the folder nor one of lm-eval's own files.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: is no folder of task files; correct include in suite.yaml")
    found: dict[Path, dict[str, Any]] = {}
    todo = [path.relative_to(folder) for path in folder.rglob("*.yaml")]
    while todo:
        name = todo.pop()
        if name not in found:
            found[name] = _parsed(folder / name)
            todo += _included(found[name], name, folder)
    return dict(sorted(found.items()))


def task_names(configs: Mapping[Path, Mapping[str, Any]]) -> list[str]:
    """Return the names of the tasks that the task files of a folder define."""
    tasks = [config.get("task") for name, config in configs.items() if name.suffix == ".yaml"]
    return [task for task in tasks if isinstance(task, str)]


def local_files(folder: Path, configs: Mapping[Path, dict[str, Any]]) -> Iterator[tuple[str, Path]]:
    """Yield what a folder's task files read from this machine, each after the place that names it.

    `data_files` are looked up beside their task file, `dataset_path` and `data_dir` where lm-eval
    does, in the current folder. Names that are not there are the Hub's, except the files of a
    format.

    Raises:
        UserError: a task file's `data_files` are no names.
    """
    for name, config in configs.items():
        for task in _tasks(config):
            yield from _local_files(folder / name, task)


def _local_files(path: Path, task: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    arguments, data_set = _arguments(task), task.get("dataset_path")
    where = f"{path}: dataset_kwargs.data_files"
    is_format = data_set in FORMATS and "data_dir" not in arguments
    for file in _names(arguments.get("data_files") or [], where):
        if os.path.exists(path.parent / file) or (is_format and "://" not in file):
            yield where, path.parent / file
    folders = {
        "dataset_path": None if data_set in FORMATS else data_set,
        "dataset_kwargs.data_dir": arguments.get("data_dir"),
    }
    for key, value in folders.items():
        if value and isinstance(value, str) and os.path.exists(value):
            yield f"{path}: {key}", Path(value)


def _tasks(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the task or group of a file, and the tasks that stand inside it."""
    yield config
    for inner in (config.get("task"), config.get("task_list")):
        for each in inner if isinstance(inner, list) else []:
            if isinstance(each, dict):
                yield from _tasks(each)


def copy(
    source: Path, target: Path, *, cache: Path, data_files: Mapping[str, Path] | None = None
) -> list[str]:
    """Copy a folder of task files with its paths made absolute; return the names of its tasks.

    `data_files` that exist beside a task file become absolute, with `cache` as the cache of their
    data set; an `include:` that starts with `lm_eval/` becomes the file of lm-eval's own tasks.

    Args:
        source: the suite's folder of task files.
        target: is replaced.
        cache: for the data sets made of local files.
        data_files: task -> a benchmark's published file that takes the place of its data set.

    Raises:
        UserError: the folder or a task file has a fault, or a file of questions cannot be read.
    """
    configs = read(source)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    for name, config in configs.items():
        path = target / name
        for task in _tasks(config):
            _make_absolute(task, (source / name).parent.resolve(), cache.resolve())
        if file := (data_files or {}).get(str(config.get("task"))):
            _replace_data(config, file, path.with_suffix(".jsonl").resolve(), cache.resolve())
        path.write_text(yaml.dump(config, Dumper=_Dumper, allow_unicode=True), encoding="utf-8")
    return task_names(configs)


def _parsed(path: Path) -> dict[str, Any]:
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    # No such file or encoding, no YAML, a date that does not exist, nested too deeply.
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as YAML: {error}; repair it") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: must be a mapping, as lm-eval's task files are")
    return config


def _included(config: Mapping[str, Any], name: Path, folder: Path) -> Iterator[Path]:
    """Yield the files of a folder, by their path in it, that its task file `name` includes."""
    where = f"{folder / name}: include"
    for given in _names(config.get("include", []), where):
        own = given.startswith(BUILT_IN)
        file = Path(os.path.normpath(name.parent / given))
        if not own and (file.is_absolute() or file.parts[:1] == ("..",)):
            raise UserError(
                f"{where} must name a file of {folder}, relative to this one, or one of lm-eval's "
                f"own as {BUILT_IN}..., got {given!r}; put the file into the folder"
            )
        path = _built_in(given) if own else folder / file
        if not os.path.isfile(path):
            raise UserError(f"{where}: {path} does not exist; put it there, or correct the path")
        if not own:
            yield file


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    arguments = config.get("dataset_kwargs")
    return arguments if isinstance(arguments, dict) else {}


def _names(value: Any, where: str) -> list[str]:
    """Return the names in a text, or in lists and mappings of texts."""
    found: list[Any] = []
    _mapped(value, found.append)
    if wrong := [name for name in found if not isinstance(name, str)]:
        raise UserError(f"{where} must name files, got {wrong[0]!r}")
    return found


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return lists and mappings of names with each name changed."""
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    if isinstance(value, list):
        return [_mapped(each, change) for each in value]
    return change(value)


def _built_in(name: str) -> str:
    """Return the path of a file of lm-eval's own tasks, `name` itself if it is of none."""
    if not name.startswith(BUILT_IN):
        return name
    found = importlib.util.find_spec("lm_eval")  # importing it takes seconds
    assert found
    assert found.submodule_search_locations
    return str(Path(found.submodule_search_locations[0], "tasks", name.removeprefix(BUILT_IN)))


def _make_absolute(config: dict[str, Any], home: Path, cache: Path) -> None:
    if "include" in config:
        config["include"] = _mapped(config["include"], _built_in)
    arguments = _arguments(config)
    if not arguments.get("data_files"):
        return
    # The default cache tells files apart by name and time, and outlives this run.
    arguments.setdefault("cache_dir", str(cache))

    def absolute(name: str) -> str:
        return str(home / name) if os.path.exists(home / name) else name

    arguments["data_files"] = _mapped(arguments["data_files"], absolute)


def _replace_data(config: dict[str, Any], file: Path, rows: Path, cache: Path) -> None:
    """Let a task read the questions of `file`, which are written to `rows` in its columns."""
    questions = _benchmarks.read(config["task"], file)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in questions)
    rows.write_text(text, encoding="utf-8")
    splits = ("training_split", "validation_split", "fewshot_split")
    config |= {
        **dict.fromkeys(splits),  # explicitly none: those of an included task file count otherwise
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(rows)}, "cache_dir": str(cache)},
        "test_split": "test",
    }


class _Function(str):
    """The text after a `!function` tag."""


class _Loader(yaml.SafeLoader):
    """Reads task files with their `!function` tags unresolved."""


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads."""


def _read_function(loader: yaml.SafeLoader, node: yaml.Node) -> _Function:
    if not isinstance(node, yaml.ScalarNode):
        raise yaml.YAMLError(f"!function needs a name{node.start_mark}")
    return _Function(loader.construct_scalar(node))


def _write_function(dumper: yaml.SafeDumper, text: _Function) -> yaml.Node:
    return dumper.represent_scalar("!function", str(text))


_Loader.add_constructor("!function", _read_function)
_Dumper.add_representer(_Function, _write_function)
