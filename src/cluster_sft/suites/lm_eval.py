"""Tasks of lm-eval, its own or local ones, by `lm_eval.simple_evaluate` on a loaded model."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from cluster_sft.errors import UserError
from cluster_sft.suites import Evaluation, Kind, Metric, Scores

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

# Fixed, since the make-up of a batch decides how low-precision sums are rounded.
BATCH_ROWS = 8
ACCURACY = ("acc", "exact_match")  # what counts as a task's accuracy, in this order
BUILT_IN = "lm_eval/"  # in `include:` of a local task file: lm-eval's own folder of tasks


def run(evaluation: Evaluation) -> Scores:
    """Score the model on the suite's tasks, on the first `limit` questions of each.

    `lm_eval_acc` is the unweighted mean of the tasks' accuracies, with the standard error of
    independent tasks, sqrt(sum se^2) / tasks; of several tasks each metric is listed too.

    Raises:
        UserError: a task is unknown, unsafe or without accuracy, or its data are out of reach.
    """
    from lm_eval import evaluator
    from lm_eval.models import huggingface

    from cluster_sft.models import load_model, load_tokenizer

    # Its warnings are about how it is called here, with a loaded model.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    tasks, manager = load_tasks(evaluation)
    tokenizer = load_tokenizer(evaluation.model)
    chat = evaluation.spec.get("apply_chat_template", False)
    if chat and (evaluation.params.template != "auto" or not tokenizer.chat_template):
        raise UserError(
            f"{evaluation.suite / 'suite.yaml'}: apply_chat_template needs model.template: auto "
            f"and a tokenizer with a template, got template {evaluation.params.template!r}"
        )
    model = load_model(evaluation.model, dtype=evaluation.params.dtype, device="auto")
    # Decorators hide the signatures of both from type checkers.
    simple_evaluate: Any = evaluator.simple_evaluate
    wrap: Any = huggingface.HFLM
    results = simple_evaluate(
        model=wrap(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=BATCH_ROWS,
            softmax_dtype="float32",
        ),
        tasks=list(tasks.values()),
        task_manager=manager,
        num_fewshot=evaluation.spec.get("num_fewshot"),
        limit=evaluation.params.limit,
        apply_chat_template=chat,
    )
    evaluation.write_samples(_samples(results["samples"]))
    return Scores(_metrics(results, evaluation.suite), details={"tasks": sorted(tasks)})


def load_tasks(evaluation: Evaluation) -> tuple[dict[str, Task], TaskManager]:
    """Return the suite's tasks by name, groups taken apart, with their data, and their manager.

    Raises:
        UserError: a task is unknown or runs model-written code, or its data are out of reach.
    """
    from datasets import disable_progress_bars
    from lm_eval.tasks import TaskManager

    where = evaluation.suite / "suite.yaml"
    wanted = evaluation.spec["tasks"]
    if not wanted or not all(isinstance(name, str) for name in wanted):
        raise UserError(f"{where}: tasks must be a list of names, got {wanted!r}")
    local: list[str] = []
    folder = None
    if include := evaluation.spec.get("include"):
        folder = evaluation.scratch / "tasks"
        local = copy_tasks(
            evaluation.suite / include, folder, cache=evaluation.scratch / "datasets"
        )
    # Looking through lm-eval's thousands of tasks takes seconds.
    all_local = set(wanted) <= set(local)
    manager = TaskManager(include_path=folder, include_defaults=not all_local)
    if all_local:
        disable_progress_bars()
    try:
        tasks = manager.load(wanted)["tasks"]
    except Exception as error:  # of lm-eval, datasets, the Hub's client or a task's own code
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"{where}: lm-eval cannot load {', '.join(wanted)}: {text}; check the names, connect "
            "to the network (HF_HUB_OFFLINE unset), or give local data_files in a task file"
        ) from error
    if unsafe := [name for name, task in tasks.items() if getattr(task, "UNSAFE_CODE", False)]:
        raise UserError(
            f"{where}: task {unsafe[0]} runs model-written code outside a sandbox; use a suite of "
            "kind evalplus"
        )
    return tasks, manager


def copy_tasks(source: Path, target: Path, *, cache: Path) -> list[str]:
    """Copy a folder of task files with its paths made absolute; return the names of its tasks.

    `data_files` that exist beside a task file become absolute, with `cache` as the cache of their
    data set; an `include:` that starts with `lm_eval/` becomes the file of lm-eval's own tasks.

    Raises:
        UserError: the folder does not exist or a task file is no YAML mapping.
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


def _metrics(results: Mapping[str, Any], suite: Path) -> list[Metric]:
    tasks = sorted(results["samples"])
    accuracies, listed = [], []
    for task in tasks:
        found = {name: metric for name, metric in _task_metrics(results, task)}
        chosen = next((found[name] for name in ACCURACY if name in found), None)
        if chosen is None:
            raise UserError(
                f"{suite / 'suite.yaml'}: task {task} has no accuracy (acc or exact_match), only "
                f"{', '.join(found) or 'no numbers'}; leave it out"
            )
        accuracies.append(chosen)
        listed += [Metric(f"{task}_{n}", m.value, m.stderr, m.n) for n, m in found.items()]
    errors = [metric.stderr for metric in accuracies]
    known = [error for error in errors if error is not None]
    whole = Metric(
        "lm_eval_acc",
        sum(metric.value for metric in accuracies) / len(tasks),
        math.sqrt(sum(e * e for e in known)) / len(tasks) if len(known) == len(tasks) else None,
        sum(metric.n for metric in accuracies),
    )
    return [whole, *listed] if len(listed) > 1 else [whole]


def _task_metrics(results: Mapping[str, Any], task: str) -> Iterator[tuple[str, Metric]]:
    """Yield a task's numeric metrics; the first filter keeps the metric's plain name."""
    values = results["results"][task]
    seen: set[str] = set()
    n = int(results["n-samples"][task]["effective"])
    for key, value in values.items():
        name, comma, filter_name = key.partition(",")
        if not comma or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = values.get(f"{name}_stderr,{filter_name}")
        finite = isinstance(error, int | float) and math.isfinite(error)
        label = name if name not in seen else f"{name}_{filter_name}"
        seen.add(name)
        yield label, Metric(label, float(value), float(error) if finite else None, n)


def _samples(samples: Mapping[str, list[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    for task in sorted(samples):
        for sample in samples[task]:
            kept = ("doc_id", "doc", "target", "filter", "filtered_resps", *sample["metrics"])
            yield {"task": task} | {name: sample[name] for name in kept}


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

KIND = Kind(
    run,
    options={
        "tasks": list,
        "include": str,
        "num_fewshot": int,
        "apply_chat_template": bool,
    },
    required=("tasks",),
    files=lambda spec: [spec["include"]] if "include" in spec else [],
)
