"""EvalPlus scoring in the sandbox: right, sloppy, wrong and hostile answers."""

from __future__ import annotations

import gzip
import json
import textwrap
from pathlib import Path

import pytest

from cluster_sft import sandbox, suites
from cluster_sft.errors import UserError
from cluster_sft.offline import NotFetchedError
from cluster_sft.suites import Evaluation, evalplus

SMALL = Path(__file__).parents[1] / "data/suites/evalplus-small/problems.jsonl"


@pytest.fixture
def isolation(monkeypatch) -> None:
    if reason := sandbox.probe():
        pytest.skip(f"no sandbox here: {reason}")
    monkeypatch.setattr(evalplus, "MIN_TIME_LIMIT", 0.5)
    limits = sandbox.Limits(wall_seconds=15, cpu_seconds=8)
    monkeypatch.setattr(sandbox, "Limits", lambda: limits)


@pytest.fixture
def problems() -> list[dict]:
    return evalplus.read_problems(SMALL, "humaneval")


def problem(problems: list[dict], entry_point: str) -> dict:
    return next(p for p in problems if p["entry_point"] == entry_point)


def answer(problem: dict, code: str) -> dict:
    return evalplus.score_output("humaneval", problem, textwrap.dedent(code))


def test_canonical_solutions_of_the_small_suite_pass(isolation, problems):
    solutions = [p["prompt"] + p["canonical_solution"] for p in problems]
    answers = evalplus.score_outputs("humaneval", problems, solutions, processes=2)
    assert [(a["base"], a["plus"]) for a in answers] == [("pass", "pass")] * len(problems)


def test_plus_tests_of_the_small_suite_catch_what_its_base_tests_let_pass(isolation, problems):
    sloppy = problem(problems, "largest")
    found = answer(sloppy, "def largest(numbers):\n    return max(numbers)")
    assert (found["base"], found["plus"]) == ("pass", "fail")


def test_wrong_answer_fails_and_plus_is_not_run(isolation, problems):
    found = answer(problem(problems, "add"), "def add(a, b):\n    return 3")
    assert (found["base"], found["plus"], found["base_passed"]) == ("fail", None, 1)


def test_code_is_taken_out_of_the_text_around_it(isolation, problems):
    text = "Sure!\n```python\ndef add(a, b):\n    return a + b\n```\nIt adds (a and b."
    found = evalplus.score_output("humaneval", problem(problems, "add"), text)
    assert (found["solution"], found["plus"]) == ("def add(a, b):\n    return a + b", "pass")


@pytest.mark.parametrize("text", ["", "no code at all", "(" * 5000, "def add(", "\0", "é\ud800"])
def test_output_without_code_fails(isolation, problems, text):
    found = evalplus.score_output("humaneval", problem(problems, "add"), text)
    assert found["base"] == "fail"


