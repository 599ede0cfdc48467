"""The stage: what it writes for suites that run, and for those that may not."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from cluster_sft import evaluation, sandbox
from cluster_sft.artifacts import read_table, write_table
from cluster_sft.params import Launch
from cluster_sft.stage_params import EvaluateParams

SUITES = Path(__file__).parents[1] / "data/suites"


@pytest.fixture
def dataset(tiny_dataset, tmp_path) -> Path:
    leaf = tmp_path / "prepare"
    leaf.mkdir()
    write_table(leaf, "heldout.parquet", read_table(tiny_dataset, "dataset.parquet").head(6))
    return leaf


def run(suite: Path, dataset: Path, model: Path | str, out: Path, **params) -> dict:
    out.mkdir()
    scratch = out.parent / f"{out.name}-scratch"
    scratch.mkdir()
    evaluation.run(
        EvaluateParams(dtype="fp32", **params),
        suite=suite,
        dataset=dataset,
        model=str(model),
        out=out,
        scratch=scratch,
        launch=Launch(processes=2),
    )
    return json.loads((out / "scores.json").read_text())


def test_held_out_scores_are_written_and_equal_when_run_again(dataset, tiny_model_dir, tmp_path):
    found = [
        run(SUITES / "heldout", dataset, tiny_model_dir, tmp_path / name) for name in ("a", "b")
    ]
    assert found[0] == found[1]
    (metric,) = found[0].pop("metrics")
    assert found[0] == {
        "suite": "heldout",
        "kind": "heldout",
        "status": "run",
        "reason": None,
        "details": {},
    }
    # An untrained model knows nothing: about log V nats a token.
    assert metric["value"] == pytest.approx(5.77, abs=0.5)
    samples = [(tmp_path / name / "samples.jsonl").read_bytes() for name in ("a", "b")]
    assert samples[0] == samples[1]


def test_limit_and_all_rows_differ_only_in_rows(dataset, tiny_model_dir, tmp_path):
    run(SUITES / "heldout", dataset, tiny_model_dir, tmp_path / "some", limit=2)
    run(SUITES / "heldout", dataset, tiny_model_dir, tmp_path / "all")
    some, whole = (pl.read_ndjson(tmp_path / name / "samples.jsonl") for name in ("some", "all"))
    assert some["id"].to_list() == whole["id"].head(2).to_list()
    assert some["nll"].to_list() == pytest.approx(whole["nll"].head(2).to_list(), rel=1e-5)


def test_code_suite_without_permission_is_not_run_and_names_the_key(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "run_isolated", None)
    found = run(SUITES / "evalplus-small", dataset, "no-such-model", tmp_path / "out")
    assert found["status"] == "not run"
    assert "evaluate.allow_code_execution: true" in found["reason"]
    assert found["metrics"] == []
    assert not (tmp_path / "out/samples.jsonl").exists()


def test_code_suite_without_a_sandbox_is_not_run_and_says_why(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "probe", lambda: "unshare: Operation not permitted")
    monkeypatch.setattr(sandbox, "run_isolated", None)
    found = run(
        SUITES / "evalplus-small", dataset, "none", tmp_path / "out", allow_code_execution=True
    )
    assert found["status"] == "not run"
    assert found["reason"].startswith("no sandbox (unshare: Operation not permitted); where there")


def test_code_suite_scores_what_the_model_writes(dataset, tiny_model_dir, tmp_path, monkeypatch):
    if reason := sandbox.probe():
        pytest.skip(f"no sandbox here: {reason}")
    right = "def is_even(n):\n    return n % 2 == 0\n"
    asked = {}

    def generate(name, tokenizer, prompts, **settings):
        asked.update(settings, prompts=[tokenizer.decode(prompt) for prompt in prompts])
        return ["\treturn", right, "def reverse_string(text):\n    return text\n"], "by hand"

    monkeypatch.setattr("cluster_sft.generation.generate", generate)
    found = run(
        SUITES / "evalplus-small",
        dataset,
        tiny_model_dir,
        tmp_path / "out",
        allow_code_execution=True,
        limit=3,
        max_new_tokens=7,
    )
    assert (found["status"], found["details"]["engine"]) == ("run", "by hand")
    base, plus = found["metrics"]
    assert (base["name"], plus["name"]) == ("evalplus_base_pass1", "evalplus_plus_pass1")
    assert (base["value"], plus["value"], plus["n"]) == (1 / 3, 1 / 3, 3)
    rows = [json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()]
    assert [row["base"] for row in rows] == ["fail", "pass", "fail"]
    assert rows[0]["output"] == "    return"
    assert asked["max_new_tokens"] == 7
    assert asked["prompts"][1].startswith("<|im_start|>user\nPlease provide a self-contained")
    assert asked["prompts"][1].endswith("passes corresponding tests:\n```python\n")


def test_code_suite_generates_with_a_real_model(dataset, tiny_model_dir, tmp_path):
    if reason := sandbox.probe():
        pytest.skip(f"no sandbox here: {reason}")
    found = run(
        SUITES / "evalplus-small",
        dataset,
        tiny_model_dir,
        tmp_path / "out",
        allow_code_execution=True,
        limit=2,
        max_new_tokens=3,
    )
    assert [metric["value"] for metric in found["metrics"]] == [0.0, 0.0]
    assert found["details"]["engine"] == "transformers"
