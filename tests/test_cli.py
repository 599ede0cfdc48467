"""The command line: stages on their own, exit status, one line for every error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from cluster_sft.cli import main
from engines import rows


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(rows(40))
    return tmp_path


def run(*arguments: object) -> int:
    return main([str(a) for a in arguments])


@pytest.fixture
def clustered(here, tiny_model_dir) -> Path:
    """Leaves prepared, embedded and clustered, made by the stages on their own."""
    model = ("--model", tiny_model_dir)
    assert run("prepare", "--source", "rows.jsonl", *model, "--out", "prepared") == 0
    embed = ("embed", "--dataset", "prepared", *model, "--dtype", "fp32", "--out", "embedded")
    assert run(*embed) == 0
    assert run("cluster", "--embeddings", "embedded", "--k", 2, "--out", "clustered") == 0
    return here


def test_stages_on_their_own_chain_without_params_yaml(clustered):
    select = ("select", "--clusters", "clustered", "--dataset", "prepared", "--ratio", 0.5)
    assert run(*select, "--out", "selected") == 0
    subset = pl.read_parquet("selected/subset.parquet")
    sizes = json.loads(Path("clustered/summary.json").read_text())["sizes"]
    m = int(0.5 * min(sizes) + 0.5)
    assert subset.group_by("cluster").len().sort("cluster").rows() == [(0, m), (1, m)]
    assert sorted(subset["weight"].unique()) == sorted(n * 2 / sum(sizes) for n in set(sizes))
    lines = [json.loads(x) for x in Path("selected/subset.jsonl").read_text().splitlines()]
    assert {tuple(line) for line in lines} == {("instruction", "output", "cluster", "weight")}
    assert np.load("embedded/embeddings.npy").dtype == np.float16
    found = {p.name for p in Path().iterdir()}
    assert found == {"rows.jsonl", "prepared", "embedded", "clustered", "selected"}


def test_stage_run_again_reuses_and_with_other_values_refuses_to_overwrite(clustered, capsys):
    again = ("cluster", "--embeddings", "embedded", "--out", "clustered", "--k")
    assert run(*again, 2) == 0
    assert "reused" in capsys.readouterr().err
    assert run(*again, 3) == 2
    assert "nothing is ever overwritten" in capsys.readouterr().err


def test_train_and_evaluate_on_their_own(clustered, tiny_model_dir):
    select = ("select", "--clusters", "clustered", "--dataset", "prepared")
    assert run(*select, "--out", "selected") == 0
    train = ("train", "--subset", "selected", "--dataset", "prepared", "--model", tiny_model_dir)
    size = ("--workers", 2, "--global-batch-size", 4, "--epochs", 1, "--precision", "fp32")
    assert run(*train, *size, "--out", "trained") == 0
    manifest = json.loads(Path("trained/manifest.json").read_text())
    assert (manifest["params"]["weights"], manifest["params"]["batches"]) == (
        "cluster",
        "stratified",
    )


def error(capsys, *arguments: object) -> str:
    assert run(*arguments) == 2
    captured = capsys.readouterr().err.splitlines()
    assert len(captured) == 1, captured
    return captured[0]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("cluster", "--k", "2"), "required: --embeddings, --out"),
        (
            ("cluster", "--embeddings", "none", "--k", "2", "--out", "o"),
            "none: no complete embed leaf",
        ),
        (
            ("cluster", "--embeddings", "none", "--k", "0", "--out", "o"),
            "--k: .*greater than 0, got 0",
        ),
        (
            ("cluster", "--embeddings", "n", "--k", "2", "--alpha", "0.9", "--out", "o"),
            "--alpha.*0.9",
        ),
        (
            ("select", "--clusters", "c", "--dataset", "d", "--ratio", "0", "--out", "o"),
            "--ratio.*got 0",
        ),
        (
            ("select", "--clusters", "c", "--dataset", "d", "--ratio", "1.5", "--out", "o"),
            "--ratio.*1.5",
        ),
        (
            ("prepare", "--source", "none.jsonl", "--model", "m", "--out", "o"),
            "none.jsonl: no such file",
        ),
        (
            ("prepare", "--source", "r", "--model", "m", "--max-length", "long", "--out", "o"),
            "--max-length: .*valid integer.*got 'long'",
        ),
        (
            ("cluster", "--embeddings", "n", "--k", "[", "--out", "o"),
            r"--k: must be a YAML value, got '\['",
        ),
        (
            (
                *("train", "--subset", "s", "--dataset", "d", "--model", "m", "--out", "o"),
                *("--workers", "3", "--global-batch-size", "4"),
            ),
            r"cluster-sft: global_batch_size must be a multiple of workers \(3\), got 4",
        ),
        (("nonsense",), "invalid choice: 'nonsense'"),
        (("run", "results/x/embed"), "params.yaml: no such file"),
    ],
)
def test_error_is_one_line_and_status_two(here, capsys, arguments, told):
    import re

    assert re.search(told, error(capsys, *arguments))
    assert sorted(p.name for p in here.iterdir()) == ["rows.jsonl"]


def test_more_clusters_than_rows_is_one_line(clustered, capsys):
    told = error(capsys, "cluster", "--embeddings", "embedded", "--k", 100, "--out", "o")
    assert "got k = 100 and 40 rows" in told and not Path("o").exists()


def test_leaf_of_another_stage_is_refused(clustered, capsys):
    told = error(capsys, "cluster", "--embeddings", "prepared", "--k", 2, "--out", "o")
    assert "must be a leaf of embed, got one of prepare" in told


def test_altered_embeddings_are_refused(clustered, capsys):
    path = Path("embedded/embeddings.npy")
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    told = error(capsys, "cluster", "--embeddings", "embedded", "--k", 2, "--out", "o")
    assert "embeddings.npy was truncated or altered" in told


def test_strategy_that_ignores_clusters_runs_on_its_own(clustered):
    select = ("select", "--clusters", "clustered", "--dataset", "prepared", "--strategy", "full")
    assert run(*select, "--out", "all") == 0
    assert len(pl.read_parquet("all/subset.parquet")) == 40


def test_clusters_written_by_hand_are_selected_from(clustered):
    ids = pl.read_parquet("prepared/dataset.parquet")["id"]
    table = pl.DataFrame(
        {"id": ids, "cluster": [i % 4 for i in range(40)], "distance": [0.1 * i for i in range(40)]}
    )
    Path("hand").mkdir()
    table.write_parquet("hand/clusters.parquet")
    Path("hand/manifest.json").write_text("{}")
    select = ("select", "--clusters", "hand", "--dataset", "prepared", "--ratio", 0.5)
    assert run(*select, "--out", "selected") == 0
    found = pl.read_parquet("selected/subset.parquet")
    assert found.group_by("cluster").len().sort("cluster")["len"].to_list() == [5] * 4


def test_unknown_strategy_is_one_line(clustered, capsys):
    flags = ("--clusters", "clustered", "--dataset", "prepared", "--out", "o")
    told = error(capsys, "select", *flags, "--strategy", "clutser")
    assert "did you mean 'cluster'" in told


def test_environment_overrides_execution_and_flags_override_it(clustered, monkeypatch, capsys):
    monkeypatch.setenv("CLUSTER_SFT_THREADS", "zero")
    flags = ("cluster", "--embeddings", "embedded", "--k", 3, "--out", "o")
    assert "--threads" in error(capsys, *flags)
    assert run(*flags, "--threads", 1) == 0


def test_defect_of_ours_is_status_one(here, monkeypatch, capsys):
    from cluster_sft import store

    def broken(*arguments, **settings):
        raise RuntimeError("boom")

    monkeypatch.setattr(store, "load_node", broken)
    assert run("cluster", "--embeddings", "e", "--k", 2, "--out", "o") == 1
    assert "defect of ours" in capsys.readouterr().err


@pytest.mark.parametrize("stage", ["prepare", "embed", "cluster", "select", "train", "evaluate"])
def test_help_of_a_stage_tells_what_each_flag_takes(stage, capsys):
    with pytest.raises(SystemExit):
        run(stage, "--help")
    told = capsys.readouterr().out
    assert "VALUE" not in told
    assert "--processes INT" in told
    assert "params.yaml" in told


def test_show_before_any_run_names_the_command_that_makes_the_report(monkeypatch, tmp_path, capsys):
    params = Path("params.yaml").resolve()
    shutil.copytree("data", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    assert run("show", "--params", params) == 2
    assert f"snakemake --cores all --configfile {params}" in capsys.readouterr().err


def test_leaf_after_params_is_one_line_that_says_where_it_belongs(here, capsys):
    assert run("run", "--params", "params.yaml", "results/demo/prepare") == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "required: leaf, before --params" in told
