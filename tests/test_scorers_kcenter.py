"""Scorers that read the embeddings: greedy k-center order, loss and length; and the empty one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from cluster_sft.artifacts import read_json, read_scores, write_json, write_table
from cluster_sft.errors import UserError
from cluster_sft.scorers import k_center, length_matched_random, loss_top, none


def leaf_of(folder, rows_NH):
    folder.mkdir()
    n = len(rows_NH)
    np.save(folder / "embeddings.npy", rows_NH.astype(np.float16))
    samples = {
        "id": [f"{i:04d}" for i in range(n)],
        "n_tokens": range(10, 10 + n),
        "nll": np.arange(n) / 4,
        "proxy_norm": np.ones(n),
    }
    write_table(folder, "samples.parquet", pl.DataFrame(samples))
    return folder


def run(scorer, embeddings, folder):
    out, scratch = folder / "out", folder / "scratch"
    for made in (out, scratch):
        made.mkdir(parents=True)
    launch = SimpleNamespace(processes=1, threads=1)
    scorer.run(SimpleNamespace(), embeddings=embeddings, out=out, scratch=scratch, launch=launch)
    return read_scores(out), read_json(out / "summary.json")


def order_one_by_one(rows_NH):
    """Greedy k-center, a pick at a time, in float64."""
    rows = rows_NH.astype(np.float16).astype(np.float64)
    first = int(np.square(rows - rows.mean(0)).sum(1).argmin())
    order, nearest = [first], np.square(rows - rows[first]).sum(1)
    while len(order) < len(rows):
        nearest[order] = -1
        order.append(int(nearest.argmax()))
        nearest = np.minimum(nearest, np.square(rows - rows[order[-1]]).sum(1))
    return order


@pytest.mark.parametrize("candidates", [1, 4, 128])
@pytest.mark.parametrize("width", [2, 24])
def test_k_center_order_is_that_of_one_pick_at_a_time(tmp_path, monkeypatch, width, candidates):
    rows_NH = np.random.default_rng(1).normal(size=(150, width))
    monkeypatch.setattr(k_center, "CANDIDATES", candidates)
    monkeypatch.setattr(k_center, "BLOCK_ROWS", 40)
    found = k_center.greedy_order(rows_NH.astype(np.float16), scratch=tmp_path)
    assert found.tolist() == order_one_by_one(rows_NH)


def test_k_center_ties_go_to_the_lower_row_and_equal_rows_come_last(tmp_path):
    rows_NH = np.array([[0, 1], [1, 0], [0, -1], [-1, 0], [0, 0], [1, 0]], np.float16)
    found = k_center.greedy_order(rows_NH, scratch=tmp_path)
    assert found.tolist() == [4, 0, 1, 2, 3, 5]


def test_k_center_scores_are_minus_the_place(tmp_path):
    embeddings = leaf_of(tmp_path / "embed", np.array([[0.0], [1.0], [9.0], [4.0]]))
    scores, summary = run(k_center, embeddings, tmp_path)
    assert scores["score"].to_list() == [-2, -3, -1, 0]  # the mean is 3.5, then 9, then 0
    assert summary["scored"] == 4 and summary["excluded"] == {}
    assert summary["cost"]["forward_passes"] == 0


def test_k_center_interrupted_order_continues_as_it_would_have(tmp_path, monkeypatch):
    rows_NH = np.random.default_rng(2).normal(size=(200, 8)).astype(np.float16)
    monkeypatch.setattr(k_center, "CANDIDATES", 8)
    whole = k_center.greedy_order(rows_NH, scratch=tmp_path / "nowhere")

    class KilledError(Exception):
        pass

    save = k_center._save

    def save_and_die(scratch, order, nearest_N):
        save(scratch, order, nearest_N)
        if len(order) > 50:
            raise KilledError

    monkeypatch.setattr(k_center, "SAVE_SECONDS", 0)
    monkeypatch.setattr(k_center, "_save", save_and_die)
    with pytest.raises(KilledError):
        k_center.greedy_order(rows_NH, scratch=tmp_path)
    monkeypatch.setattr(k_center, "_save", save)
    again = k_center.greedy_order(rows_NH, scratch=tmp_path)
    assert again.tolist() == whole.tolist()


def test_k_center_states_the_seconds_of_an_interrupted_run_too(tmp_path, monkeypatch):
    monkeypatch.setattr(k_center, "SAVE_SECONDS", 0)
    write_json(tmp_path / "seconds.json", {"seconds": 1000.0})
    (out := tmp_path / "out").mkdir()
    k_center.run(
        SimpleNamespace(),
        embeddings=leaf_of(tmp_path / "embed", np.eye(3)),
        out=out,
        scratch=tmp_path,
        launch=SimpleNamespace(),
    )
    assert 1000 < read_json(out / "summary.json")["cost"]["seconds"] < 1100
    assert read_json(tmp_path / "seconds.json")["seconds"] > 1000


def test_k_center_of_no_rows_is_one_line(tmp_path):
    embeddings = leaf_of(tmp_path / "embed", np.zeros((0, 3)))
    with pytest.raises(UserError, match="no rows"):
        run(k_center, embeddings, tmp_path)


def test_loss_and_length_scores_are_those_of_the_samples(tmp_path):
    embeddings = leaf_of(tmp_path / "embed", np.eye(3))
    losses, _ = run(loss_top, embeddings, tmp_path / "a")
    lengths, _ = run(length_matched_random, embeddings, tmp_path / "b")
    assert losses["score"].to_list() == [0.0, 0.25, 0.5]
    assert lengths["score"].to_list() == [10, 11, 12]


def test_none_scores_nothing_and_costs_nothing(tmp_path):
    none.run(SimpleNamespace(), out=tmp_path, scratch=tmp_path, launch=SimpleNamespace())
    assert read_json(tmp_path / "summary.json")["cost"]["forward_passes"] == 0
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
