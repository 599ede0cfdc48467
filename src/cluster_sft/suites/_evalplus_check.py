"""Score one model output with EvalPlus's own functions. Runs inside the sandbox, as its program.

stdin: JSON {dataset, problem, output, min_time_limit}; stdout: JSON {solution, base, plus, ...} or
{error}. It is process 1 of its own PID namespace: model-written code runs in children, which can
neither signal it, nor write to its memory, nor to its answer, nor read the problem's solution.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import types
from contextlib import suppress
from typing import Any

PR_SET_DUMPABLE = 4


def main() -> None:
    """Read the request, score it, write the answer."""
    # As an undumpable process it can be neither traced nor read by others of the same user.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    request = json.load(sys.stdin)
    answer = os.dup(1)
    silence = os.open(os.devnull, os.O_RDWR)
    os.dup2(silence, 0)
    os.dup2(silence, 1)

    def close_in_child() -> None:
        os.close(answer)
        os.dup2(silence, 2)

    os.register_at_fork(after_in_child=close_in_child)
    os.write(answer, json.dumps(score(**request)).encode())


def score(
    dataset: str, problem: dict[str, Any], output: str, min_time_limit: float
) -> dict[str, Any]:
    """Return the sanitised solution and its status ("pass", "fail", "timeout") per set of tests.

    The expected outputs are computed here, from the problem's canonical solution, with the times
    that EvalPlus's limits scale with. The plus tests run only where the base tests pass, since a
    solution counts as a plus pass only then; otherwise `plus` is None.
    """
    mbpp, sanitize_module = _import_evalplus_data()
    if dataset == "mbpp":
        for tests in ("base_input", "plus_input"):
            problem[tests] = mbpp.mbpp_deserialize_inputs(problem["task_id"], problem[tests])
    try:
        solution = sanitize_module.sanitize(output, entrypoint=problem["entry_point"])
    except (Exception, RecursionError):  # whatever a parser makes of arbitrary text
        solution = ""
    answer: dict[str, Any] = {"solution": solution, "plus": None}
    for tests in ("base", "plus"):
        try:
            expected, seconds = _expected(dataset, problem, f"{tests}_input")
        except Exception as error:  # the data set's own code, whatever it raises
            fault = f"its canonical solution raises {type(error).__name__}: {error}"
            return {"error": f"problem {problem['task_id']}: {fault}"}
        status, passed = _check(
            dataset, problem, solution, problem[f"{tests}_input"], expected, seconds, min_time_limit
        )
        answer |= {tests: status, f"{tests}_passed": passed, f"{tests}_tests": len(expected)}
        if status != "pass":
            break
    return answer


def _import_evalplus_data() -> tuple[types.ModuleType, types.ModuleType]:
    # evalplus.data imports `datasets` for a benchmark of its own, which is not used here: half a
    # second for each problem.
    stand_in = types.ModuleType("datasets")
    vars(stand_in)["load_dataset"] = None
    sys.modules.setdefault("datasets", stand_in)
    from evalplus import sanitize
    from evalplus.data import mbpp

    if sys.modules.get("datasets") is stand_in:
        del sys.modules["datasets"]
    return mbpp, sanitize


def _expected(dataset: str, problem: dict[str, Any], tests: str) -> tuple[list[Any], list[float]]:
    from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS
    from evalplus.gen.util import trusted_exec

    not_none = dataset == "mbpp" and problem["entry_point"] in MBPP_OUTPUT_NOT_NONE_TASKS
    outputs, seconds = trusted_exec(
        problem["prompt"] + problem["canonical_solution"],
        problem[tests],
        problem["entry_point"],
        record_time=True,
        output_not_none=not_none,
    )
    return list(outputs), list(seconds)


def _check(
    dataset: str,
    problem: dict[str, Any],
    solution: str,
    inputs: list[Any],
    expected: list[Any],
    seconds: list[float],
    min_time_limit: float,
) -> tuple[str, int]:
    from evalplus.eval import untrusted_check

    status, details = untrusted_check(
        dataset,
        solution,
        inputs,
        problem["entry_point"],
        expected=expected,
        atol=problem["atol"],
        ref_time=seconds,
        fast_check=True,
        min_time_limit=min_time_limit,
    )
    _end_other_processes()
    return status, sum(map(bool, details))


def _end_other_processes() -> None:
    """Kill and reap whatever the checked code started: in this namespace that is all but us."""
    assert os.getpid() == 1, "only process 1 of a PID namespace may signal everything"
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


if __name__ == "__main__":
    main()
