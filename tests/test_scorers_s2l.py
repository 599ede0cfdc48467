"""Scorer s2l: snapshots of the proxy, trajectories, groups; processes and kills."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import save_file

from cluster_sft import models
from cluster_sft.artifacts import (
    DATASET,
    read_json,
    read_scores,
    read_table,
    write_json,
    write_table,
)
from cluster_sft.errors import UserError
from cluster_sft.params import Launch
from cluster_sft.scorers import s2l, s2l_proxy, s2l_trajectories

SLOW_RUN = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from cluster_sft import partial_results, row_losses
from cluster_sft.params import Launch
from cluster_sft.scorers import s2l_trajectories
partial_results.FLUSH_SECONDS = 0
quick = row_losses._outputs
def slow(*args, **settings):
    time.sleep(0.1)
    return quick(*args, **settings)
row_losses._outputs = slow
model, dataset, proxy, out, scratch = sys.argv[1:]
s2l_trajectories.run(SimpleNamespace(s2l_model=model, dtype="fp32"), dataset=Path(dataset),
                     proxy=Path(proxy), out=Path(out), scratch=Path(scratch),
                     launch=Launch(threads=1, batch_tokens=512))
"""


def proxy_params(proxy, **over):
    values = {
        "s2l_model": str(proxy),
        "model": str(proxy),
        "template": "auto",
        "max_length": None,
        "epochs": 2,
        "checkpoints": 3,
        "learning_rate": 1e-2,
        "batch_size": 8,
        "warmup_ratio": 0.1,
        "seed": 0,
        "dtype": "fp32",
    }
    return SimpleNamespace(**values | over)


def train(params, dataset, folder: Path, **launch) -> Path:
    for made in (out := folder / "out", folder / "scratch"):
        made.mkdir(parents=True)
    settings = Launch(**{"threads": 1} | launch)
    s2l_proxy.run(params, dataset=dataset, out=out, scratch=folder / "scratch", launch=settings)
    return out


def trace(model, dataset, proxy, folder: Path, **launch) -> Path:
    (out := folder / "out").mkdir(parents=True)
    s2l_trajectories.run(
        SimpleNamespace(s2l_model=str(model), dtype="fp32"),
        dataset=dataset,
        proxy=proxy,
        out=out,
        scratch=folder / "scratch",
        launch=Launch(**{"threads": 1, "batch_tokens": 512} | launch),
    )
    return out


@pytest.fixture(scope="module")
def proxy(tiny_model_dir, tmp_path_factory) -> Path:
    """A leaf of two snapshots: the model's own weights, and these shrunk."""
    leaf = tmp_path_factory.mktemp("proxy")
    model = models.load_model(str(tiny_model_dir), dtype="fp32")
    snapshots = []
    for step, factor in ((4, 1.0), (8, 0.5)):
        weights = {k: (p * factor).detach().contiguous() for k, p in model.named_parameters()}
        (leaf / f"step-{step}").mkdir()
        save_file(weights, leaf / f"step-{step}" / "weights.safetensors")
        snapshots.append({"step": step, "weights": f"step-{step}/weights.safetensors"})
    write_json(leaf / "summary.json", {"snapshots": snapshots})
    return leaf


@pytest.fixture(scope="module")
def traced(tiny_model_dir, tiny_dataset, proxy, tmp_path_factory) -> Path:
    return trace(tiny_model_dir, tiny_dataset, proxy, tmp_path_factory.mktemp("traced"))


def plain_loss(model, row):
    ids, labels = (torch.tensor([row[c]]) for c in ("input_ids", "labels"))
    with torch.no_grad():
        return model(input_ids=ids, labels=labels).loss.item()


@pytest.mark.parametrize(
    ("total", "count", "steps"),
    [(12, 3, [4, 8, 12]), (10, 3, [3, 6, 10]), (2, 12, [1, 2]), (1, 1, [1])],
)
def test_snapshots_are_evenly_spaced_up_to_the_last_step(total, count, steps):
    assert s2l_proxy.snapshot_steps(total, count) == steps


@pytest.fixture(scope="module")
def trained(tiny_model_dir, tiny_dataset, tmp_path_factory) -> Path:
    return train(proxy_params(tiny_model_dir), tiny_dataset, tmp_path_factory.mktemp("trained"))


def test_proxy_keeps_weights_over_the_whole_training_and_its_loss_falls(
    trained, tiny_model_dir, tiny_dataset, tmp_path
):
    summary = read_json(trained / "summary.json")
    assert [s["step"] for s in summary["snapshots"]] == [3, 6, 10]
    assert summary["cost"]["backward_passes"] == 80
    assert not summary["rendered_anew"] and not (trained / "dataset.parquet").exists()
    out = trace(tiny_model_dir, tiny_dataset, trained, tmp_path)
    means = read_json(out / "summary.json")["mean_loss"]
    assert means == sorted(means, reverse=True) and means[-1] < 0.9 * means[0]


