"""`fetch` against a Hub on the loopback, and what runs without a network say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import hub
from cluster_sft import fetching
from cluster_sft.cli import main
from cluster_sft.errors import UserError
from cluster_sft.fetching import Need
from cluster_sft.params_files import load
from engines import ROOT, Project

OVER = """
data: {source: rows.yaml, format: alpaca, holdout: 0.0}
model: {name: own/tiny@main}
score:
  less: {targets: targets.yaml}
  s2l: {model: own/proxy}
select: {strategies: [random, less, s2l]}
evaluate: {suites: [heldout, humaneval]}
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> list[Path]:
    """A folder with the project's data and parameters over it that need the Hub; their files."""
    for name in ("data", "params.yaml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    (tmp_path / "rows.yaml").write_text("hub: own/rows\nrevision: main\n")
    (tmp_path / "targets.yaml").write_text("hub: own/targets\n")
    (tmp_path / "over.yaml").write_text(OVER)
    monkeypatch.chdir(tmp_path)
    for name in fetching.VARIABLES:  # a run that goes offline sets them
        monkeypatch.setenv(name, "1")
    return [Path("params.yaml"), Path("over.yaml")]


def test_needs_are_what_the_plan_reads_from_elsewhere(here):
    assert set(fetching.needs(load(here))) == {
        Need("data", "rows.yaml"),
        Need("data", "targets.yaml"),
        Need("model", "own/tiny@main"),
        Need("model", "own/proxy"),
        Need("suite", "data/suites/heldout"),
        Need("suite", "data/suites/humaneval"),
    }


def test_needs_of_strategies_that_do_not_run_are_left_out(here):
    text = OVER.replace("[random, less, s2l]", "[random]").replace("humaneval", "stdlib-mcq")
    here[1].write_text(text)
    assert {need.name for need in fetching.needs(load(here)) if need.kind != "suite"} == {
        "rows.yaml",
        "own/tiny@main",
    }


def test_model_directory_and_local_rows_are_no_needs(here, tiny_model_dir):
    here[1].write_text(f"model: {{name: {tiny_model_dir}}}")
    assert {need.kind for need in fetching.needs(load(here))} == {"suite"}


def test_fetch_brings_model_and_data_once_and_an_offline_process_finds_them(
    here, tiny_model_dir, tmp_path, monkeypatch, capfd
):
    model, rows = tmp_path / "hub/models/own/tiny", tmp_path / "hub/datasets/own/rows"
    shutil.copytree(tiny_model_dir, model)
    (model / "original").mkdir()
    for copy in ("original/weights.safetensors", "consolidated.safetensors"):
        shutil.copy(model / "model.safetensors", model / copy)
    rows.mkdir(parents=True)
    text = "".join(json.dumps({"instruction": f"q{i}", "output": "a"}) + "\n" for i in range(3))
    (rows / "train.jsonl").write_text(text)
    (rows / "README.md").write_text("# rows\n")
    here[1].write_text(
        "data: {source: rows.yaml}\nmodel: {name: own/tiny}\nevaluate: {suites: [heldout]}\n"
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name in fetching.VARIABLES:
        monkeypatch.delenv(name)
    with hub.serve(tmp_path / "hub") as (endpoint, asked):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        fetching.fetch(load(here))
        first, before = capfd.readouterr().out.splitlines(), list(asked)
        fetching.fetch(load(here))
        second = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in first] == ["state", "fetched", "fetched", "all"]
    assert [line.split()[0] for line in second] == ["state", "there", "there", "all"]
    assert asked == before
    assert not any(path.endswith("consolidated.safetensors") for path in asked)
    where = Path(next(line for line in first if "own/tiny" in line).split()[-1])
    assert (where / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_fetch_under_an_offline_variable_says_so(here):
    with pytest.raises(UserError, match=r"is set; unset it to fetch \(and 4 more\)$"):
        fetching.fetch(load(here))


def test_parameters_without_needs_say_that_there_is_nothing_to_fetch(here, tiny_model_dir, capsys):
    here[1].write_text(f"model: {{name: {tiny_model_dir}}}\nevaluate: {{suites: [heldout]}}\n")
    fetching.fetch(load(here))
    assert capsys.readouterr().out.startswith("nothing to fetch")


def test_offline_run_that_lacks_data_names_the_command_with_its_files(here, capsys, monkeypatch):
    monkeypatch.setenv("CLUSTER_SFT_OFFLINE", "true")
    assert main(["run", "results/demo/prepare", "--params", *map(str, here)]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "data set own/rows (revision main, split train) is not in the cache" in told
    assert told.endswith("run: cluster-sft fetch --params params.yaml over.yaml")


def test_snakemake_fetches_by_the_command(tiny_model_dir, tmp_path):
    project = Project.create(tmp_path / "p", tiny_model_dir)
    told = project.call("snakemake", "fetch", "--cores", "1")
    assert "nothing to fetch: these parameters need no network" in told
    assert not (project.root / "results").exists()
