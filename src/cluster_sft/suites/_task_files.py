"""Task files of lm-eval, copied with what is relative in them resolved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster_sft.errors import UserError
from cluster_sft.suites import _benchmarks

BUILT_IN = "lm_eval/"  # in `include:` of a local task file: lm-eval's own folder of tasks


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
        UserError: the folder does not exist, a task file is no YAML mapping, or a file of
            questions cannot be read.
    """
    if not source.is_dir():
        raise UserError(f"{source.parent / 'suite.yaml'}: include: {source} is no folder")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    names = []
    for path in sorted(target.rglob("*.yaml")):
        original = source / path.relative_to(target)
        try:
            config = yaml.load(original.read_text(encoding="utf-8"), Loader=_Loader)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"{original}: cannot be read as YAML: {error}") from error
        if not isinstance(config, dict):
            raise UserError(f"{original}: must be a mapping, as lm-eval's task files are")
        _make_absolute(config, original.parent.resolve(), cache.resolve())
        if file := (data_files or {}).get(str(config.get("task"))):
            _replace_data(config, file, path.with_suffix(".jsonl").resolve(), cache.resolve())
        path.write_text(yaml.dump(config, Dumper=_Dumper, allow_unicode=True), encoding="utf-8")
        names += [config["task"]] if isinstance(config.get("task"), str) else []
    return names


def _make_absolute(config: dict[str, Any], home: Path, cache: Path) -> None:
    from lm_eval import tasks

    if str(config.get("include", "")).startswith(BUILT_IN):
        config["include"] = str(Path(tasks.__path__[0], config["include"].removeprefix(BUILT_IN)))
    arguments = config.get("dataset_kwargs")
    if not isinstance(arguments, dict) or "data_files" not in arguments:
        return
    # The default cache tells files apart by name and time, and outlives this run.
    arguments.setdefault("cache_dir", str(cache))

    def absolute(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: absolute(each) for key, each in value.items()}
        if isinstance(value, list):
            return [absolute(each) for each in value]
        return str(home / value) if (home / value).exists() else value

    arguments["data_files"] = absolute(arguments["data_files"])


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
    assert isinstance(node, yaml.ScalarNode)
    return _Function(loader.construct_scalar(node))


def _write_function(dumper: yaml.SafeDumper, text: _Function) -> yaml.Node:
    return dumper.represent_scalar("!function", str(text))


_Loader.add_constructor("!function", _read_function)
_Dumper.add_representer(_Function, _write_function)