def test_proxy_of_two_processes_is_that_of_one(trained, tiny_model_dir, tiny_dataset, tmp_path):
    other = train(
        proxy_params(tiny_model_dir), tiny_dataset, tmp_path / "p", processes=2, threads=2
    )
    found = [
        np.load(trace(tiny_model_dir, tiny_dataset, p, tmp_path / n) / "trajectories.npy")
        for p, n in ((trained, "a"), (other, "b"))
    ]
    np.testing.assert_allclose(*found, rtol=1e-4)
    labels = [s2l.groups(x, most=4, seed=0)[0] for x in (np.repeat(f, 4, axis=0) for f in found)]
    assert labels[0].tolist() == labels[1].tolist()


def test_proxy_of_a_single_step_is_one_line(tiny_model_dir, tiny_dataset, tmp_path):
    params = proxy_params(tiny_model_dir, epochs=1, batch_size=64)
    with pytest.raises(UserError, match=r"single step.*lower score\.s2l\.batch_size"):
        train(params, tiny_dataset, tmp_path)


@pytest.fixture(scope="module")
def other_model(tiny_model_dir, tiny_tokenizer, tmp_path_factory) -> Path:
    """The model with a tokenizer that has no chat template."""
    path = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(tiny_model_dir, path)
    (path / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_proxy_with_another_tokenizer_reads_the_conversations_in_its_own_words(
    other_model, tiny_model_dir, tiny_dataset, tiny_tokenizer, capsys
):
    params = proxy_params(other_model, model=str(tiny_model_dir), max_length=220)
    table = s2l_proxy._rendered(params, tiny_dataset)
    assert "no chat template: its rows are rendered by template alpaca" in capsys.readouterr().err
    assert table["id"].to_list() == [f"{i:04d}" for i in range(40)]
    text = tiny_tokenizer.decode(table["input_ids"][5].to_list())
    assert text.startswith("Below is an instruction") and "Count to 5." in text
    assert table["input_ids"].list.len().max() == 220
    answer = [t for t in table["labels"][0].to_list() if t != -100]
    assert tiny_tokenizer.decode(answer) == "one<|im_end|>"


def test_proxy_of_fewer_positions_than_a_row_has_tokens_gets_shorter_rows(
    tiny_model_dir, tiny_dataset, tmp_path
):
    shutil.copytree(tiny_model_dir, tmp_path / "short")
    config = json.loads((tmp_path / "short" / "config.json").read_text())
    config["max_position_embeddings"] = 64
    (tmp_path / "short" / "config.json").write_text(json.dumps(config))
    params = proxy_params(tmp_path / "short", model=str(tiny_model_dir))
    table = s2l_proxy._rendered(params, tiny_dataset)
    rows = read_table(tiny_dataset, "dataset.parquet")
    assert table["input_ids"].list.len().max() == 64
    assert table["input_ids"][39].to_list() == rows["input_ids"][39].to_list()[:64]


def test_trajectories_are_the_plain_losses_under_each_snapshot(
    traced, proxy, tiny_model_dir, tiny_dataset
):
    rows = read_table(tiny_dataset, "dataset.parquet")
    loss_NT = np.load(traced / "trajectories.npy")
    assert loss_NT.shape == (40, 2) and loss_NT.dtype == np.float32
    assert read_table(traced, "trajectories.parquet")["id"].to_list() == rows["id"].to_list()
    model = models.load_model(str(tiny_model_dir), dtype="fp32")
    for t, factor in enumerate((1.0, 0.5)):
        with torch.no_grad():
            for p in model.parameters():
                p *= factor
        for i in (0, 17, 39):
            wanted = plain_loss(model, rows.row(i, named=True))
            assert loss_NT[i, t] == pytest.approx(wanted, rel=1e-5)


def test_trajectories_cost_a_pass_a_snapshot(traced, tiny_dataset):
    cost = read_json(traced / "summary.json")["cost"]
    rows = read_table(tiny_dataset, "dataset.parquet")
    assert cost["forward_passes"] == 80
    assert cost["tokens"] == 2 * rows["input_ids"].list.len().sum()


def test_trajectories_of_two_processes_have_the_bits_of_one(
    traced, proxy, tiny_model_dir, tiny_dataset, tmp_path
):
    out = trace(tiny_model_dir, tiny_dataset, proxy, tmp_path, processes=2, threads=2)
    files = [(x / "trajectories.npy").read_bytes() for x in (out, traced)]
    assert files[0] == files[1]


def test_trajectories_killed_resume_by_snapshot_and_batch_with_the_same_bits(
    traced, proxy, tiny_model_dir, tiny_dataset, tmp_path
):
    (tmp_path / "killed").mkdir()
    scratch = tmp_path / "again" / "scratch"
    arguments = (tiny_model_dir, tiny_dataset, proxy, tmp_path / "killed", scratch)
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_RUN, *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(s2l.__file__).parents[2])},
        stderr=subprocess.DEVNULL,
    )
    first, second = (scratch / str(step) / "done.npy" for step in (4, 8))
    deadline = time.monotonic() + 200
    while not (second.is_file() and np.load(second, mmap_mode="r").any()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert np.load(first).all() and not np.load(second).all()
    out = trace(tiny_model_dir, tiny_dataset, proxy, tmp_path / "again")
    files = [(x / "trajectories.npy").read_bytes() for x in (out, traced)]
    assert read_json(out / "summary.json")["resumed_tokens"] > 0
    assert files[0] == files[1]


def test_trajectories_under_weights_of_another_model_are_one_line(
    proxy, tiny_model_dir, tiny_dataset, tmp_path
):
    shutil.copytree(proxy, tmp_path / "proxy")
    save_file({"strange": torch.zeros(1)}, tmp_path / "proxy" / "step-4" / "weights.safetensors")
    with pytest.raises(UserError, match="'strange' is none of LlamaForCausalLM's"):
        trace(tiny_model_dir, tiny_dataset, tmp_path / "proxy", tmp_path / "x")


def group(folder: Path, loss_NT, records, *, clusters=100, seed=0):
    """Scores and summary of s2l for these trajectories."""
    dataset, trajectories, out = (folder / n for n in ("prepare", "trajectories", "out"))
    for made in (dataset, trajectories, out):
        made.mkdir(parents=True)
    ids = [f"{i:04d}" for i in range(len(loss_NT))]
    frame = pl.DataFrame({"id": ids, "record": [json.dumps(r) for r in records]})
    empty = {c: pl.lit(None, t) for c, t in DATASET.items() if c not in frame.columns}
    write_table(dataset, "dataset.parquet", frame.with_columns(**empty))
    np.save(trajectories / "trajectories.npy", np.asarray(loss_NT, np.float32))
    write_table(trajectories, "trajectories.parquet", frame.select("id"))
    s2l.run(
        SimpleNamespace(clusters=clusters, seed=seed),
        dataset=dataset,
        trajectories=trajectories,
        out=out,
        scratch=folder,
        launch=Launch(),
    )
    return read_scores(out), read_json(out / "summary.json")


def test_groups_are_within_sources_numbered_by_size(tmp_path):
    # Two plain groups in source b, 60 and 40 rows; source a is small: one group.
    loss_NT = np.array([[9.0, 9.0]] * 40 + [[1.0, 0.0]] * 60 + [[5.0, 5.0], [5.0, 7.0]])
    records = [{"source": "b"}] * 100 + [{"source": "a"}] * 2
    scores, summary = group(tmp_path, loss_NT, records)
    assert scores["source"].to_list() == [1] * 100 + [0] * 2
    assert scores["group"].to_list() == [1] * 40 + [0] * 60 + [0] * 2
    assert scores["score"].to_list() == pytest.approx([0.0] * 100 + [-1.0] * 2, abs=1e-9)
    assert summary["sources"] == [
        {"source": "a", "rows": 2, "groups": 1},
        {"source": "b", "rows": 100, "groups": 2},
    ]


def test_groups_are_one_for_39_rows_and_at_most_as_asked(tmp_path):
    loss_NT = np.random.default_rng(0).normal(size=(200, 3))
    found = [
        len(np.unique(s2l.groups(loss_NT[:n], most=most, seed=0)[0]))
        for n, most in ((20, 9), (78, 9), (200, 9), (200, 2))
    ]
    assert found == [1, 2, 5, 2]


def test_rows_of_unusable_trajectories_are_excluded_with_a_reason(tmp_path):
    loss_NT = [[1.0, 2.0], [np.nan, np.nan], [np.inf, 1.0], [2.0, 2.0]]
    scores, summary = group(tmp_path, loss_NT, [{}] * 4)
    assert scores["reason"].to_list() == [None, "no_response_tokens", "non_finite", None]
    assert scores["group"].to_list() == [0, None, None, 0]
    assert summary["excluded"] == {"no_response_tokens": 1, "non_finite": 1}


@pytest.mark.parametrize(
    ("record", "source"),
    [
        ({"source": "x"}, "x"),
        ({"source": 7}, "7"),
        ({"source": None}, None),
        ({}, None),
        ({"a": {"source": "inner"}}, None),
        ({"source": 'é"\n'}, 'é"\n'),
    ],
)
def test_source_is_the_records_own_field(tmp_path, record, source):
    group(tmp_path, [[1.0]], [record])
    assert s2l.read_sources(tmp_path / "prepare")["source"].to_list() == [source]
