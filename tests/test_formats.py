"""Shapes of raw rows: detection, mapping, and which defects are errors and which are drops."""

from __future__ import annotations

import pytest

from cluster_sft import formats
from cluster_sft.errors import UserError

EXAMPLES = {name: formats.get(name).example for name in formats.names()}
EXCHANGE = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def reader(row, *, name="auto", fields=None):
    return formats.reader([row], name=name, fields=fields or {}, where="data.jsonl, row 0")


def read(row, **options):
    return reader(row, **options).read(row)


def test_registry_holds_the_known_shapes():
    assert {"alpaca", "messages", "prompt_completion", "sharegpt"} <= set(formats.names())


@pytest.mark.parametrize("name", formats.names())
def test_format_contract_auto_finds_it_and_extra_or_null_columns_change_nothing(name):
    row = EXAMPLES[name]
    assert reader(row).name == name
    assert read(row).messages == EXCHANGE
    assert read({**row, "extra": [1], "category": None, "id": float("nan")}) == read(row)


@pytest.mark.parametrize("name", formats.names())
def test_format_contract_a_required_column_missing_or_null_names_the_keys_found(name):
    row = EXAMPLES[name]
    bound = reader(row)
    for column in bound.format.required:
        key = bound.columns[column][0]
        for broken in ({k: v for k, v in row.items() if k != key}, {**row, key: None}):
            with pytest.raises(formats.Malformed, match=f"'{key}' is missing or null.*keys found"):
                bound.read({**broken, "other": 1})


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "q", "response": "a"},
        {"instruction": "q", "input": None, "output": "a"},
        {"instruction": "q", "context": "", "response": "a", "category": "closed_qa"},
        {"problem": "q", "solution": "a", "lang": "python", "raw_index": 3},
        {"question": "q", "answer": "a"},
        {"prompt": [EXCHANGE[0]], "completion": [EXCHANGE[1]]},
        {"conversations": [{"role": "user", "content": "q"}, {"role": "model", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, EXCHANGE[1]]},
    ],
)
def test_auto_usual_names_of_columns_are_known(row):
    assert read(row).messages == EXCHANGE


def test_alpaca_input_ends_the_instruction_after_an_empty_line():
    sample = read({"instruction": "Add.", "input": "1, 2", "output": "3"})
    assert sample.messages[0]["content"] == "Add.\n\n1, 2"
    assert sample.context == "1, 2"


def test_text_is_never_trimmed():
    sample = read({"instruction": " q\n", "output": "\ta \r\n"})
    assert [m["content"] for m in sample.messages] == [" q\n", "\ta \r\n"]


def test_system_column_opens_the_conversation():
    sample = read({"system_prompt": "be brief", "question": "q", "response": "a"})
    assert sample.messages == [{"role": "system", "content": "be brief"}, *EXCHANGE]


def test_source_id_and_category_of_any_type_become_text():
    sample = read({**EXAMPLES["alpaca"], "id": 7, "category": "x"})
    assert (sample.source_id, sample.category) == ("7", "x")


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"task": "q", "output": "a"}, {"instruction": "task"}),
        ({"x": "q", "y": "a"}, {"prompt": "x", "response": "y"}),
        ({"x": "q", "y": "a"}, {"instruction": "x", "response": "y"}),
        ({"output": "no", "better": "a", "instruction": "q"}, {"response": "better"}),
        (
            {"talk": [{"who": "human", "said": "q"}, {"who": "gpt", "said": "a"}]},
            {"conversations": "talk", "from": "who", "value": "said"},
        ),
    ],
)
def test_fields_map_names_onto_columns(row, fields):
    assert read(row, fields=fields).messages == EXCHANGE


