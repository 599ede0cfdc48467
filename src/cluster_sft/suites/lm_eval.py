"""Tasks of lm-eval, its own or local ones, by `lm_eval.simple_evaluate` on a loaded model."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_sft.errors import UserError, known_names
from cluster_sft.offline import NotFetchedError, is_absence, is_offline
from cluster_sft.suites import SPEC, Evaluation, Kind, Metric, Scores, _benchmarks, _task_files

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerBase

    from cluster_sft.rendering import Renderer

# Fixed, since the make-up of a batch decides how low-precision sums are rounded.
BATCH_ROWS = 8
ACCURACY = ("acc", "exact_match")  # what counts as a task's accuracy, in this order


def run(evaluation: Evaluation) -> Scores:
    """Score the model on the suite's tasks, on the first `limit` questions of each.

    With `apply_chat_template` questions are turns of the training template. `lm_eval_acc` is the
    unweighted mean of the tasks' accuracies, with the standard error of independent tasks,
    sqrt(sum se^2) / tasks; of several tasks each metric is listed too.

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
    render = renderer_of(evaluation, tokenizer) if chat else None
    model = load_model(evaluation.model, dtype=evaluation.params.dtype, device="auto")
    # Decorators hide the signatures of both from type checkers.
    simple_evaluate: Any = evaluator.simple_evaluate
    wrap: Any = huggingface.HFLM
    wrapped = wrap(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=BATCH_ROWS,
        softmax_dtype="float32",
    )
    if render:
        wrapped.apply_chat_template = render
    results = simple_evaluate(
        model=wrapped,
        tasks=list(tasks.values()),
        task_manager=manager,
        num_fewshot=evaluation.spec.get("num_fewshot"),
        limit=evaluation.params.limit,
        apply_chat_template=chat,
    )
    evaluation.write_samples(_samples(results["samples"]))
    return Scores(_metrics(results, evaluation.suite), details={"tasks": sorted(tasks)})


def renderer_of(
    evaluation: Evaluation, tokenizer: PreTrainedTokenizerBase
) -> Callable[..., str] | None:
    """Return what renders lm-eval's turns by a named template; None leaves it to the tokenizer.

    Raises:
        UserError: an unknown template, or "auto" and the tokenizer has none.
    """
    from cluster_sft.rendering import Renderer

    template = evaluation.params.template
    if template != "auto":
        return functools.partial(render_turns, Renderer.of(tokenizer, template=template))
    if not tokenizer.chat_template:
        raise UserError(
            f"{evaluation.suite / SPEC}: apply_chat_template needs a template, and the "
            "tokenizer has none; set model.template to one of its names"
        )
    return None


def render_turns(
    renderer: Renderer, turns: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
) -> str:
    """Return turns as the training template has them, up to where the answer starts.

    A system turn, lm-eval's description of a task, opens the first question: named templates begin
    with a line of their own that training never leaves out. Without `add_generation_prompt` the
    last turn is the answer's beginning.
    """
    messages = [dict(turn) for turn in turns]
    begun = "" if add_generation_prompt else messages.pop()["content"]
    if messages[0]["role"] == "system":
        description = messages.pop(0)["content"]
        messages[0]["content"] = f"{description.rstrip()}\n\n{messages[0]['content']}"
    return renderer.prompt(messages).text + begun


