"""Training: the same steps on any number of processes, exact resume, and honest failures.

The reference is a loop of twenty lines over whole batches with the model's own cross-entropy.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cluster_sft import checkpoints, models, training, training_loop
from cluster_sft.artifacts import SUBSET, write_json, write_table
from cluster_sft.batching import batch_plan, cluster_weights
from cluster_sft.errors import UserError
from cluster_sft.params import Launch
from cluster_sft.sharding import transformer_blocks
from cluster_sft.stage_params import TrainParams
from cluster_sft.training_loop import TRAIN_LOG, read_log
from cluster_sft.training_rows import read_rows, read_selection

IDS = [f"{i:04d}" for i in range(3, 21)]
CLUSTERS = [i % 4 for i in range(18)]
SIZES = [20, 12, 5, 5]
EXECUTION = {"threads": 2, "micro_batch": 2}


@pytest.fixture(scope="module")
def subset(tmp_path_factory) -> Path:
    """A selected leaf of 18 rows in 4 clusters, out of order: two steps of 8 and one of 2."""
    leaf = tmp_path_factory.mktemp("select")
    write_subset(leaf, IDS, CLUSTERS)
    return leaf


def write_subset(leaf, ids, clusters, sizes=SIZES):
    frame = pl.DataFrame(
        {"id": ids, "cluster": clusters, "distance": 0.0, "weight": 1.0, "rank": 0},
        schema_overrides=SUBSET,
    )
    write_table(leaf, "subset.parquet", frame.reverse())
    write_json(leaf / "summary.json", {"clusters": [{"size": n} for n in sizes]})


@pytest.fixture(scope="module")
def settings(tiny_model_dir):
    """Return parameters of a short float32 run, with changes."""

    def settings(**changes):
        base = {
            "workers": 4,
            "weights": "cluster",
            "batches": "stratified",
            "global_batch_size": 8,
            "epochs": 1,
            "learning_rate": 1e-2,
            "warmup_steps": 1,
            "scheduler": "cosine",
            "weight_decay": 0.1,
            "max_grad_norm": 1.0,
            "precision": "fp32",
            "model": str(tiny_model_dir),
            "seed": 1,
        }
        return TrainParams(**{**base, **changes})

    return settings


@pytest.fixture(scope="module")
def train(tiny_dataset, subset, tmp_path_factory):
    """Run the stage and return the leaf it wrote; a single process is this one."""

    def work_here(module, job, *, processes, **_):
        training.worker({**job, "processes": processes})

    def train(params, *, scratch=None, processes=1, **launch):
        out = tmp_path_factory.mktemp("train")
        scratch = scratch or tmp_path_factory.mktemp("scratch")
        with pytest.MonkeyPatch.context() as patch:
            if processes == 1:
                patch.setattr(training.launching, "launch", work_here)
            run(params, out, scratch, Launch(processes=processes, **{**EXECUTION, **launch}))
        return out

    def run(params, out, scratch, launch):
        training.run(
            params, dataset=tiny_dataset, subset=subset, out=out, scratch=scratch, launch=launch
        )

    return train


@pytest.fixture(scope="module")
def by_one(train, settings):
    return train(settings())


def weights_of(leaf):
    return load_file(leaf / "model.safetensors")


def reference_run(params, dataset, subset):
    """Train on whole batches; return the losses and the model."""
    rows = read_rows(dataset, subset, weights="none")
    weights = cluster_weights(SIZES, np.bincount(CLUSTERS))
    model = AutoModelForCausalLM.from_pretrained(params.model, dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    plan = batch_plan(CLUSTERS, weights, workers=1, global_batch_size=8, epochs=1, seed=params.seed)
    losses = []
    for rate, [(positions, row_weights)] in zip([0.0, 1e-2, 5e-3], plan, strict=True):
        loss = torch.zeros(())
        for position, weight in zip(positions, row_weights, strict=True):
            ids = torch.from_numpy(rows.input_ids[position]).long()[None]
            labels = torch.from_numpy(rows.labels[position]).long()[None]
            loss = loss + weight / len(positions) * model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def test_train_one_process_equals_a_plain_loop_over_whole_batches(
    by_one, settings, tiny_dataset, subset
):
    losses, model = reference_run(settings(), tiny_dataset, subset)
    assert np.allclose([e["loss"] for e in read_log(by_one / "train_log.jsonl")], losses, atol=1e-5)
    found = weights_of(by_one)
    for name, expected in model.state_dict().items():
        if name in found:
            assert torch.allclose(found[name], expected, atol=1e-5), name


def test_train_leaf_is_a_model_directory_with_a_log_and_a_summary(by_one, tiny_dataset):
    model = AutoModelForCausalLM.from_pretrained(by_one)
    tokenizer = AutoTokenizer.from_pretrained(by_one)
    assert model.dtype == torch.float32
    assert model(**tokenizer("Paris", return_tensors="pt")).logits.isfinite().all()
    entries = read_log(by_one / "train_log.jsonl")
    summary = json.loads((by_one / "summary.json").read_text())
    lengths = pl.read_parquet(tiny_dataset / "dataset.parquet").filter(pl.col("id").is_in(IDS))
    assert summary["steps"] == len(entries) == 3
    assert summary["train_tokens"] == lengths["input_ids"].list.len().sum()
    assert summary["supervised_tokens"] == lengths["n_response_tokens"].sum()
    assert summary["train_seconds"] == pytest.approx(sum(e["seconds"] for e in entries))
    assert np.array_equal(np.sum([e["cluster_counts"] for e in entries], 0), np.bincount(CLUSTERS))
    assert [e["rows"] for e in entries] == [8, 8, 2]


@pytest.mark.parametrize(
    ("changes", "launch"),
    [
        ({}, {"processes": 1, "micro_batch": 1, "gradient_checkpointing": True}),
        ({}, {"processes": 2, "batch_tokens": 100}),
        # The last step's two rows leave two of four processes without any.
        ({"loss_reduction": "token", "optimizer": "adafactor"}, {"processes": 4}),
        ({"optimizer": "adafactor"}, {"processes": 4, "parallelism": "fsdp"}),
    ],
)
def test_train_any_processes_and_micro_batches_give_the_same_steps(
    train, settings, changes, launch
):
    leaf, alone = train(settings(**changes), **launch), train(settings(**changes))
    found, expected = (read_log(path / "train_log.jsonl") for path in (leaf, alone))
    for key in ("step", "rows", "tokens", "cluster_counts", "lr"):
        assert [e[key] for e in found] == [e[key] for e in expected]
    for key in ("loss", "grad_norm"):
        assert np.allclose([e[key] for e in found], [e[key] for e in expected], atol=1e-4, rtol=0)
    ours, theirs = weights_of(leaf), weights_of(alone)
    assert all(torch.allclose(ours[n], theirs[n], atol=1e-4, rtol=0) for n in theirs)


def test_train_bf16_autocasts_over_float32_and_saves_bf16(train, settings, by_one):
    leaf = train(settings(precision="bf16"))
    assert {w.dtype for w in weights_of(leaf).values()} == {torch.bfloat16}
    found, expected = (
        [e["loss"] for e in read_log(path / "train_log.jsonl")] for path in (leaf, by_one)
    )
    rounds = models.arithmetic("bf16", torch.device("cpu")) == "bf16"
    assert (found != expected) is rounds
    assert np.allclose(found, expected, atol=0.05)


@pytest.fixture(scope="module")
def untied_model_dir(tiny_model_dir, tmp_path_factory):
    """The tiny model with a head of its own."""
    path = tmp_path_factory.mktemp("model") / "untied"
    config = AutoConfig.from_pretrained(tiny_model_dir, tie_word_embeddings=False)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(path)
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_fsdp_of_two_processes_gives_the_steps_and_the_model_of_ddp(
    train, settings, untied_model_dir, tied
):
    changes, launch = {}, {}
    if not tied:
        changes = {"model": str(untied_model_dir), "optimizer": "adafactor"}
        launch = {"gradient_checkpointing": True}
    params = settings(epochs=7, loss_reduction="sequence" if tied else "token", **changes)
    sharded, whole = (
        train(params, processes=2, parallelism=name, **launch) for name in ("fsdp", "ddp")
    )
    found, expected = (read_log(leaf / "train_log.jsonl") for leaf in (sharded, whole))
    assert len(expected) == 21
    for key in ("loss", "grad_norm"):
        assert np.allclose([e[key] for e in found], [e[key] for e in expected], atol=1e-4, rtol=0)
    ours, theirs = (AutoModelForCausalLM.from_pretrained(x).state_dict() for x in (sharded, whole))
    assert list(ours) == list(theirs)
    assert all(torch.allclose(ours[n], theirs[n], atol=1e-4, rtol=0) for n in theirs)
    assert sorted(p.name for p in sharded.iterdir()) == sorted(p.name for p in whole.iterdir())


def test_fsdp_in_bf16_gives_the_losses_of_one_process_but_for_rounding(train, settings):
    params = settings(precision="bf16")
    leaves = train(params, processes=2, parallelism="fsdp"), train(params)
    found, expected = ([e["loss"] for e in read_log(leaf / "train_log.jsonl")] for leaf in leaves)
    assert {w.dtype for w in weights_of(leaves[0]).values()} == {torch.bfloat16}
    assert np.allclose(found, expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_checkpoint_of_other_processes_and_parallelism_is_continued(
    train, settings, tmp_path, optimizer
):
    params = settings(epochs=2, optimizer=optimizer)
    sharded, single = ({"processes": p, "parallelism": "fsdp"} for p in (2, 1))
    first, then = (sharded, single) if optimizer == "adamw" else (single, sharded)
    # After every step but the last: that one is done anew.
    whole = train(params, scratch=tmp_path, checkpoint_minutes=1e-9, **first)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-5"]
    resumed = train(params, scratch=tmp_path, **then)
    before, after = (read_log(leaf / "train_log.jsonl") for leaf in (whole, resumed))
    assert after[:5] == before[:5] and len(after) == 6
    ours, theirs = weights_of(resumed), weights_of(whole)
    assert all(torch.allclose(ours[n], theirs[n], atol=1e-5, rtol=0) for n in theirs)


def test_checkpoint_half_removed_by_a_kill_is_not_taken_for_one(tmp_path, monkeypatch):
    def killed(path, ignore_errors=False):
        if path.exists():
            raise KeyboardInterrupt

    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / checkpoints.META).write_text("{}")
    monkeypatch.setattr(checkpoints.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints._remove(tmp_path / "step-3")
    assert checkpoints.latest_checkpoint(tmp_path, identity="a") is None
    monkeypatch.undo()
    checkpoints._remove(tmp_path / "step-3")
    assert not (tmp_path / "step-3").exists()


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_train_killed_in_mid_epoch_resumes_to_bitwise_the_same_weights(
    train, settings, tiny_dataset, subset, tmp_path, parallelism
):
    params = settings(epochs=20)
    whole = train(params, processes=2, parallelism=parallelism)
    job = {
        "params": params.model_dump(),
        "dataset": str(tiny_dataset),
        "subset": str(subset),
        "scratch": str(tmp_path / "scratch"),
        "out": str(tmp_path),
    }
    (tmp_path / "run.json").write_text(json.dumps(job))
    code = f"""
