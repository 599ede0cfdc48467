"""Stage prepare: ids, splits, drops and labels of whole runs on small files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest

from cluster_sft import preparation
from cluster_sft.artifacts import DATASET, DROPPED, read_json, read_table
from cluster_sft.errors import UserError

ROWS = [
    {"id": i % 3, "instruction": f"Say {i}.", "output": f"It is {i}.", "category": "odd" * (i % 2)}
    for i in range(40)
]


@pytest.fixture
def prepare(tmp_path, tiny_model_dir):
    """Return a function that prepares rows (or a file) and returns the leaf."""
    count = iter(range(100))

    def run(rows, **settings) -> Path:
        source = rows
        if not isinstance(rows, Path):
            source = tmp_path / "data.jsonl"
            source.write_text("".join(json.dumps(r) + "\n" for r in rows))
        out = tmp_path / f"out-{next(count)}"
        out.mkdir()
        params = {
            "source": str(source),
            "format": "auto",
            "fields": {},
            "holdout": 0.0,
            "max_samples": None,
            "seed": 0,
            "model": str(tiny_model_dir),
            "template": "auto",
            "max_length": None,
        }
        preparation.run(
            SimpleNamespace(**{**params, **settings}), out=out, scratch=tmp_path, launch=None
        )
        return out

    return run


def dataset(leaf: Path) -> pl.DataFrame:
    return read_table(leaf, "dataset.parquet")


def dropped(leaf: Path) -> dict[int, str]:
    table = read_table(leaf, "dropped.parquet")
    return dict(zip(table["row"], table["reason"], strict=True))


def test_run_writes_the_schemas_and_rows_sorted_by_id(prepare):
    leaf = prepare(ROWS)
    found = dataset(leaf)
    assert found.schema == DATASET
    assert read_table(leaf, "heldout.parquet").schema == DATASET
    assert read_table(leaf, "dropped.parquet").schema == DROPPED
    assert found["id"].is_sorted()
    assert found["id"].n_unique() == len(ROWS)
    assert found["id"].str.contains("^[0-9a-f]{16}$").all()


def test_run_columns_hold_the_source_row(prepare):
    for row in dataset(prepare(ROWS)).iter_rows(named=True):
        source = ROWS[row["source_row"]]
        assert json.loads(row["record"]) == source
        assert row["source_id"] == str(source["id"])
        assert row["category"] == source["category"]
        assert [m["content"] for m in row["messages"]] == [source["instruction"], source["output"]]


def test_run_labels_are_the_answer_and_the_end_of_turn(prepare, tiny_tokenizer):
    for row in dataset(prepare(ROWS)).iter_rows(named=True):
        answer = [t for t in row["labels"] if t != -100]
        assert tiny_tokenizer.decode(answer) == ROWS[row["source_row"]]["output"] + "<|im_end|>"
        start = row["n_prompt_tokens"]
        assert row["labels"][start : start + row["n_response_tokens"]] == answer
        assert row["input_ids"][start : start + row["n_response_tokens"]] == answer


def test_run_order_of_the_source_changes_nothing_but_the_source_row(prepare):
    shuffled = random.Random(1).sample(ROWS, len(ROWS))
    first, second = prepare(ROWS, holdout=0.3), prepare(shuffled, holdout=0.3)
    for name in ("dataset.parquet", "heldout.parquet"):
        one, two = (read_table(leaf, name).drop("source_row") for leaf in (first, second))
        assert one.equals(two)


def test_run_duplicates_keep_the_first_row_of_the_source(prepare):
    leaf = prepare([ROWS[0], ROWS[1], {**ROWS[0], "id": "other", "note": 1}, ROWS[0]])
    assert sorted(dataset(leaf)["source_row"]) == [0, 1]
    assert dropped(leaf) == {2: "duplicate", 3: "duplicate"}


@pytest.mark.parametrize(("share", "prompts"), [(0.0, 0), (0.25, 5), (0.125, 3), (0.12, 2)])
def test_run_holdout_takes_a_rounded_share_of_prompts_with_all_their_rows(prepare, share, prompts):
    rows = [{"instruction": f"q{i % 20}", "output": f"a{i}"} for i in range(60)]
    leaf = prepare(rows, holdout=share)
    train, held = dataset(leaf), read_table(leaf, "heldout.parquet")
    sides = [{m[0]["content"] for m in t["messages"]} for t in (train, held)]
    assert not sides[0] & sides[1]
    assert len(sides[1]) == prompts
    assert len(held) == 3 * prompts
    assert len(train) == 60 - 3 * prompts


def test_run_holdout_depends_on_the_seed(prepare):
    leaves = [prepare(ROWS, holdout=0.5, seed=seed) for seed in (0, 1, 0)]
    ids = [read_table(leaf, "heldout.parquet")["id"].to_list() for leaf in leaves]
    assert ids[0] == ids[2]
    assert ids[0] != ids[1]


def test_run_max_samples_takes_the_first_ids_and_nests(prepare):
    everything = dataset(prepare(ROWS))["id"].to_list()
    for count in (1, 7, 40, 100):
        leaf = prepare(ROWS, max_samples=count)
        assert dataset(leaf)["id"].to_list() == everything[:count]
        assert list(dropped(leaf).values()) == ["max_samples"] * max(0, 40 - count)


def test_run_max_samples_counts_usable_rows_only(prepare):
    long = [{"instruction": "word " * 300 + str(i), "output": "x"} for i in range(20)]
    leaf = prepare([*ROWS[:5], *long], max_samples=5, max_length=64)
    assert sorted(dataset(leaf)["source_row"]) == [0, 1, 2, 3, 4]


def test_run_max_length_cuts_at_the_right(prepare):
    whole = dataset(prepare(ROWS))
    cut = dataset(prepare(ROWS, max_length=24))
    assert cut["input_ids"].list.len().max() == 24
    assert cut["id"].equals(whole["id"])
    assert cut["input_ids"].equals(whole["input_ids"].list.head(24))
    assert cut["labels"].equals(whole["labels"].list.head(24))


def test_run_max_length_defaults_to_the_models(prepare):
    rows = [*ROWS[:1], {"instruction": "q", "output": "x " * 2000}]
    leaf = prepare(rows)
    assert dataset(leaf)["input_ids"].list.len().max() == 512
    assert read_json(leaf / "summary.json")["max_length"] == 512


def test_run_max_length_above_the_models_context_is_refused(prepare):
    with pytest.raises(UserError, match=r"max_length must be at most .* 512 tokens, got 513"):
        prepare(ROWS, max_length=513)


def test_run_every_row_is_counted_once_under_its_reason(prepare):
    user, bot = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    talks = [
        [user, bot],
        [user, {"role": "assistant", "content": " "}],
        [bot, user, bot],
        [{"role": "system", "content": "s"}, bot],
        [user, user, bot],
        [user, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}],
        [{"role": "user", "content": "long " * 600}, bot],
        [user, bot],
        [{"role": "user", "content": "q2"}, bot],
    ]
    leaf = prepare([{"messages": t} for t in talks], holdout=0.5)
    assert dropped(leaf) == {
        1: "empty_response",
        2: "starts_with_assistant",
        3: "no_user_turn",
        4: "bad_turn_order",
        5: "tool_call_without_content",
        6: "prompt_fills_max_length",
        7: "duplicate",
    }
    summary = read_json(leaf / "summary.json")
    assert summary["rows_in"] == 9
    assert (summary["rows_kept"], summary["rows_heldout"], summary["rows_dropped"]) == (1, 1, 7)
    assert summary["dropped"] == dict.fromkeys(dropped(leaf).values(), 1)


def test_run_row_the_template_refuses_is_dropped_with_its_reason(
    prepare, tiny_tokenizer, tiny_model_dir, tmp_path
):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text((tiny_model_dir / "config.json").read_text())
    tiny_tokenizer.save_pretrained(model)
    refusing = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system here.') }}{% endif %}"
    )
    template = model / "chat_template.jinja"
    template.write_text(refusing + template.read_text())
    leaf = prepare([*ROWS[:2], {**ROWS[2], "system": "be brief"}], model=str(model))
    table = read_table(leaf, "dropped.parquet")
    assert table.rows() == [(2, "template_refused", "No system here.")]


@pytest.mark.parametrize("template", ["alpaca", "magicoder", "plain"])
def test_run_named_template_ends_answers_with_the_end_of_sequence(
    prepare, tiny_tokenizer, template
):
    row = dataset(prepare(ROWS[:1], template=template)).row(0, named=True)
    answer = [t for t in row["labels"] if t != -100]
    assert answer[-1] == tiny_tokenizer.eos_token_id
    assert tiny_tokenizer.decode(answer).strip() == "It is 0.<|im_end|>"


def test_run_alpaca_template_keeps_input_apart(prepare, tiny_tokenizer):
    rows = [{"instruction": "Add.", "input": "1, 2", "output": "3"}]
    row = dataset(prepare(rows, template="alpaca")).row(0, named=True)
    assert "### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n" in tiny_tokenizer.decode(
        row["input_ids"]
    )


def test_run_extra_columns_and_odd_values_reach_the_record_as_json(prepare):
    extra = {"n": float("nan"), "lone": "\ud83d", "deep": {"a": [1, None, "ü"]}}
    row = dataset(prepare([{**ROWS[0], **extra}])).row(0, named=True)
    record = json.loads(row["record"], parse_constant=lambda c: pytest.fail(c))
    assert record["n"] is None
    assert record["deep"] == extra["deep"]


def test_run_parquet_with_dates_and_bytes_beside_the_text(prepare, tmp_path):
    from datetime import date

    path = tmp_path / "data.parquet"
    extra = {"when": [date(2024, 1, 2)], "raw": [b"\x00\xff"]}
    pl.DataFrame({"prompt": ["q"], "completion": ["a"], **extra}).write_parquet(path)
    record = json.loads(dataset(prepare(path))["record"][0])
    assert record["when"] == "2024-01-02"
    assert record["raw"] == "00ff"


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{**ROWS[0], "output": ""}], {}, "all 1 rows were dropped.*empty_response 1.*mend"),
        (ROWS, {"max_length": 4}, "all 40 rows were dropped.*prompt_fills_max_length 40"),
        (ROWS[:1], {"holdout": 0.9}, "holdout holds out all 1 usable rows; lower it"),
        ([ROWS[0], {"messages": []}], {}, r"data.jsonl, row 1 \(line 2\): .*missing"),
        ([ROWS[0], {**ROWS[1], "output": 3}], {}, r"row 1 \(line 2\): 'output' must be a string"),
        ([{"foo": 1}], {}, r"row 0 \(line 1\): .*no known shape \(keys found: foo\)"),
        (ROWS, {"model": "/nowhere"}, "no such directory"),
    ],
)
def test_run_what_a_user_can_cause_is_one_line(prepare, rows, settings, message):
    with pytest.raises(UserError, match=message) as caught:
        prepare(rows, **settings)
    assert "\n" not in str(caught.value)


def test_run_tells_the_counts_in_one_line(prepare, capsys):
    prepare([*ROWS[:3], ROWS[0]])
    (line,) = [ln for ln in capsys.readouterr().err.splitlines() if ln.startswith("prepare: 4")]
    assert line == "prepare: 4 rows: 3 kept, 0 held out, duplicate 1"


def test_run_model_without_tokenizer_is_an_error(prepare, tiny_model_dir, tmp_path):
    model = tmp_path / "bare"
    model.mkdir()
    (model / "config.json").write_text((tiny_model_dir / "config.json").read_text())
    with pytest.raises(UserError, match="no tokenizer"):
        prepare(ROWS, model=str(model))
