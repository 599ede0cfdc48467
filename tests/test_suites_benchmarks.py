"""Published files of the medical benchmarks: every layout becomes what lm-eval's tasks read."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import polars as pl
import pytest

from cluster_sft import suites
from cluster_sft.errors import UserError
from cluster_sft.suites import Evaluation, Rule, _benchmarks, evalplus, lm_eval

OWN = Path(__file__).parents[1] / "data/suites"
PUBLISHED = Path(__file__).parents[2] / "shared/data"  # whole files, where they were fetched
needs_files = pytest.mark.skipif(not PUBLISHED.is_dir(), reason=f"no {PUBLISHED}")

MEDMCQA = {"question": "Q", "opa": "1", "opb": "2", "opc": "3", "opd": "4"}
MEDQA = {"question": "Q", "options": {"A": "1", "B": "2", "C": "3", "D": "4"}, "answer_idx": "C"}
MEDQA_READ = {"sent1": "Q", **{f"ending{i}": str(i + 1) for i in range(4)}, "label": 2}
PUBMEDQA = {"QUESTION": "Q", "CONTEXTS": ["a", "b"], "final_decision": "maybe"}
PUBMEDQA_READ = {
    "pubid": 7,
    "question": "Q",
    "context": {"contexts": ["a", "b"]},
    "final_decision": "maybe",
}
MMLU_READ = {"question": 'Q, "x"', "choices": ["1", "2", "3", "4"], "answer": 3}
LAYOUTS = {
    "medmcqa-lines": (
        "medmcqa",
        "".join(json.dumps({**MEDMCQA, "cop": cop, "exp": None}) + "\n" for cop in (4, 1)),
        [{**MEDMCQA, "cop": 3}, {**MEDMCQA, "cop": 0}],
    ),
    "medmcqa-hub": (
        "medmcqa",
        json.dumps([{**MEDMCQA, "cop": cop} for cop in (0, 3)]),
        [{**MEDMCQA, "cop": 0}, {**MEDMCQA, "cop": 3}],
    ),
    "medqa-lines": ("medqa_4options", json.dumps(MEDQA) + "\n\n", [MEDQA_READ]),
    "medqa-hub": ("medqa_4options", json.dumps([{**MEDQA_READ, "sent2": ""}]), [MEDQA_READ]),
    "pubmedqa-by-id": ("pubmedqa", json.dumps({"7": PUBMEDQA}, indent=1), [PUBMEDQA_READ]),
    "pubmedqa-hub": ("pubmedqa", json.dumps([PUBMEDQA_READ]), [PUBMEDQA_READ]),
    "mmlu-hub": ("mmlu_anatomy", json.dumps([{**MMLU_READ, "subject": "a"}]), [MMLU_READ]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_benchmark_layout_is_read_in_the_columns_of_the_task(tmp_path, layout):
    task, text, rows = LAYOUTS[layout]
    (tmp_path / "file.json").write_text(text)
    assert _benchmarks.read(task, tmp_path / "file.json") == rows


def test_benchmark_csv_without_header_is_read_plain_and_compressed(tmp_path):
    text = '"Q, ""x""",1,2,3,4,D\n'
    (tmp_path / "a.csv").write_text(text)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    found = [_benchmarks.read("mmlu_anatomy", tmp_path / name) for name in ("a.csv", "a.csv.gz")]
    assert found == [[MMLU_READ], [MMLU_READ]]


def test_benchmark_csv_may_hold_blank_lines_which_count(tmp_path):
    (tmp_path / "a.csv").write_text('\n"Q, ""x""",1,2,3,4,D\n\n')
    assert _benchmarks.read("mmlu_anatomy", tmp_path / "a.csv") == [MMLU_READ]
    (tmp_path / "a.csv").write_text('\n"Q, ""x""",1,2,3,4,E\n\n')
    with pytest.raises(UserError, match=r"row 2: .*got 'E'"):
        _benchmarks.read("mmlu_anatomy", tmp_path / "a.csv")