import json
from pathlib import Path
from cluster_sft import training, training_loop
from cluster_sft.params import Launch
from cluster_sft.sharding import transformer_blocks
from cluster_sft.stage_params import TrainParams
job = json.loads(Path({str(tmp_path / "run.json")!r}).read_text())
paths = {{k: Path(job[k]) for k in ("dataset", "subset", "scratch", "out")}}
launch = Launch(processes=2, threads=2, micro_batch=2, checkpoint_minutes=1e-9,
                parallelism={parallelism!r})
training.run(TrainParams(**job["params"]), **paths, launch=launch)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    stage = subprocess.Popen([sys.executable, "-c", code], env=environment)
    log = tmp_path / "scratch" / "train_log.jsonl"
    deadline = time.monotonic() + 240
    while len(read_log(log)) < 5:
        assert time.monotonic() < deadline and stage.poll() is None
        time.sleep(0.02)
    stage.send_signal(signal.SIGKILL)
    stage.wait()
    time.sleep(2)
    before = read_log(log)
    assert 5 <= len(before) < 60

    resumed = train(params, processes=2, parallelism=parallelism, scratch=tmp_path / "scratch")
    entries = read_log(resumed / "train_log.jsonl")
    assert [e["step"] for e in entries] == list(range(1, 61))
    assert entries[:3] == before[:3]  # their seconds too: they were not run again
    ours, theirs = weights_of(resumed), weights_of(whole)
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_train_told_to_end_saves_the_step_and_resumes_to_the_same_weights(
    train, settings, by_one, tmp_path, monkeypatch
):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(training_loop, "told_to_stop", lambda: len(read_log(scratch / TRAIN_LOG)) > 0)
        with pytest.raises(KeyboardInterrupt):
            train(settings(), scratch=scratch)
    assert [p.name for p in (scratch / "checkpoints").iterdir()] == ["step-2"]
    resumed = weights_of(train(settings(), scratch=scratch))
    assert all(torch.equal(resumed[n], w) for n, w in weights_of(by_one).items())