def load_tasks(evaluation: Evaluation) -> tuple[dict[str, Task], TaskManager]:
    """Return the suite's tasks by name, groups taken apart, with their data, and their manager.

    Raises:
        UserError: a task is unknown or runs model-written code, or its data are out of reach.
    """
    from datasets import disable_progress_bars
    from lm_eval.tasks import TaskManager

    suite, spec, where = evaluation.suite, evaluation.spec, evaluation.suite / SPEC
    wanted = spec["tasks"]
    local: list[str] = []
    folder = None
    if "include" in spec:
        folder = evaluation.scratch / "tasks"
        local = _task_files.copy(
            suite / spec["include"],
            folder,
            cache=evaluation.scratch / "datasets",
            data_files={task: suite / path for task, path in _data_files(spec).items()},
        )
    # Looking through lm-eval's thousands of tasks takes seconds.
    all_local = set(wanted) <= set(local)
    manager = TaskManager(include_path=folder, include_defaults=not all_local)
    if all_local:
        disable_progress_bars()
    try:
        tasks = manager.load(wanted)["tasks"]
    except Exception as error:  # of lm-eval, datasets, the Hub's client or a task's own code
        if is_offline() and is_absence(error):
            raise NotFetchedError(
                f"{where}: the data sets of {', '.join(wanted)} are not in the cache of data sets"
            ) from error
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"{where}: lm-eval cannot load {', '.join(wanted)}: {text}; check the names, connect "
            "to the network (HF_HUB_OFFLINE unset), or name local files under data_files"
        ) from error
    if unsafe := [name for name, task in tasks.items() if getattr(task, "UNSAFE_CODE", False)]:
        raise UserError(
            f"{where}: task {unsafe[0]} runs model-written code outside a sandbox; use a suite of "
            "kind evalplus"
        )
    return tasks, manager


def fetch(evaluation: Evaluation) -> list[Path]:
    """Bring the tasks' data sets into the cache of data sets; return their files there.

    Data sets made of local files lie in scratch and do not count.
    """
    scratch = evaluation.scratch.resolve()
    tasks, _ = load_tasks(evaluation)
    found = {
        Path(file["filename"]).resolve()
        for task in tasks.values()
        for split in task.dataset.values()
        for file in split.cache_files
    }
    return sorted(path for path in found if not path.is_relative_to(scratch))


def _data_files(spec: Mapping[str, Any]) -> Mapping[str, str]:
    return spec.get("data_files", {})


def _check(spec: Mapping[str, Any]) -> None:
    wanted, shots = spec["tasks"], spec.get("num_fewshot", 0)
    if not wanted or not all(name and isinstance(name, str) for name in wanted):
        raise UserError(f"tasks must be a list of names, got {wanted!r}")
    if shots < 0:
        raise UserError(f"num_fewshot must be at least 0, got {shots}")
    for task, path in _data_files(spec).items():
        if not isinstance(task, str) or not isinstance(path, str):
            raise UserError(f"data_files must map tasks to files, got {task!r}: {path!r}")
        _benchmarks.check_layout(task)
    if _data_files(spec) and shots:
        raise UserError(
            f"data_files hold the questions alone, so num_fewshot must be 0, got {shots}"
        )


def _files(suite: Path, spec: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yield the folder of task files, the local files that these name, and `data_files`."""
    where, local = suite / SPEC, []
    if "include" in spec:
        folder = suite / spec["include"]
        yield f"{where}: include", folder
        configs = _task_files.read(folder)
        yield from _task_files.local_files(folder, configs)
        local = _task_files.task_names(configs)
    for task, path in _data_files(spec).items():
        if task not in local:
            raise UserError(
                f"{where}: data_files: {task!r} is no task of the folder `include`; "
                f"{known_names(task, local)}"
            )
        yield f"{where}: data_files.{task}", suite / path


def _metrics(results: Mapping[str, Any], suite: Path) -> list[Metric]:
    tasks = sorted(results["samples"])
    accuracies, listed = [], []
    for task in tasks:
        found = {name: metric for name, metric in _task_metrics(results, task)}
        chosen = next((found[name] for name in ACCURACY if name in found), None)
        if chosen is None:
            raise UserError(
                f"{suite / SPEC}: task {task} has no accuracy (acc or exact_match), only "
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


KIND = Kind(
    run,
    options={
        "tasks": list,
        "include": str,
        "num_fewshot": int,
        "apply_chat_template": bool,
        "data_files": dict,
    },
    required=("tasks",),
    check=_check,
    files=_files,
    fetch=fetch,
)