HOSTILE = {
    "endless loop": "while True: pass",
    "loop that catches everything": """
        while True:
            try:
                while True: pass
            except BaseException: pass
        """,
    "memory": "held = [bytearray(1 << 28) for _ in range(1000)]",
    "fork bomb": """
        import ctypes
        while True: ctypes.CDLL(None).fork()
        """,
    "kills its parent and everything else": """
        import ctypes, os
        libc = ctypes.CDLL(None)
        for process in (os.getppid(), 1, -1): libc.kill(process, 9)
        """,
    "writes its own verdict": """
        import os
        verdict = b'{"base": "pass", "plus": "pass", "solution": ""}'
        for fd in range(256):
            try: os.write(fd, verdict)
            except OSError: pass
        """,
    "raises SystemExit": "raise SystemExit(0)",
    "leaves at once": "import os; os._exit(0)",
    "deep recursion": "f = lambda: f(); f()",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answer_does_not_pass_and_harms_nothing(isolation, problems, name):
    body = textwrap.indent(textwrap.dedent(HOSTILE[name]), "    ")
    found = answer(problem(problems, "add"), f"def add(a, b):\n{body}\n    return None\n")
    assert found["base"] != "pass"
    assert found["plus"] is None


def test_answer_cannot_read_the_problems_solution(isolation, problems):
    code = """
        import os
        def add(a, b):
            for fd in range(256):
                try: text = os.pread(fd, 1 << 20, 0)
                except OSError: continue
                if b"canonical_solution" in text: return a + b
            return None
        """
    assert answer(problem(problems, "add"), code)["base"] == "fail"


def test_mbpp_inputs_are_converted_as_evalplus_does(isolation):
    problem = {
        "task_id": "Mbpp/2",
        "prompt": '"""Write a function to find the shared elements of two tuples."""\n',
        "entry_point": "similar_elements",
        "canonical_solution": "def similar_elements(a, b):\n    assert type(a) is tuple\n"
        "    return tuple(set(a) & set(b))\n",
        "base_input": [[[3, 4, 5, 6], [5, 7, 4, 10]]],
        "plus_input": [[[1], [2]]],
        "atol": 0,
    }
    text = "def similar_elements(a, b):\n    return [x for x in a if x in b and type(a) is tuple]\n"
    found = evalplus.score_output("mbpp", problem, text)
    assert (found["base"], found["plus"]) == ("pass", "pass")


def test_problem_whose_own_solution_raises_is_an_error(isolation, problems):
    broken = problem(problems, "add") | {"canonical_solution": "    raise RuntimeError('oh')\n"}
    with pytest.raises(UserError, match=r"HumanEval/9001: its canonical solution raises .*oh"):
        evalplus.score_output("humaneval", broken, "def add(a, b):\n    return a + b\n")


def test_file_whose_first_solution_is_hidden_from_its_tests_is_an_error(isolation, problems):
    broken = problem(problems, "add") | {"entry_point": "int", "canonical_solution": "    pass\n"}
    with pytest.raises(UserError, match="canonical solution"):
        evalplus.check_scoring("humaneval", broken, SMALL)


def test_pass_at_1_has_the_binomial_standard_error():
    metric = evalplus.pass_at_1("m", [True, False, False, False])
    assert (metric.value, metric.n) == (0.25, 4)
    assert metric.stderr == pytest.approx((0.25 * 0.75 / 4) ** 0.5)


def test_problems_are_read_from_gzip_too(tmp_path, problems):
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress(SMALL.read_bytes() + b"\n\n"))
    assert evalplus.read_problems(path, "humaneval") == problems


def test_byte_order_mark_before_the_problems_is_no_fault(tmp_path, problems):
    (tmp_path / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + SMALL.read_bytes())
    assert evalplus.read_problems(tmp_path / "p.jsonl", "humaneval") == problems


def damaged(whole: bytes) -> dict[str, bytes]:
    return {
        "cut off": whole[:-20],  # EOFError
        "bits turned": whole[:10] + b"\x07" + whole[11:],  # zlib.error: no such kind of block
    }


@pytest.mark.parametrize("damage", damaged(b""))
def test_damaged_gzip_file_of_problems_is_an_error(tmp_path, damage):
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(damaged(gzip.compress(SMALL.read_bytes()))[damage])
    with pytest.raises(UserError, match=r"p\.jsonl\.gz: damaged compressed file \(.*fetch"):
        evalplus.read_problems(path, "humaneval")


def test_problem_in_another_encoding_is_named_by_its_line(tmp_path, problems):
    first = json.dumps(problems[0]).encode()
    (tmp_path / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + first + b"\n\n\xe9\n")
    with pytest.raises(UserError, match=r"p\.jsonl, line 3: byte 0xe9 is not UTF-8"):
        evalplus.read_problems(tmp_path / "p.jsonl", "humaneval")


def test_problem_that_stands_twice_is_named_by_its_line(tmp_path, problems):
    rows = [problems[0], problems[1], problems[0]]
    (tmp_path / "p.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match=r"line 5: task_id HumanEval/9001 stands on an earlier"):
        evalplus.read_problems(tmp_path / "p.jsonl", "humaneval")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not valid JSON"),
        pytest.param("[" * 100_000, "line 2: not usable JSON .*recursion", id="deep"),
        ("[]", "line 2: needs 'task_id'"),
        ('{"task_id": "HumanEval/1", "prompt": 3}', "line 2: needs 'prompt'"),
        ({"task_id": "Mbpp/1"}, "line 2: task_id must be HumanEval/NUMBER, got 'Mbpp/1'"),
        ({"base_input": []}, "line 2: base_input must hold at least one test"),
    ],
)
def test_line_that_is_no_problem_is_named(tmp_path, problems, line, message):
    path = tmp_path / "p.jsonl"
    bad = line if isinstance(line, str) else json.dumps(problems[1] | line)
    path.write_text(json.dumps(problems[0]) + "\n" + bad + "\n")
    with pytest.raises(UserError, match=message):
        evalplus.read_problems(path, "humaneval")


