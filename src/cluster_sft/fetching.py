"""`fetch`: bring what the plan of parameter files needs from a network, for nodes without one.

Models, data sets and problem files go where their own libraries keep them: the Hub's cache
(HF_HOME) and EvalPlus's (XDG_CACHE_HOME). What is there is kept as it is and not asked for again.
Whether it is there is told by the code that will read it, in a process that is offline as compute
nodes are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster_sft import plan, suites
from cluster_sft.errors import UserError
from cluster_sft.housekeeping import human_size
from cluster_sft.model_names import model_folder
from cluster_sft.nodes import Node
from cluster_sft.offline import VARIABLES, NotFetchedError
from cluster_sft.variables import python_path
from cluster_sft.yaml_files import read_mapping

MODELS = ("model", "s2l_model")
DATA = ("source", "targets")
STDERR = 2  # of this process, by its number


@dataclass(frozen=True)
class Need:
    """Something that may come from a network.

    Attributes:
        kind: model, data or suite.
        name: of the model; or the path of the descriptor, or of the suite's folder.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class Answer:
    """What came of a need: files, or why there are none.

    Attributes:
        place: the folder of the files; "" where the need is for no file from a network.
        size: bytes of the files.
        missing: what an offline process lacks.
        fault: any other error, which no fetching mends.
    """

    place: str = ""
    size: int = 0
    missing: str = ""
    fault: str = ""


def needs(raw: Mapping[str, Any]) -> list[Need]:
    """Return what the plan reads from elsewhere than this machine's own files, upstream first.

    Raises:
        UserError: the parameters make no plan.
    """
    found: dict[Need, None] = {}
    for node in plan.ancestry(plan.target(raw)).values():
        found |= dict.fromkeys(_of(node))
    return list(found)


def _of(node: Node) -> list[Need]:
    names = [getattr(node.params, role, None) for role in MODELS]
    found = [Need("model", n) for n in names if n and not model_folder(n)]
    found += [Need("data", str(p)) for r in DATA if (p := node.files.get(r)) and _is_remote(p)]
    if folder := node.files.get("suite"):
        found.append(Need("suite", str(folder)))
    return found


def _is_remote(path: Path) -> bool:
    return path.suffix.lower() in (".yaml", ".yml") and "hub" in read_mapping(path)


def fetch(raw: Mapping[str, Any]) -> None:
    """Bring all that is not there yet, and print where everything is.

    Raises:
        UserError: something cannot be brought, or an offline process does not find it afterwards.
    """
    wanted = needs(raw)
    answers = dict(zip(wanted, _ask(wanted, offline=True), strict=True))
    _refuse([a.fault for a in answers.values() if a.fault])
    missing = [need for need, answer in answers.items() if answer.missing]
    if missing:
        brought = _ask(missing, offline=False)
        _refuse([a.fault for a in brought if a.fault])
        forbidden = "and HF_HUB_OFFLINE is set; unset it to fetch"
        _refuse([f"{a.missing}, {forbidden}" for a in brought if a.missing])
        again = dict(zip(missing, _ask(missing, offline=True), strict=True))
        told = "was fetched, yet an offline process does not find it"
        _refuse([f"{n.name}: {told}: {a.missing}{a.fault}" for n, a in again.items() if _lacks(a)])
        answers |= again
    _show(answers, set(missing))


def _lacks(answer: Answer) -> bool:
    return bool(answer.missing or answer.fault)


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise UserError(faults[0] + more)


def _show(answers: Mapping[Need, Answer], fetched: set[Need]) -> None:
    rows = [
        ("fetched" if n in fetched else "there", n.kind, human_size(a.size), n.name, a.place)
        for n, a in answers.items()
        if a.place
    ]
    if not rows:
        print("nothing to fetch: these parameters need no network")
        return
    heads = ("state", "kind", "size", "what", "where")
    widths = [max(len(r[i]) for r in [heads, *rows]) for i in range(4)]
    for state, kind, size, what, where in [heads, *rows]:
        line = f"{state:<{widths[0]}}  {kind:<{widths[1]}}  {size:>{widths[2]}}  "
        print(f"{line}{what:<{widths[3]}}  {where}")
    total = human_size(sum(a.size for a in answers.values()))
    print(f"all is there, {total}: runs with launch.offline: true need no network")


def _ask(wanted: Sequence[Need], *, offline: bool) -> list[Answer]:
    """Return the answers of a process of its own: libraries read what is offline when imported."""
    if not wanted:
        return []
    environment = {**os.environ, **(dict.fromkeys(VARIABLES, "1") if offline else {})}
    environment["PYTHONPATH"] = python_path()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "answers.json")
        request = json.dumps(
            {"needs": [asdict(need) for need in wanted], "out": str(out), "check": offline}
        )
        # Downloads show their own progress; checks are but noise.
        done = subprocess.run(
            [sys.executable, "-m", __name__, request],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if offline else STDERR,
            stderr=subprocess.STDOUT if offline else None,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"fetching failed (exit {done.returncode}):\n{done.stdout or ''}")
        return [Answer(**answer) for answer in json.loads(out.read_text())]


def work(request: Mapping[str, Any]) -> None:
    """Be the process: bring each need, or with `check` find out whether it is there."""
    answers = []
    for each in request["needs"]:
        need = Need(**each)
        if not request["check"]:
            print(f"fetching {need.kind} {need.name}", flush=True)
        answers.append(asdict(_answer(need, check=request["check"])))
    Path(request["out"]).write_text(json.dumps(answers))


def _answer(need: Need, *, check: bool) -> Answer:
    try:
        files = {"model": _model_files, "data": _data_files, "suite": _suite_files}[need.kind](
            need.name, check
        )
    except NotFetchedError as error:
        return Answer(missing=error.what)
    except UserError as error:
        return Answer(fault=str(error))
    if not files:
        return Answer()
    place = os.path.commonpath([path.parent for path in files])
    return Answer(place, sum(path.stat().st_size for path in files))


def _model_files(name: str, check: bool) -> list[Path]:
    from cluster_sft import models

    if check and not models.is_converted(name):
        raise NotFetchedError(f"model {name!r}: is not converted yet")
    return [path for path in models.local_path(name).iterdir() if path.is_file()]


def _data_files(name: str, check: bool) -> list[Path]:
    from cluster_sft import descriptors

    table = descriptors.read(Path(name)).hub_table()
    return [Path(file["filename"]) for file in table.cache_files]


def _suite_files(name: str, check: bool) -> list[Path]:
    folder = Path(name)
    spec = suites.read(folder)
    with tempfile.TemporaryDirectory() as scratch:
        evaluation = suites.Evaluation(
            folder, spec, suites.Rule(), Path(), "", Path(), Path(scratch)
        )
        return suites.get(spec["kind"]).fetch(evaluation)


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
