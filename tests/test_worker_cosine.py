"""Cosine of the workers' gradients: its arithmetic, and that measuring it changes no training."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from cluster_sft import training
from cluster_sft.artifacts import SUBSET, write_json, write_table
from cluster_sft.models import load_model
from cluster_sft.params import Launch
from cluster_sft.stage_params import TrainParams
from cluster_sft.training_loop import read_log
from cluster_sft.training_rows import make_plan, read_rows
from cluster_sft.worker_cosine import mean_cosine, worker_cosine

IDS = [f"{i:04d}" for i in range(2, 12)]
CLUSTERS = [i % 4 for i in range(10)]  # steps of 8 and of 2: two of the four workers have no row


def _alone(x: torch.Tensor) -> torch.Tensor:
    return x


def test_cosine_is_the_mean_over_pairs_of_workers():
    gradients = [torch.randn(2, 3, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    parts = [[g[0], g[1]] for g in gradients]
    found = worker_cosine(parts, [torch.zeros(3)] * 2, workers=4, add_up=_alone)
    flat = [g.flatten() for g in gradients]
    pairs = [torch.cosine_similarity(a, b, dim=0) for a, b in itertools.combinations(flat, 2)]
    assert found["worker_cosine"] == pytest.approx(float(torch.stack(pairs).mean()), abs=1e-6)
    assert found["workers_without_gradient"] == 0


def test_workers_without_a_gradient_are_left_out_and_counted():
    a, b = torch.tensor([3.0, 0.0]), torch.tensor([1.0, 1.0])
    parts = [[a], [torch.zeros(2)], [b], [None]]
    found = worker_cosine(parts, [torch.zeros(2)], workers=4, add_up=_alone)
    assert found["worker_cosine"] == pytest.approx(np.sqrt(0.5))
    assert found["workers_without_gradient"] == 2


def test_cosine_of_one_worker_is_none():
    found = worker_cosine([[torch.ones(2)]], [torch.zeros(2)], workers=1, add_up=_alone)
    assert found == {"worker_cosine": None, "workers_without_gradient": 0}


def test_cosine_of_gradients_that_are_not_finite_is_none():
    assert mean_cosine(float("nan"), 3) is None


@pytest.fixture(scope="module")
def subset(tmp_path_factory) -> Path:
    leaf = tmp_path_factory.mktemp("select")
    frame = pl.DataFrame(
        {"id": IDS, "cluster": CLUSTERS, "distance": 0.0, "weight": 1.0, "rank": 0},
        schema_overrides=SUBSET,
    )
    write_table(leaf, "subset.parquet", frame)
    write_json(leaf / "summary.json", {"clusters": [{"size": n} for n in (9, 8, 6, 4)]})
    return leaf


@pytest.fixture(scope="module")
def train(tiny_model_dir, tiny_dataset, subset, tmp_path_factory):
    """Train on the subset and return the leaf; a single process is this one."""

    def work_here(module, job, *, processes, **_):
        training.worker({**job, "processes": processes})

    def train(*, processes=1, parallelism="ddp", **changes) -> Path:
        out, scratch = (tmp_path_factory.mktemp(name) for name in ("train", "scratch"))
        params = TrainParams(model=str(tiny_model_dir), **SETTINGS | changes)
        with pytest.MonkeyPatch.context() as patch:
            if processes == 1:
                patch.setattr(training.launching, "launch", work_here)
            training.run(
                params,
                dataset=tiny_dataset,
                subset=subset,
                out=out,
                scratch=scratch,
                launch=Launch(
                    processes=processes, threads=1, micro_batch=1, parallelism=parallelism
                ),
            )
        return out

    return train


SETTINGS = {
    "workers": 4,
    "weights": "cluster",
    "batches": "stratified",
    "global_batch_size": 8,
    "epochs": 2,
    "learning_rate": 1e-2,
    "precision": "fp32",
    "seed": 1,
}


@pytest.fixture(scope="module")
def measured(train) -> Path:
    return train(cosine_every=1)


def _cosines(leaf: Path) -> list[float]:
    return [entry["worker_cosine"] for entry in read_log(leaf / "train_log.jsonl")]


def test_measuring_leaves_every_trained_number_bitwise_as_it_was(measured, train):
    plain = train(cosine_every=0)
    found, expected = (load_file(leaf / "model.safetensors") for leaf in (measured, plain))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    logs = [read_log(leaf / "train_log.jsonl") for leaf in (measured, plain)]
    assert [e["grad_norm"] for e in logs[0]] == [e["grad_norm"] for e in logs[1]]
    assert all("worker_cosine" not in entry for entry in logs[1])


def test_first_step_is_measured_against_each_workers_own_gradient(
    measured, tiny_model_dir, tiny_dataset, subset
):
    rows = read_rows(tiny_dataset, subset, weights="cluster")
    params = TrainParams(model=str(tiny_model_dir), **SETTINGS)
    model = load_model(str(tiny_model_dir), dtype="fp32")
    flat = []
    for positions, weights in make_plan(rows.selection, params)[0]:
        loss = torch.zeros(())
        for position, weight in zip(positions, weights, strict=True):
            ids = torch.from_numpy(rows.input_ids[position]).long()[None]
            labels = torch.from_numpy(rows.labels[position]).long()[None]
            loss = loss + weight * model(input_ids=ids, labels=labels).loss
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        flat.append(torch.cat([g.flatten() for g in gradients]))
    pairs = [torch.cosine_similarity(a, b, dim=0) for a, b in itertools.combinations(flat, 2)]
    expected = float(torch.stack(pairs).mean())
    assert _cosines(measured)[0] == pytest.approx(expected, abs=1e-5)


def test_workers_without_rows_in_a_short_step_are_counted(measured):
    log = read_log(measured / "train_log.jsonl")
    assert [entry["workers_without_gradient"] for entry in log] == [0, 2, 0, 2]


def test_every_nth_step_is_measured_from_the_first_on(train):
    log = read_log(train(cosine_every=3) / "train_log.jsonl")
    assert ["worker_cosine" in entry for entry in log] == [True, False, False, True]


@pytest.mark.parametrize(("processes", "parallelism"), [(2, "ddp"), (4, "ddp"), (2, "fsdp")])
def test_cosine_is_the_same_on_any_number_of_processes(measured, train, processes, parallelism):
    leaf = train(processes=processes, parallelism=parallelism, cosine_every=1)
    assert _cosines(leaf) == pytest.approx(_cosines(measured), abs=1e-5)
    log = read_log(leaf / "train_log.jsonl")
    assert [entry["workers_without_gradient"] for entry in log] == [0, 2, 0, 2]