def test_fields_map_category_and_id():
    row = {"problem": "q", "solution": "a", "lang": "rust", "index": 12}
    sample = read(row, fields={"category": "lang", "id": "index"})
    assert (sample.category, sample.source_id) == ("rust", "12")


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            {"foo": 1, "bar": 2},
            {},
            r"row 0: .*no known shape \(keys found: foo, bar\).*data.fields",
        ),
        ({}, {}, "no known shape.*keys found: none"),
        ({**EXAMPLES["alpaca"], **EXAMPLES["messages"]}, {}, "fits the shapes alpaca and messages"),
        (
            EXAMPLES["alpaca"],
            {"name": "alpacca"},
            "unknown format 'alpacca'; did you mean 'alpaca'",
        ),
        (EXAMPLES["alpaca"], {"fields": {"reponse": "output"}}, "did you mean 'response'"),
        (EXAMPLES["alpaca"], {"fields": {"response": "outputs"}}, "did you mean 'output'"),
    ],
)
def test_reader_what_it_cannot_bind_is_one_error_with_the_remedy(row, options, message):
    with pytest.raises(UserError, match=message):
        reader(row, **options)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": "q", "output": 3}, r"'output' must be a string, got int \(3\)"),
        ({"instruction": "q", "output": {"a": 1}}, "'output' must be a string, got dict"),
        ({"instruction": "q", "output": "a", "response": "b"}, "both 'output' and 'response'"),
        ({"instruction": "q", "output": "a\ud83d"}, "'output' holds the lone surrogate"),
        ({"messages": "hello"}, "'messages' must be a list of turns, got str"),
        ({"messages": ["hello"]}, r"messages\[0\] must be an object"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] lacks 'content'"),
        ({"messages": [{"role": "elf", "content": "q"}]}, "unknown role 'elf'; known: system"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "part of type 'image_url'; only text",
        ),
    ],
)
def test_read_defects_of_form_are_errors(row, message):
    with pytest.raises(formats.Malformed, match=message):
        read(row)


def talk(*roles: str) -> dict[str, list[dict[str, str]]]:
    return {"messages": [{"role": r, "content": "x"} for r in roles]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"instruction": "q", "output": ""}, "empty_response"),
        ({"instruction": "q", "output": " \n"}, "empty_response"),
        (talk("user"), "empty_response"),
        (talk("assistant", "user", "assistant"), "starts_with_assistant"),
        (talk("system", "assistant"), "no_user_turn"),
        (talk("system", "assistant", "user"), "starts_with_assistant"),
        ({"messages": []}, "no_user_turn"),
        (talk("user", "user", "assistant"), "bad_turn_order"),
        (talk("user", "assistant", "assistant"), "bad_turn_order"),
        (talk("user", "assistant", "system"), "bad_turn_order"),
        (
            {"messages": [EXCHANGE[0], {"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "tool_call_without_content",
        ),
        (
            {"messages": [EXCHANGE[0], {"role": "assistant", "tool_calls": [{"id": 1}]}]},
            "tool_call_without_content",
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "function_call", "value": "{}"},
                ]
            },
            "tool_call_without_content",
        ),
    ],
)
def test_read_defects_of_content_are_drops_with_a_reason(row, reason):
    with pytest.raises(formats.Unusable) as caught:
        read(row)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "roles",
    [
        ("system", "user", "assistant"),
        ("user", "assistant", "user"),
        ("user", "assistant", "tool", "tool", "assistant", "user", "assistant"),
    ],
)
def test_read_usable_orders_of_turns_are_kept(roles):
    assert [m["role"] for m in read(talk(*roles)).messages] == list(roles)


def test_fields_may_map_a_column_that_the_first_row_lacks():
    rows = [{"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": "a", "kind": "x"}]
    bound = formats.reader(rows, name="auto", fields={"category": "kind"}, where="data, row 0")
    assert [bound.read(r).category for r in rows] == [None, "x"]


def test_fields_column_that_no_row_has_is_an_error_for_optional_names_too():
    with pytest.raises(UserError, match="no row has; did you mean 'lang'"):
        reader({"prompt": "q", "completion": "a", "lang": "c"}, fields={"category": "lagn"})


def test_read_row_of_another_shape_than_the_first_is_an_error():
    bound = reader({"instruction": "q", "output": "a"})
    with pytest.raises(formats.Malformed, match="'output' is missing"):
        bound.read({"instruction": "q", "response": "a"})