def test_benchmark_parquet_of_the_hub_is_read(tmp_path):
    pl.DataFrame([PUBMEDQA_READ]).write_parquet(tmp_path / "a.parquet")
    assert _benchmarks.read("pubmedqa", tmp_path / "a.parquet") == [PUBMEDQA_READ]


@pytest.mark.parametrize(
    ("task", "name", "text", "message"),
    [
        ("medmcqa", "a.json", json.dumps({**MEDMCQA, "cop": 2}), "neither 0 nor 4"),
        (
            "medmcqa",
            "a.json",
            json.dumps([{**MEDMCQA, "cop": c} for c in (0, 4)]),
            "both 0 and 4",
        ),
        ("medmcqa", "a.json", json.dumps([{**MEDMCQA, "cop": c} for c in (4, 5)]), "row 2: .*5"),
        ("medqa_4options", "a.json", json.dumps([{**MEDQA, "answer_idx": "AB"}]), "got 'AB'"),
        ("medqa_4options", "a.json", json.dumps([MEDMCQA]), "row 1: is no question of medqa"),
        ("pubmedqa", "a.json", json.dumps({"7": {**PUBMEDQA, "CONTEXTS": [3]}}), "got 3"),
        ("pubmedqa", "a.json", json.dumps({"7": {**PUBMEDQA, "CONTEXTS": "abc"}}), "a list"),
        ("mmlu_anatomy", "a.csv", "question,A,B,C,D,answer\n", "row 1: .*got 'answer'"),
        ("mmlu_anatomy", "a.csv", "Q,1,2,3,A\n", "needs 4 choices, got 3"),
        ("mmlu_anatomy", "a.csv", "", "holds no questions"),
        ("medmcqa", "a.json", '[{"question": "Q"}]', "row 1: .*KeyError: 'opa'"),
        ("mmlu_anatomy", "a.json", "{", "line 1: not valid JSON"),
        ("mmlu_anatomy", "a.json", '[\n{"question": "Q"},\n?]', "line 3: not valid JSON"),
        pytest.param(
            *("mmlu_anatomy", "a.json", "[" * 100_000, "line 1: not usable JSON .*recursion"),
            id="deep",
        ),
        (
            "pubmedqa",
            "a.json",
            json.dumps([{**PUBMEDQA, "id": float("inf")}]),
            "row 1: .*its id must be an integer, got inf",
        ),
        ("pubmedqa", "a.json", json.dumps([{**PUBMEDQA, "id": float("nan")}]), "got nan"),
        ("pubmedqa", "a.json", json.dumps([{**PUBMEDQA, "id": 7.5}]), "got 7.5"),
        ("pubmedqa", "a.json", json.dumps([{**PUBMEDQA_READ, "question": "\ud800"}]), "surrogate"),
        ("mmlu_anatomy", "a.parquet", "no", "cannot be read"),
        ("mmlu_anatomy", "a.txt", "x", "must be .json, .jsonl, .csv or .parquet"),
        ("medqa", "a.json", "[]", "task 'medqa' is not known; .*medqa_4options"),
    ],
)
def test_benchmark_file_with_a_fault_is_an_error_that_says_what(
    tmp_path, task, name, text, message
):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        _benchmarks.read(task, tmp_path / name)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (json.dumps({**MEDQA, "answer_idx": "E"}), "line 4: is no question of medqa_4options"),
        ("{", "line 4: not valid JSON"),
        pytest.param('{"a": ' * 100_000, "line 4: not usable JSON", id="deep"),
    ],
)
def test_benchmark_row_is_named_by_its_line_blank_ones_counted(tmp_path, second, message):
    (tmp_path / "a.jsonl").write_text(f"\n{json.dumps(MEDQA)}\n\n{second}\n")
    with pytest.raises(UserError, match=message):
        _benchmarks.read("medqa_4options", tmp_path / "a.jsonl")


def test_benchmark_file_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"gone\.json: no such file; data_files must"):
        _benchmarks.read("medmcqa", tmp_path / "gone.json")


