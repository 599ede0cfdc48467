"""lm-eval on local tasks: paths, scores, several tasks, and the errors a user can cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster_sft import suites
from cluster_sft.errors import UserError
from cluster_sft.rendering import Renderer, render_prompt
from cluster_sft.suites import Evaluation, Rule, _task_files, lm_eval

MCQ = Path(__file__).parents[1] / "data/suites/stdlib-mcq"
MEDMCQA = MCQ.parent / "medmcqa"
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
    names = _task_files.copy(suite / "tasks", tmp_path / "copy", cache=tmp_path / "cache")
    text = (tmp_path / "copy" / "first.yaml").read_text()
    assert names == ["first", "second"]
    assert f"test: {suite / 'tasks/rows.jsonl'}" in text
    assert "!function 'helpers.question'" in text


def test_include_of_lm_evals_own_task_becomes_its_file(suite, tmp_path):
    (suite / "tasks" / "own.yaml").write_text("include: lm_eval/medmcqa/medmcqa.yaml\ntask: own\n")
    _task_files.copy(suite / "tasks", tmp_path / "copy", cache=tmp_path)
    line = next(
        line
        for line in (tmp_path / "copy/own.yaml").read_text().splitlines()
        if line.startswith("include:")
    )
    assert Path(line.removeprefix("include: ")).is_file()


def test_questions_that_an_included_file_names_are_found(suite, tmp_path):
    """Such a file has no ending of its own, as lm-eval's have none."""
    text = TASK.format(name="first", data="rows.jsonl", metric="acc")
    (suite / "tasks/_shared").write_text(text.replace("task: first\n", ""))
    (suite / "tasks/first.yaml").write_text("include: _shared\ntask: first\n")
    tasks, _ = lm_eval.load_tasks(evaluation(suite, "model", tmp_path, tasks=["first"]))
    assert len(list(tasks["first"].test_docs())) == 4


