"""Stage embed: order, determinism over processes and kills, dropped rows, batches."""

from __future__ import annotations

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
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster_sft import embedding, inference, models, token_batches
from cluster_sft.artifacts import read_embeddings, read_json, read_table, write_table
from cluster_sft.errors import UserError
from cluster_sft.params import Launch
from cluster_sft.proxy import gradient_proxy
from cluster_sft.stage_params import EmbedParams
from cluster_sft.token_batches import plan_batches

SLOW_RUN = """
import sys, time
from pathlib import Path
from cluster_sft import embedding, partial_results
from cluster_sft.params import Launch
from cluster_sft.stage_params import EmbedParams
partial_results.FLUSH_SECONDS = 0
quick = embedding._outputs
def slow(*args, **settings):
    time.sleep(0.3)
    return quick(*args, **settings)
embedding._outputs = slow
model, dataset, out, scratch = sys.argv[1:]
embedding.run(EmbedParams(model=model, dtype="fp32"), dataset=Path(dataset), out=Path(out),
              scratch=Path(scratch), launch=Launch(threads=1, batch_tokens=256))
"""


def embed(model, dataset, folder: Path, *, dtype="fp32", **launch) -> Path:
    out = folder / "out"
    out.mkdir(parents=True)
    settings = Launch(**{"threads": 1, "batch_tokens": 256} | launch)
    embedding.run(
        EmbedParams(model=str(model), dtype=dtype),
        dataset=dataset,
        out=out,
        scratch=folder / "scratch",
        launch=settings,
    )
    return out


@pytest.fixture(scope="module")
def embedded(tiny_model_dir, tiny_dataset, tmp_path_factory) -> Path:
    return embed(tiny_model_dir, tiny_dataset, tmp_path_factory.mktemp("embedded"))


def payload(out: Path) -> tuple[bytes, bytes]:
    """What must be bitwise equal: embeddings, and norms and losses in float32."""
    samples = read_table(out, "samples.parquet")
    numbers = samples.select("n_tokens", "nll", "proxy_norm").to_numpy().tobytes()
    return (out / "embeddings.npy").read_bytes(), numbers


def poisoned(model_dir: Path, folder: Path, *, token: str, value: float) -> Path:
    """A copy of the model whose input embedding of `token` is `value`."""
    model = models.load_model(str(model_dir), dtype="fp32")
    tokenizer = models.load_tokenizer(str(model_dir))
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer.convert_tokens_to_ids(token)] = value
    model.save_pretrained(folder)
    return folder


def test_embed_rows_are_the_unit_gradient_proxies_in_dataset_order(
    embedded, tiny_model_dir, tiny_dataset
):
    embeddings, samples = read_embeddings(embedded)
    rows = read_table(tiny_dataset, "dataset.parquet")
    model = models.load_model(str(tiny_model_dir), dtype="fp32")
    assert samples["id"].to_list() == rows["id"].to_list()
    assert samples["n_tokens"].to_list() == rows["n_response_tokens"].to_list()
    for i in (0, 7, 39):
        input_ids = torch.tensor([rows["input_ids"][i].to_list()])
        labels = torch.tensor([rows["labels"][i].to_list()])
        proxy = gradient_proxy(model, input_ids, torch.ones_like(input_ids), labels)
        norm = proxy.embedding.norm().item()
        np.testing.assert_allclose(embeddings[i], proxy.embedding[0] / norm, atol=5e-4)
        assert samples["proxy_norm"][i] == pytest.approx(norm, rel=1e-5)
        assert samples["nll"][i] == pytest.approx(proxy.nll.item(), rel=1e-5)


def test_embed_summary_counts_what_was_done(embedded, tiny_dataset):
    summary = read_json(embedded / "summary.json")
    rows = read_table(tiny_dataset, "dataset.parquet")
    assert summary["n"] == 40
    assert summary["hidden_size"] == 32
    assert summary["tokens"] == rows["input_ids"].list.len().sum()
    assert summary["dropped_ids"] == []
    assert summary["zero_rows"] == 0
    assert summary["exact_head"]
    assert 0 <= summary["padding_share"] < 0.03


