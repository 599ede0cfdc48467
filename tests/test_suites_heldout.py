"""Held-out loss against a plain computation, and its standard error against the bootstrap."""

from __future__ import annotations

import json
import math

import numpy as np
import polars as pl
import pytest
import torch

from cluster_sft.artifacts import DATASET, read_table, write_table
from cluster_sft.models import load_model
from cluster_sft.suites import Evaluation, Rule, heldout


@pytest.fixture(scope="module")
def rows(tiny_dataset) -> pl.DataFrame:
    return read_table(tiny_dataset, "dataset.parquet").head(12)


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return load_model(str(tiny_model_dir), dtype="fp32")


def plain(model, ids: list[int], labels: list[int]) -> float:
    with torch.inference_mode():
        log_probs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return -sum(float(log_probs[t - 1, labels[t]]) for t in range(1, len(ids)) if labels[t] != -100)


@pytest.mark.parametrize("batch_tokens", [1, 200, 4096])
def test_summed_nll_equals_the_models_own_loss_row_by_row(model, rows, batch_tokens, monkeypatch):
    monkeypatch.setattr(heldout, "BATCH_TOKENS", batch_tokens)
    ids, labels = rows["input_ids"].to_list(), rows["labels"].to_list()
    total, count = heldout.summed_nll(model, ids, labels)
    assert total == pytest.approx(
        [plain(model, i, t) for i, t in zip(ids, labels, strict=True)], rel=1e-5
    )
    assert count.tolist() == rows["n_response_tokens"].to_list()


def test_first_token_predicts_nothing_and_is_not_counted(model):
    total, count = heldout.summed_nll(model, [[5, 6, 7], [5, 6]], [[5, 6, 7], [-100, 6]])
    assert count.tolist() == [2, 1]
    assert total[1] == pytest.approx(plain(model, [5, 6], [-100, 6]), rel=1e-5)


def test_ratio_is_the_token_mean_and_its_error_that_of_the_bootstrap():
    rng = np.random.default_rng(0)
    count = rng.integers(5, 200, 400)
    total = count * rng.gamma(4.0, 0.2, 400)
    value, stderr = heldout.ratio(total, count)
    assert value == total.sum() / count.sum()
    draws = rng.integers(0, 400, (2000, 400))
    bootstrap = (total[draws].sum(1) / count[draws].sum(1)).std()
    assert stderr == pytest.approx(bootstrap, rel=0.05)


def test_ratio_of_one_row_has_no_error():
    assert heldout.ratio(np.array([3.0]), np.array([2])) == (1.5, None)


def test_ratio_of_equal_lengths_has_the_error_of_a_mean():
    total = np.array([1.0, 2.0, 4.0, 5.0])
    value, stderr = heldout.ratio(total, np.full(4, 2))
    assert (value, stderr) == (1.5, pytest.approx(np.std(total / 2, ddof=1) / math.sqrt(4)))


def evaluation(tmp_path, tiny_model_dir, frame: pl.DataFrame, **rule) -> Evaluation:
    write_table(tmp_path, "heldout.parquet", frame)
    rule = Rule(dtype="fp32", **rule)
    return Evaluation(
        tmp_path, {"kind": "heldout"}, rule, tmp_path, str(tiny_model_dir), tmp_path, tmp_path
    )


def test_suite_scores_the_first_rows_and_writes_what_paired_differences_need(
    tmp_path, tiny_model_dir, model, rows
):
    scores = heldout.run(evaluation(tmp_path, tiny_model_dir, rows, limit=5))
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    first = rows.head(5)
    assert [s["id"] for s in samples] == first["id"].to_list()
    for sample, ids, labels in zip(samples, first["input_ids"], first["labels"], strict=True):
        assert sample["nll"] * sample["n_tokens"] == pytest.approx(
            plain(model, ids.to_list(), labels.to_list()), rel=1e-5
        )
    (metric,) = scores.metrics
    tokens = sum(s["n_tokens"] for s in samples)
    assert (metric.name, metric.n) == ("heldout_nll", 5)
    assert metric.value == pytest.approx(sum(s["nll"] * s["n_tokens"] for s in samples) / tokens)
    assert metric.stderr is not None
    assert 0 < metric.stderr < metric.value


def test_suite_without_held_out_rows_is_not_run(tmp_path, tiny_model_dir):
    scores = heldout.run(evaluation(tmp_path, tiny_model_dir, pl.DataFrame(schema=DATASET)))
    assert scores.metrics == []
    assert "data.holdout" in str(scores.reason)