def test_train_loss_that_is_not_finite_names_step_and_rows(
    settings, train, tiny_model_dir, tmp_path
):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"loss of step 1 of 3 is not finite, rows 00\d\d"):
        train(settings(model=str(tmp_path)))


def test_fsdp_refuses_a_model_without_transformer_blocks():
    with pytest.raises(UserError, match="no transformer blocks in Linear; use ddp"):
        transformer_blocks(torch.nn.Linear(1, 1))


def test_train_processes_that_do_not_divide_the_workers_are_refused(train, settings):
    with pytest.raises(UserError, match=r"divide train.workers, got 3 .* use one of 1, 2, 4"):
        train(settings(), processes=3)


@pytest.mark.parametrize(
    ("ids", "clusters", "message"),
    [
        ([], [], "holds no rows"),
        (["0003", "0003"], [0, 1], "0003 is there twice"),
        (["0003", "9999"], [0, 1], "9999 is not in"),
        (["0003", "0004"], [0, 4], "below 4"),
        (["0003", "0004", "0005"], [0, 1, 3], "cluster 2"),
    ],
)
def test_selection_that_cannot_be_trained_on_is_refused(
    tiny_dataset, tmp_path, ids, clusters, message
):
    write_subset(tmp_path, ids, clusters)
    with pytest.raises(UserError, match=message):
        read_selection(tiny_dataset, tmp_path, weights="cluster")


def test_rows_join_tokens_by_id(tiny_dataset, subset):
    rows = read_rows(tiny_dataset, subset, weights="none")
    frame = pl.read_parquet(tiny_dataset / "dataset.parquet").filter(pl.col("id") == "0007")
    position = rows.selection.ids.index("0007")
    assert rows.selection.clusters_N[position] == CLUSTERS[IDS.index("0007")]
    assert rows.input_ids[position].tolist() == frame["input_ids"][0].to_list()
    assert rows.n_tokens_N[position] == frame["n_response_tokens"][0]


def test_row_without_a_supervised_token_is_refused(tiny_dataset, subset, tmp_path):
    frame = pl.read_parquet(tiny_dataset / "dataset.parquet")
    mute = pl.when(pl.col("id") == "0007").then(pl.col("labels").list.eval(pl.element() * 0 - 100))
    write_table(tmp_path, "dataset.parquet", frame.with_columns(mute.otherwise("labels")))
    with pytest.raises(UserError, match="0007 supervises no token"):
        read_rows(tmp_path, subset, weights="none")