def test_empty_file_of_problems_is_an_error(tmp_path):
    (tmp_path / "p.jsonl").touch()
    with pytest.raises(UserError, match="holds no problems"):
        evalplus.read_problems(tmp_path / "p.jsonl", "humaneval")


def evaluation(suite: Path, tmp_path: Path, **spec: str) -> Evaluation:
    spec = {"kind": "evalplus", **spec}
    return Evaluation(suite, spec, None, tmp_path, "model", tmp_path, tmp_path)  # type: ignore


@pytest.mark.parametrize("path", ["gone.jsonl", "/nowhere/gone.jsonl"])
def test_missing_problem_file_is_an_error_when_the_suite_is_planned(tmp_path, path):
    text = f"kind: evalplus\ndataset: humaneval\nproblems: {path}\n"
    (tmp_path / "suite.yaml").write_text(text)
    with pytest.raises(UserError, match=r"suite\.yaml: problems: .*gone\.jsonl does not exist"):
        suites.outside_files(tmp_path)


def test_download_that_fails_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Port 9 of the loopback is closed, so that the download fails with or without a network.
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"cannot download its problems \(.*set `problems:`"):
        evalplus.problem_file(evaluation(tmp_path, tmp_path, dataset="humaneval"))
    assert list((tmp_path / "cache/evalplus").iterdir()) == []


def test_problems_are_downloaded_once_into_evalplus_cache(tmp_path, monkeypatch):
    # EvalPlus downloads by the module wget, which this one stands in for.
    (tmp_path / "wget.py").write_text(
        "import gzip, pathlib\n"
        "def download(url, out):\n"
        f"    with pathlib.Path({str(tmp_path)!r}, 'asked').open('a') as file:\n"
        "        file.write(url + '\\n')\n"
        "    pathlib.Path(out).write_bytes(gzip.compress(b'problems'))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    suite = evaluation(tmp_path, tmp_path, dataset="mbpp")
    found = {evalplus.problem_file(suite), *evalplus.fetch(suite)}
    assert found == {tmp_path / "cache/evalplus/MbppPlus-v0.2.0.jsonl"}
    assert [path.read_text() for path in found] == ["problems"]
    assert (tmp_path / "asked").read_text().count("MbppPlus.jsonl.gz") == 1


def test_cached_problems_are_found_offline_and_an_override_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setenv("HUMANEVAL_OVERRIDE_PATH", str(SMALL))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached = tmp_path / "evalplus" / "HumanEvalPlus-v0.1.10.jsonl"
    cached.parent.mkdir()
    cached.write_text("as if downloaded")
    found = evalplus.problem_file(evaluation(tmp_path, tmp_path, dataset="humaneval"))
    assert found == cached


def test_offline_run_without_problems_names_the_command_that_brings_them(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NotFetchedError, match=r"no .*HumanEvalPlus-v0.*run: cluster-sft fetch"):
        evalplus.problem_file(evaluation(tmp_path, tmp_path, dataset="humaneval"))


def test_problem_file_outside_the_folder_is_named_for_the_cache_key(tmp_path):
    far = tmp_path / "p.jsonl"
    far.touch()
    for name, path in (("inside", "p.jsonl"), ("outside", far), ("up", "../p.jsonl")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "p.jsonl").touch()
        text = f"kind: evalplus\ndataset: humaneval\nproblems: {path}\n"
        (tmp_path / name / "suite.yaml").write_text(text)
    assert suites.outside_files(tmp_path / "inside") == []
    assert suites.outside_files(tmp_path / "outside") == [far]
    assert suites.outside_files(tmp_path / "up") == [tmp_path / "up" / "../p.jsonl"]