def test_embed_two_processes_give_the_bits_of_one(embedded, tiny_model_dir, tiny_dataset, tmp_path):
    out = embed(tiny_model_dir, tiny_dataset, tmp_path, processes=2, threads=2)
    assert payload(out) == payload(embedded)
    assert read_json(out / "summary.json")["processes"] == 2


def test_embed_other_batches_change_less_than_float32_rounding(
    embedded, tiny_model_dir, tiny_dataset, tmp_path
):
    out = embed(tiny_model_dir, tiny_dataset, tmp_path, batch_tokens=2048)
    for name in ("nll", "proxy_norm"):
        ours, theirs = (read_table(x, "samples.parquet")[name].to_numpy() for x in (out, embedded))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_embed_killed_run_resumes_and_ends_with_the_same_bits(
    embedded, tiny_model_dir, tiny_dataset, tmp_path
):
    (tmp_path / "killed").mkdir()
    scratch = tmp_path / "again" / "scratch"
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            SLOW_RUN,
            tiny_model_dir,
            tiny_dataset,
            tmp_path / "killed",
            scratch,
        ],
        env={**os.environ, "PYTHONPATH": str(Path(embedding.__file__).parents[1])},
        stderr=subprocess.DEVNULL,
    )
    done = scratch / "done.npy"
    deadline = time.monotonic() + 200
    while not (done.is_file() and np.load(done, mmap_mode="r").any()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not np.load(done).all()
    out = embed(tiny_model_dir, tiny_dataset, tmp_path / "again")
    assert read_json(out / "summary.json")["resumed_tokens"] > 0
    assert payload(out) == payload(embedded)


def test_embed_complete_forward_gives_what_the_short_way_gives(
    embedded, tiny_model_dir, tiny_dataset, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(inference, "head_is_exact", lambda *_, **__: False)
    out = embed(tiny_model_dir, tiny_dataset, tmp_path)
    assert "LlamaForCausalLM: its logits are not head(h)" in capsys.readouterr().err
    assert not read_json(out / "summary.json")["exact_head"]
    ours, theirs = (read_embeddings(x)[0] for x in (out, embedded))
    np.testing.assert_allclose(ours, theirs, atol=1e-3)


def test_embed_non_finite_rows_are_dropped_and_listed(tiny_model_dir, tiny_dataset, tmp_path):
    model = poisoned(tiny_model_dir, tmp_path / "model", token="8", value=torch.inf)
    out = embed(model, tiny_dataset, tmp_path)
    embeddings, samples = read_embeddings(out)
    summary = read_json(out / "summary.json")
    assert summary["dropped_ids"] == ["0008", "0018", "0028", "0038"]
    assert summary["n"] == len(embeddings) == len(samples) == 36
    assert np.isfinite(embeddings).all()
    np.testing.assert_allclose(np.linalg.norm(embeddings.astype(np.float32), axis=1), 1, rtol=1e-3)


def test_embed_only_non_finite_rows_is_an_error(tiny_model_dir, tiny_dataset, tmp_path):
    model = poisoned(tiny_model_dir, tmp_path / "model", token="<|im_start|>", value=torch.nan)
    with pytest.raises(UserError, match="all 40 gradient proxies are non-finite"):
        embed(model, tiny_dataset, tmp_path)


def test_embed_row_without_supervised_tokens_stays_as_a_zero_row(
    tiny_model_dir, tiny_dataset, tmp_path
):
    rows = read_table(tiny_dataset, "dataset.parquet").head(3)
    blank = pl.Series("labels", [[-100] * len(rows["labels"][0]), *rows["labels"][1:].to_list()])
    write_table(tmp_path, "dataset.parquet", rows.with_columns(blank))
    embeddings, samples = read_embeddings(out := embed(tiny_model_dir, tmp_path, tmp_path / "x"))
    assert not embeddings[0].any() and embeddings[1].any()
    assert samples["proxy_norm"][0] == 0
    assert read_json(out / "summary.json")["zero_rows"] == 1


def test_embed_out_of_memory_names_the_key_to_lower(
    tiny_model_dir, tiny_dataset, tmp_path, monkeypatch
):
    def full(*arguments, **settings):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(embedding, "proxies_at", full)
    with pytest.raises(UserError, match=r"lower launch\.batch_tokens, which is 256"):
        embed(tiny_model_dir, tiny_dataset, tmp_path, batch_tokens=256)


def test_embed_empty_dataset_is_an_error(tiny_model_dir, tiny_dataset, tmp_path):
    rows = read_table(tiny_dataset, "dataset.parquet").head(0)
    write_table(tmp_path, "dataset.parquet", rows)
    with pytest.raises(UserError, match="no rows"):
        embed(tiny_model_dir, tmp_path, tmp_path / "x")


def test_embed_row_with_fewer_labels_than_tokens_is_an_error(
    tiny_model_dir, tiny_dataset, tmp_path
):
    rows = read_table(tiny_dataset, "dataset.parquet").head(3)
    labels = rows["labels"].to_list()
    labels[1].pop()
    write_table(tmp_path, "dataset.parquet", rows.with_columns(pl.Series("labels", labels)))
    with pytest.raises(UserError, match="row 1 must have as many labels as input_ids"):
        embed(tiny_model_dir, tmp_path, tmp_path / "x")


@settings(deadline=None)  # a busy machine stops any example for a while
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=60),
    st.integers(1, 2000),
)
def test_plan_batches_hold_every_row_once_within_budget_and_padding(lengths, budget):
    lengths = np.asarray(lengths)
    plan = plan_batches(lengths, budget)
    assert sorted(plan.order) == list(range(len(lengths)))
    assert plan.bounds[0] == 0 and plan.bounds[-1] == len(lengths)
    area = 0
    for rows in map(plan.rows, range(len(plan))):
        padded = len(rows) * lengths[rows].max()
        area += padded
        assert len(rows) == 1 or padded <= budget
        assert len(rows) == 1 or 1 - lengths[rows].sum() / padded < token_batches.MAX_PADDING
    assert plan.padding == pytest.approx(1 - lengths.sum() / area)


