"""Scorer ifd: two losses of the same response tokens, by hand; processes, kills, exclusions."""

from __future__ import annotations

import copy
import os
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

from cluster_sft import models, row_losses
from cluster_sft.artifacts import read_json, read_scores, read_table, write_json, write_table
from cluster_sft.errors import UserError
from cluster_sft.params import Launch
from cluster_sft.rendering import Renderer
from cluster_sft.scorers import ifd
from cluster_sft.token_batches import TokenStore, build_batch

HEADER = "<|im_start|>assistant\n"
SLOW_RUN = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from cluster_sft import partial_results, row_losses
from cluster_sft.params import Launch
from cluster_sft.scorers import ifd
partial_results.FLUSH_SECONDS = 0
quick = row_losses._outputs
def slow(*args, **settings):
    time.sleep(0.3)
    return quick(*args, **settings)
row_losses._outputs = slow
model, dataset, out, scratch = sys.argv[1:]
ifd.run(SimpleNamespace(formula="loss_ratio", model=model, dtype="fp32"), dataset=Path(dataset),
        out=Path(out), scratch=Path(scratch), launch=Launch(threads=1, batch_tokens=256))
"""


@pytest.fixture(scope="module")
def dataset(tiny_dataset, tmp_path_factory) -> Path:
    leaf = tmp_path_factory.mktemp("ifd") / "prepare"
    leaf.mkdir()
    write_table(leaf, "dataset.parquet", read_table(tiny_dataset, "dataset.parquet"))
    write_json(leaf / "summary.json", {"template": "auto"})
    return leaf


def score(model, dataset, folder: Path, *, formula="loss_ratio", **launch) -> Path:
    (out := folder / "out").mkdir(parents=True)
    ifd.run(
        SimpleNamespace(formula=formula, model=str(model), dtype="fp32"),
        dataset=dataset,
        out=out,
        scratch=folder / "scratch",
        launch=Launch(**{"threads": 1, "batch_tokens": 256} | launch),
    )
    return out


@pytest.fixture(scope="module")
def scored(tiny_model_dir, dataset, tmp_path_factory) -> Path:
    return score(tiny_model_dir, dataset, tmp_path_factory.mktemp("scored"))


def loss_after(model, prefix, response):
    """Mean loss of the response's tokens, from the model's plain forward."""
    ids = torch.tensor([prefix + response])
    labels = torch.tensor([[-100] * len(prefix) + response])
    with torch.no_grad():
        return model(input_ids=ids, labels=labels).loss.item()


def by_hand(model, tokenizer, row):
    prefix, response = (
        [t for t, kept in zip(row["input_ids"], marks, strict=True) if kept]
        for marks in (
            [x == -100 for x in row["labels"]],
            [x != -100 for x in row["labels"]],
        )
    )
    header = tokenizer(HEADER, add_special_tokens=False)["input_ids"]
    return loss_after(model, prefix, response), loss_after(model, header, response)


@pytest.mark.parametrize("formula", ["loss_ratio", "perplexity_ratio"])
def test_ifd_is_the_ratio_of_two_plain_losses(
    scored, tiny_model_dir, tiny_tokenizer, dataset, tmp_path, formula
):
    out = scored
    if formula != "loss_ratio":
        out = score(tiny_model_dir, dataset, tmp_path, formula=formula)
    scores = read_scores(out)
    model = models.load_model(str(tiny_model_dir), dtype="fp32")
    rows = read_table(dataset, "dataset.parquet")
    assert scores["id"].to_list() == rows["id"].to_list()
    for i in (0, 5, 39):
        given, alone = by_hand(model, tiny_tokenizer, rows.row(i, named=True))
        wanted = given / alone if formula == "loss_ratio" else np.exp(given - alone)
        assert scores["score"][i] == pytest.approx(wanted, rel=1e-5)


def test_ifd_summary_counts_passes_and_rows_above_one(scored, dataset, tiny_tokenizer):
    summary, scores = read_json(scored / "summary.json"), read_scores(scored)
    assert summary["cost"]["forward_passes"] == 80
    assert summary["scored"] == 40
    assert summary["above_one"] == (scores["score"] > 1).sum()
    rows = read_table(dataset, "dataset.parquet")
    header = len(tiny_tokenizer(HEADER, add_special_tokens=False)["input_ids"])
    whole, response = rows["input_ids"].list.len().sum(), rows["n_response_tokens"].sum()
    assert summary["cost"]["tokens"] == whole + response + 40 * header


def test_ifd_two_processes_give_the_bits_of_one(scored, tiny_model_dir, dataset, tmp_path):
    out = score(tiny_model_dir, dataset, tmp_path, processes=2, threads=2)
    assert read_scores(out).equals(read_scores(scored))


def test_ifd_killed_run_resumes_and_ends_with_the_same_bits(
    scored, tiny_model_dir, dataset, tmp_path
):
    (tmp_path / "killed").mkdir()
    scratch = tmp_path / "again" / "scratch"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_RUN, tiny_model_dir, dataset, tmp_path / "killed", scratch],
        env={**os.environ, "PYTHONPATH": str(Path(ifd.__file__).parents[2])},
        stderr=subprocess.DEVNULL,
    )
    done = scratch / "done.npy"
    deadline = time.monotonic() + 200
    while not (scratch / "seconds.json").is_file():  # written once rows are marked
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = int(np.load(done).sum())
    assert 0 < before < 80
    assert 0 < read_json(scratch / "seconds.json")["seconds"] < 200
    write_json(scratch / "seconds.json", {"seconds": 1000.0})
    out = score(tiny_model_dir, dataset, tmp_path / "again")
    summary = read_json(out / "summary.json")
    assert summary["resumed_tokens"] > 0
    assert 1000 < summary["cost"]["seconds"] < 1200
    assert read_scores(out).equals(read_scores(scored))


def test_ifd_of_a_row_without_response_or_of_infinite_loss_is_excluded_with_a_reason(
    tiny_model_dir, dataset, tmp_path, monkeypatch
):
    rows = read_table(dataset, "dataset.parquet").head(3)
    blank = [[-100] * len(rows["labels"][0]), *rows["labels"][1:].to_list()]
    write_table(tmp_path, "dataset.parquet", rows.with_columns(labels=pl.Series(blank)))
    write_json(tmp_path / "summary.json", {"template": "auto"})
    monkeypatch.setattr(ifd, "difficulty", lambda a, b, *, formula: np.where([0, 1, 0], np.inf, a))
    out = score(tiny_model_dir, tmp_path, tmp_path / "x")
    scores, summary = read_scores(out), read_json(out / "summary.json")
    assert scores["reason"].to_list() == ["no_response_tokens", "non_finite", None]
    assert scores["score"].is_null().to_list() == [True, True, False]
    assert summary["excluded"] == {"no_response_tokens": 1, "non_finite": 1}


def test_ifd_of_no_rows_is_one_line(tiny_model_dir, dataset, tmp_path):
    rows = read_table(dataset, "dataset.parquet").head(0)
    write_table(tmp_path, "dataset.parquet", rows)
    with pytest.raises(UserError, match="no rows"):
        score(tiny_model_dir, tmp_path, tmp_path / "x")


@pytest.fixture(scope="module")
def renderer(tiny_model_dir):
    return Renderer.of(models.load_tokenizer(str(tiny_model_dir)), template="auto")


@pytest.mark.parametrize(
    ("template", "header"),
    [("auto", HEADER), ("alpaca", "\n\n### Response:"), ("plain", "\n")],
)
def test_header_is_what_announces_the_answer(tiny_tokenizer, template, header):
    renderer = Renderer.of(tiny_tokenizer, template=template)
    assert renderer.header([{"role": "user", "content": "Hi."}]) == header


def test_header_of_a_template_without_generation_prompt_is_all_after_the_prompt(tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
        "{% else %} {{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
    )
    renderer = Renderer.of(tokenizer, template="auto")
    assert renderer.header([{"role": "user", "content": "Hi."}]) == " [/INST]"


def test_texts_of_a_conversation_are_its_last_answer(renderer):
    said = [("user", "Hi."), ("assistant", "Ho"), ("user", "And?"), ("assistant", "No")]
    messages = [{"role": role, "content": content} for role, content in said]
    (encoded,) = renderer.encode([renderer.conversation(messages)])
    backend = renderer.tokenization.backend
    found = ifd.texts(
        encoded.input_ids,
        encoded.labels,
        header=renderer.header(messages[:3]),
        bos=None,
        decode=lambda ids: backend.decode(ids, skip_special_tokens=False),
    )
    (given, given_labels), (alone, alone_labels) = found
    decoded = [backend.decode(ids.tolist(), skip_special_tokens=False) for ids in (given, alone)]
    assert decoded[1] == f"{HEADER}No<|im_end|>"
    assert decoded[0].endswith(f"And?<|im_end|>\n{decoded[1]}")
    supervised = [x[x != -100].tolist() for x in (given_labels, alone_labels)]
    assert supervised[0] == supervised[1] == alone[-len(supervised[0]) :].tolist()


@pytest.mark.parametrize(
    ("header", "before", "count"),
    [
        ("<a>\n", ["x", "<a>", "\n"], 2),
        ("\n\n### Response:", [".\n\n", "###", " Response", ":"], 3),
        (" ### Response:", ["x", " ###", " Response"], 2),  # the colon went into the response
        ("", ["x", "y"], 1),
        ("助手：", ["x", "\ufffd", "\ufffd", "手", "："], 2),
    ],
)
def test_header_tokens_are_those_wholly_of_the_header(header, before, count):
    ids = list(range(len(before)))
    decode = lambda chosen: "".join(before[i] for i in chosen)  # noqa: E731
    assert ifd.header_tokens(ids, header, decode) == count


def test_texts_keep_the_beginning_of_sequence_token_in_front_of_the_header():
    ids, labels = np.array([9, 1, 2, 3, 4]), np.array([-100, -100, -100, 3, 4])
    _, (alone, marks) = ifd.texts(ids, labels, header="", bos=9, decode=lambda _: "?")
    assert alone.tolist() == [9, 2, 3, 4]
    assert marks.tolist() == [-100, -100, 3, 4]


def test_row_losses_are_nan_without_tokens_and_infinite_where_not_finite(tiny_model_dir):
    model = models.load_model(str(tiny_model_dir), dtype="fp32")
    ids = np.array([5, 6, 7, 5, 6], np.int32)
    labels = np.array([-100, 6, 7, -100, -100], np.int32)
    batch = build_batch(TokenStore(ids, labels, np.array([0, 3, 5])), np.array([0, 1]))
    with torch.no_grad():
        (found,) = row_losses._outputs(model, batch, exact_head=True)
        assert torch.isfinite(found[0]) and torch.isnan(found[1])
        model.model.embed_tokens.weight[5] = torch.nan
        (found,) = row_losses._outputs(model, batch, exact_head=True)
    assert torch.isinf(found[0]) and torch.isnan(found[1])
