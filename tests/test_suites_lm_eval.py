"""lm-eval on local tasks: paths, scores, several tasks, and the errors a user can cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster_sft import suites
from cluster_sft.errors import UserError
from cluster_sft.suites import Evaluation, Rule, lm_eval

MCQ = Path(__file__).parents[1] / "data/suites/stdlib-mcq"
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: !function helpers.question
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture
def suite(tmp_path) -> Path:
    """Two local tasks over the same four questions, one of them with a Python helper."""
    tasks = tmp_path / "suite" / "tasks"
    tasks.mkdir(parents=True)
    rows = [{"q": f"{i}", "choices": ["a", "b"], "answer": i % 2} for i in range(4)]
    (tasks / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tasks / "helpers.py").write_text("def question(doc):\n    return 'Q ' + doc['q']\n")
    for name in ("first", "second"):
        text = TASK.format(name=name, data="rows.jsonl", metric="acc")
        (tasks / f"{name}.yaml").write_text(text)
    return tmp_path / "suite"


def evaluation(suite: Path, model: Path | str, tmp_path: Path, rule=None, **spec) -> Evaluation:
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    out.mkdir(exist_ok=True)
    scratch.mkdir(exist_ok=True)
    spec = {"kind": "lm_eval", "include": "tasks", **spec}
    rule = rule or Rule(dtype="fp32")
    return Evaluation(suite, spec, rule, tmp_path, str(model), out, scratch)


def test_accuracy_is_the_mean_of_the_tasks_and_each_is_listed(suite, tiny_model_dir, tmp_path):
    tasks = ["first", "second"]
    scores = lm_eval.run(evaluation(suite, tiny_model_dir, tmp_path, tasks=tasks))
    samples = [
        json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()
    ]
    assert [s["task"] for s in samples] == ["first"] * 4 + ["second"] * 4
    for sample in samples:
        best = max(range(2), key=lambda i: sample["filtered_resps"][i][0])
        assert sample["acc"] == (best == sample["target"])
    by_name = {metric.name: metric for metric in scores.metrics}
    assert set(by_name) == {"lm_eval_acc", "first_acc", "second_acc"}
    whole, part = by_name["lm_eval_acc"], by_name["first_acc"]
    assert (whole.value, whole.n, part.n) == (sum(s["acc"] for s in samples) / 8, 8, 4)
    # Equal tasks: the error of the mean of two is that of one over sqrt 2.
    assert part.stderr is not None
    assert whole.stderr == pytest.approx(part.stderr / 2**0.5)


def test_same_run_again_gives_the_same_bytes_and_nothing_lands_in_the_home(
    suite, tiny_model_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "home")
    found = []
    for _ in range(2):
        scores = lm_eval.run(evaluation(suite, tiny_model_dir, tmp_path, tasks=["first"]))
        found.append((scores, (tmp_path / "out/samples.jsonl").read_bytes()))
    assert found[0] == found[1]
    assert not (tmp_path / "home").exists()


def test_questions_of_the_project_run_up_to_the_limit(tiny_model_dir, tmp_path):
    rule = Rule(dtype="fp32", limit=3)
    scores = lm_eval.run(
        evaluation(MCQ, tiny_model_dir, tmp_path, rule, tasks=["stdlib_mcq"], num_fewshot=0)
    )
    (metric,) = scores.metrics
    assert (metric.name, metric.n) == ("lm_eval_acc", 3)


def test_questions_of_the_project_are_distinct_and_balanced():
    text = (MCQ / "tasks/questions.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    answers = [row["answer"] for row in rows]
    assert len({row["question"] for row in rows}) == len(rows) == 40
    assert all(len(set(row["choices"])) == 4 for row in rows)
    # Any multiple of four questions is balanced, so that a limit is too.
    assert all(sorted(answers[i : i + 4]) == [0, 1, 2, 3] for i in range(0, 40, 4))


def test_copied_task_has_absolute_data_and_keeps_its_functions(suite, tmp_path):
    names = lm_eval.copy_tasks(suite / "tasks", tmp_path / "copy", cache=tmp_path / "cache")
    text = (tmp_path / "copy" / "first.yaml").read_text()
    assert names == ["first", "second"]
    assert f"test: {suite / 'tasks/rows.jsonl'}" in text
    assert "!function 'helpers.question'" in text


def test_include_of_lm_evals_own_task_becomes_its_file(suite, tmp_path):
    (suite / "tasks" / "own.yaml").write_text("include: lm_eval/medmcqa/medmcqa.yaml\ntask: own\n")
    lm_eval.copy_tasks(suite / "tasks", tmp_path / "copy", cache=tmp_path)
    line = next(
        line
        for line in (tmp_path / "copy/own.yaml").read_text().splitlines()
        if line.startswith("include:")
    )
    assert Path(line.removeprefix("include: ")).is_file()


def test_data_set_out_of_reach_is_an_error_with_a_remedy(suite, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text = TASK.format(name="away", data="rows.jsonl", metric="acc")
    text = text.replace("dataset_path: json", "dataset_path: nobody/nothing")
    (suite / "tasks/away.yaml").write_text(text)
    with pytest.raises(UserError, match=r"suite\.yaml: lm-eval cannot load away: .*data_files"):
        lm_eval.load_tasks(evaluation(suite, "model", tmp_path, tasks=["away"]))


def test_task_without_accuracy_is_an_error(suite, tiny_model_dir, tmp_path):
    text = TASK.format(name="first", data="rows.jsonl", metric="brier_score")
    text = text.replace("aggregation: mean", "aggregation: brier_score")
    (suite / "tasks/first.yaml").write_text(text)
    with pytest.raises(UserError, match="task first has no accuracy"):
        lm_eval.run(evaluation(suite, tiny_model_dir, tmp_path, tasks=["first"]))


def test_task_that_runs_generated_code_is_refused(suite, tmp_path):
    with (suite / "tasks/first.yaml").open("a") as file:
        file.write("unsafe_code: true\n")
    with pytest.raises(UserError, match="outside a sandbox; use a suite of kind evalplus"):
        lm_eval.load_tasks(evaluation(suite, "model", tmp_path, tasks=["first"]))


def test_chat_template_with_another_training_template_is_an_error(suite, tiny_model_dir, tmp_path):
    rule = Rule(dtype="fp32", template="alpaca")
    with pytest.raises(UserError, match=r"apply_chat_template needs model\.template: auto"):
        lm_eval.run(
            evaluation(
                suite, tiny_model_dir, tmp_path, rule, tasks=["first"], apply_chat_template=True
            )
        )


@pytest.mark.parametrize("tasks", [[], [3]])
def test_tasks_that_are_no_names_are_an_error(suite, tmp_path, tasks):
    with pytest.raises(UserError, match="tasks must be a list of names"):
        lm_eval.load_tasks(evaluation(suite, "model", tmp_path, tasks=tasks))


def test_missing_task_folder_and_broken_task_file_are_errors(suite, tmp_path):
    with pytest.raises(UserError, match="is no folder"):
        lm_eval.copy_tasks(suite / "gone", tmp_path / "copy", cache=tmp_path)
    (suite / "tasks/first.yaml").write_text("a: [")
    with pytest.raises(UserError, match=r"first\.yaml: cannot be read as YAML"):
        lm_eval.copy_tasks(suite / "tasks", tmp_path / "copy", cache=tmp_path)


def test_tasks_outside_the_suites_folder_count_in_its_key(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/suite.yaml").write_text("{kind: lm_eval, tasks: [t], include: ../shared}")
    assert suites.outside_files(tmp_path / "mine") == [tmp_path / "mine/../shared"]