def load(suite: str, tmp_path: Path, files: dict[str, Path]) -> dict[str, list]:
    """Return the answers that the project's suite expects, by task, offline."""
    spec = {**suites.read(OWN / suite), "data_files": {t: str(p) for t, p in files.items()}}
    asked = Evaluation(OWN / suite, spec, Rule(), tmp_path, "model", tmp_path, tmp_path)
    tasks, _ = lm_eval.load_tasks(asked)
    return {name: [t.doc_to_target(d) for d in t.test_docs()] for name, t in tasks.items()}


def test_pubmedqa_asks_the_authors_test_split_alone(tmp_path):
    first, *_ = (OWN / "pubmedqa/tasks/test_pmids.txt").read_text().split()
    rows = {"1": PUBMEDQA, first: {**PUBMEDQA, "final_decision": "no"}}
    (tmp_path / "own.json").write_text(json.dumps(rows))
    assert load("pubmedqa", tmp_path, {"pubmedqa": tmp_path / "own.json"}) == {"pubmedqa": ["no"]}
    (tmp_path / "own.json").write_text(json.dumps({"1": PUBMEDQA, "2": PUBMEDQA}))
    with pytest.raises(UserError, match="no question of PubMedQA's test split"):
        load("pubmedqa", tmp_path, {"pubmedqa": tmp_path / "own.json"})


@pytest.mark.parametrize("suite", ["medmcqa", "medqa", "pubmedqa", "mmlu-medical"])
def test_medical_suite_asks_in_the_training_template_without_examples(suite):
    spec = suites.read(OWN / suite)
    assert (spec["num_fewshot"], spec["apply_chat_template"]) == (0, True)
    included = {
        p.read_text().split("include: lm_eval/")[1].split()[0]
        for p in (OWN / suite / "tasks").glob("*.yaml")
    }
    assert len(included) == len(spec["tasks"])


SUBJECTS = {
    "anatomy": 135,
    "clinical_knowledge": 265,
    "college_biology": 144,
    "college_medicine": 173,
    "medical_genetics": 100,
    "professional_medicine": 272,
}


@needs_files
def test_medical_suites_read_the_published_files_whole(tmp_path):
    asked = {
        "medmcqa": {"medmcqa": "medmcqa/dev.json"},
        "medqa": {"medqa_4options": "medqa/phrases_no_exclude_test.jsonl"},
        "pubmedqa": {"pubmedqa": "pubmedqa/ori_pqal.json"},
        "mmlu-medical": {f"mmlu_{s}": f"mmlu_medical/{s}_test.csv" for s in SUBJECTS},
    }
    found: dict[str, list] = {}
    for suite, files in asked.items():
        found |= load(suite, tmp_path, {t: PUBLISHED / p for t, p in files.items()})
    assert {task: len(answers) for task, answers in found.items()} == {
        "medmcqa": 4183,
        "medqa_4options": 1273,
        "pubmedqa": 500,
        **{f"mmlu_{subject}": n for subject, n in SUBJECTS.items()},
    }
    truth = json.loads((PUBLISHED / "pubmedqa/test_ground_truth.json").read_text())
    assert Counter(found["pubmedqa"]) == Counter(truth.values())
    assert Counter(found["medmcqa"]) == {0: 1348, 1: 1085, 2: 925, 3: 825}


@needs_files
@pytest.mark.parametrize(
    ("suite", "file", "n"),
    [
        ("humaneval", "humaneval_plus/HumanEvalPlus.jsonl.gz", 164),
        ("humaneval", "humaneval_plus/HumanEvalPlus-Mini.jsonl.gz", 164),
        ("mbpp", "mbpp_plus/MbppPlus.jsonl.gz", 378),
    ],
)
def test_code_suites_read_evalplus_own_files(tmp_path, suite, file, n):
    spec = {**suites.read(OWN / suite), "problems": str(PUBLISHED / file)}
    asked = Evaluation(OWN / suite, spec, Rule(), tmp_path, "model", tmp_path, tmp_path)
    assert len(evalplus.read_problems(evalplus.problem_file(asked), spec["dataset"])) == n