def test_plan_batches_equal_lengths_fill_the_budget():
    plan = plan_batches(np.full(10, 100), 399)
    assert [len(plan.rows(i)) for i in range(len(plan))] == [3, 3, 3, 1]


def test_build_batch_reads_back_the_datasets_rows(tiny_dataset, tmp_path):
    rows = read_table(tiny_dataset, "dataset.parquet")
    token_batches.pack_tokens(tiny_dataset / "dataset.parquet", tmp_path)
    batch = token_batches.build_batch(token_batches.open_tokens(tmp_path), np.asarray([30, 2, 11]))
    flat = batch.input_ids.flatten()
    for i, row in enumerate((30, 2, 11)):
        real = batch.attention_mask[i].bool()
        assert batch.input_ids[i][real].tolist() == rows["input_ids"][row].to_list()
    targets = [t for r in (30, 2, 11) for t in rows["labels"][r].to_list()[1:] if t != -100]
    assert batch.targets.tolist() == targets == flat[batch.positions + 1].tolist()
    assert batch.n_tokens.tolist() == [rows["n_response_tokens"][r] for r in (30, 2, 11)]


def test_token_store_that_is_whole_is_neither_written_nor_read_for_again(tiny_dataset, tmp_path):
    scratch = tmp_path / "new" / "scratch"
    token_batches.pack_tokens(tiny_dataset / "dataset.parquet", scratch)
    before = [(scratch / name).read_bytes() for name in token_batches.FLAT]
    token_batches.pack_tokens(tmp_path / "no-such.parquet", scratch)
    token_batches.write_tokens((pytest.fail("a row was asked for") for _ in range(1)), scratch)
    assert [(scratch / name).read_bytes() for name in token_batches.FLAT] == before