def test_data_set_out_of_reach_is_an_error_with_a_remedy(suite, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text = TASK.format(name="away", data="rows.jsonl", metric="acc")
    text = text.replace("dataset_path: json", "dataset_path: nobody/nothing")
    (suite / "tasks/away.yaml").write_text(text)
    with pytest.raises(UserError, match=r"suite\.yaml: the data sets of away .* cluster-sft fetch"):
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


def test_questions_are_turns_of_the_training_template(
    suite, tiny_model_dir, tiny_tokenizer, tmp_path, monkeypatch
):
    seen: list[str] = []
    render = lm_eval.render_turns

    def spy(*arguments, **options):
        seen.append(render(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(lm_eval, "render_turns", spy)
    rule = Rule(dtype="fp32", template="alpaca", limit=1)
    lm_eval.run(
        evaluation(suite, tiny_model_dir, tmp_path, rule, tasks=["first"], apply_chat_template=True)
    )
    question = [{"role": "user", "content": "Q 0"}]
    assert set(seen) == {render_prompt(tiny_tokenizer, "alpaca", question)}


def test_description_opens_the_first_question_and_an_answer_may_be_begun(tiny_tokenizer):
    renderer = Renderer.of(tiny_tokenizer, template="magicoder")
    turns = [
        {"role": "system", "content": "About bones.\n\n"},
        {"role": "user", "content": "Which?"},
        {"role": "assistant", "content": "The"},
    ]
    text = lm_eval.render_turns(renderer, turns, add_generation_prompt=False)
    assert text.endswith("@@ Instruction\nAbout bones.\n\nWhich?\n\n@@ Response\nThe")
    assert text.startswith("You are an exceptionally intelligent coding assistant")


def test_chat_template_that_does_not_exist_is_an_error(suite, tiny_model_dir, tmp_path):
    from transformers import AutoTokenizer

    bare = AutoTokenizer.from_pretrained(tiny_model_dir)
    bare.chat_template = None
    asked = evaluation(suite, tiny_model_dir, tmp_path, tasks=["first"], apply_chat_template=True)
    with pytest.raises(UserError, match=r"tokenizer has none; set model\.template"):
        lm_eval.renderer_of(asked, bare)


def test_local_file_takes_the_place_of_the_data_set(tmp_path):
    """Without network: the project's suite would read the Hub."""
    file = tmp_path / "mine.json"
    row = {"question": "Q", "opa": "a", "opb": "b", "opc": "c", "opd": "d"}
    file.write_text("".join(json.dumps({**row, "cop": cop}) + "\n" for cop in (4, 1)))
    spec = {"tasks": ["medmcqa"], "num_fewshot": 0, "data_files": {"medmcqa": str(file)}}
    tasks, _ = lm_eval.load_tasks(evaluation(MEDMCQA, "model", tmp_path, **spec))
    docs = list(tasks["medmcqa"].test_docs())
    assert [tasks["medmcqa"].doc_to_target(doc) for doc in docs] == [3, 0]
    assert tasks["medmcqa"].doc_to_text(docs[0]) == (
        "Question: Q\nChoices:\nA. a\nB. b\nC. c\nD. d\nAnswer:"
    )


def plan(suite: Path, text: str = "tasks: [first]\ninclude: tasks\n") -> list[Path]:
    """Return what counts in the suite's key beside its folder."""
    (suite / "suite.yaml").write_text(f"kind: lm_eval\n{text}")
    return suites.outside_files(suite)


def test_local_files_that_fit_no_task_are_an_error(suite):
    with pytest.raises(UserError, match="'medmcqa' is no task of the folder `include`"):
        plan(suite, "tasks: [first]\ninclude: tasks\ndata_files: {medmcqa: x.json}\n")


def test_local_files_outside_the_suites_folder_count_in_its_key(suite):
    for path in (suite / "own.json", suite.parent / "q.json"):
        path.touch()
    for name in ("medmcqa", "pubmedqa"):
        (suite / f"tasks/{name}.yaml").write_text(f"task: {name}\n")
    text = "tasks: [medmcqa]\ninclude: tasks\ndata_files: {medmcqa: ../q.json, pubmedqa: own.json}"
    assert plan(suite, text) == [suite / "../q.json"]


@pytest.mark.parametrize("name", ["third.yaml", "_shared"])
def test_questions_of_a_task_file_outside_the_suites_folder_count_in_its_key(suite, name):
    (suite.parent / "far.jsonl").touch()
    text = TASK.format(name="third", data="../../far.jsonl", metric="acc")
    (suite / "tasks" / name).write_text(text)
    (suite / "tasks/fourth.yaml").write_text(f"include: {name}\ntask: fourth\n")
    assert plan(suite) == [suite / "tasks/../../far.jsonl"]


def test_folders_that_a_task_file_reads_count_in_its_key(suite, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("own/rows", "more"):
        (tmp_path / name).mkdir(parents=True)
    (suite / "tasks/third.yaml").write_text("task: third\ndataset_path: own/rows\n")
    text = f"task: fourth\ndataset_path: json\ndataset_kwargs: {{data_dir: {tmp_path / 'more'}}}\n"
    (suite / "tasks/fourth.yaml").write_text(text)
    assert sorted(plan(suite)) == [tmp_path / "more", Path("own/rows")]


def test_files_of_a_data_set_on_the_hub_are_left_to_it(suite):
    text = TASK.format(name="third", data="data/test.json", metric="acc")
    text = text.replace("dataset_path: json", "dataset_path: nobody/nothing")
    (suite / "tasks/third.yaml").write_text(text)
    text = TASK.format(name="fourth", data='"https://nowhere.example/q.jsonl"', metric="acc")
    (suite / "tasks/fourth.yaml").write_text(text)
    assert plan(suite) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TASK.format(name="first", data="gone.jsonl", metric="acc"), "gone.jsonl does not exist"),
        (TASK.format(name="first", data="[3]", metric="acc"), "data_files must name files, got 3"),
        ("task: first\ninclude: gone", "include: .*gone does not exist"),
        ("task: first\ninclude: [3]", "include must name files, got 3"),
        ("task: first\ninclude: ../suite.yaml", "relative to this one, .*put the file into the"),
        (f"task: first\ninclude: {MCQ / 'tasks/stdlib_mcq.yaml'}", "include must name a file of"),
        ("task: first\ninclude: lm_eval/medmcqa/gone.yaml", r"gone\.yaml does not exist"),
        ("task: first\ndoc_to_text: !function [a]", "!function needs a name"),
        ("task: first\nday: 2020-13-45", "cannot be read as YAML: month must be"),
        pytest.param("a: " + "[" * 1000, "cannot be read as YAML: maximum recursion", id="deep"),
        ("first", "must be a mapping"),
    ],
)
def test_task_file_with_a_fault_is_an_error_when_its_suite_is_planned(suite, text, message):
    (suite / "tasks/first.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        plan(suite)
    assert str(caught.value).startswith(f"{suite / 'tasks/first.yaml'}: ")


def test_missing_file_or_folder_of_the_suite_is_an_error_when_it_is_planned(suite):
    with pytest.raises(UserError, match=r"suite\.yaml: include: .*gone does not exist"):
        plan(suite, "tasks: [first]\ninclude: gone\n")
    with pytest.raises(UserError, match=r"first\.yaml: is no folder of task files"):
        plan(suite, "tasks: [first]\ninclude: tasks/first.yaml\n")
    (suite / "tasks/medmcqa.yaml").write_text("task: medmcqa\n")
    with pytest.raises(UserError, match=r"data_files\.medmcqa: .*gone\.json does not exist"):
        plan(suite, "tasks: [first]\ninclude: tasks\ndata_files: {medmcqa: gone.json}\n")


def test_missing_task_folder_and_broken_task_file_are_errors(suite, tmp_path):
    with pytest.raises(UserError, match="is no folder"):
        _task_files.copy(suite / "gone", tmp_path / "copy", cache=tmp_path)
    (suite / "tasks/first.yaml").write_text("a: [")
    with pytest.raises(UserError, match=r"first\.yaml: cannot be read as YAML"):
        _task_files.copy(suite / "tasks", tmp_path / "copy", cache=tmp_path)


def test_tasks_outside_the_suites_folder_count_in_its_key(suite):
    (suite / "tasks").rename(suite.parent / "shared")
    assert plan(suite, "tasks: [first]\ninclude: ../shared\n") == [suite / "../shared"]
