"""Batched greedy generation against one prompt at a time, and where it ends."""

from __future__ import annotations

import pytest
import torch

from cluster_sft.errors import UserError
from cluster_sft.generation import continue_prompts, cut, end_tokens, generate
from cluster_sft.models import load_model, load_tokenizer

PROMPTS = ["one two three", "def f(x):", "a", "The quick brown fox jumps over the lazy dog again"]


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return load_model(str(tiny_model_dir), dtype="fp32")


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    return load_tokenizer(str(tiny_model_dir))


def greedy(model, prompt: list[int], new: int, ends: set[int]) -> list[int]:
    """The argmax after the whole sequence, again and again: no cache, no padding, no library."""
    ids = list(prompt)
    for _ in range(new):
        with torch.inference_mode():
            token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        if token in ends:
            break
        ids.append(token)
    return ids[len(prompt) :]


@pytest.mark.parametrize("batch_rows", [1, 3, 16])
def test_batched_continuations_equal_argmax_of_single_prompts(model, tokenizer, batch_rows):
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    ends = set(end_tokens(model, tokenizer))
    expected = [tokenizer.decode(greedy(model, p, 12, ends)) for p in prompts]
    found = continue_prompts(model, tokenizer, prompts, max_new_tokens=12, batch_rows=batch_rows)
    assert found == expected
    assert all(expected)


def test_continuation_ends_before_an_end_token(model, tokenizer):
    prompt = tokenizer(PROMPTS[0])["input_ids"]
    tokens = greedy(model, prompt, 12, set())
    end = tokens[4]
    found = continue_prompts(model, tokenizer, [prompt], max_new_tokens=12, ends=[end])
    assert found == [tokenizer.decode(tokens[: tokens.index(end)], skip_special_tokens=True)]


def test_continuation_ends_before_a_stop_text_and_generates_no_further(
    model, tokenizer, monkeypatch
):
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    whole = continue_prompts(model, tokenizer, prompts, max_new_tokens=12)
    stop = whole[0][5:8]
    lengths = []
    original = model.generate

    def counting(*args, **kwargs):
        output = original(*args, **kwargs)
        lengths.append(output.shape[1])
        return output

    monkeypatch.setattr(model, "generate", counting)
    found = continue_prompts(model, tokenizer, prompts[:1], max_new_tokens=12, stop=[stop])
    assert found == [whole[0][: whole[0].index(stop)]]
    assert lengths[0] < len(prompts[0]) + 12


def test_settings_of_the_model_do_not_turn_greedy_into_sampling(model, tokenizer, monkeypatch):
    prompts = [tokenizer(PROMPTS[0])["input_ids"]]
    plain = continue_prompts(model, tokenizer, prompts, max_new_tokens=12)
    for name, value in (("do_sample", True), ("temperature", 9.0), ("repetition_penalty", 5.0)):
        monkeypatch.setattr(model.generation_config, name, value)
    before = model.generation_config
    assert continue_prompts(model, tokenizer, prompts, max_new_tokens=12) == plain
    assert model.generation_config is before


def test_prompt_as_long_as_the_context_is_an_error(model, tokenizer):
    with pytest.raises(UserError, match="prompt 1 has 512 tokens, the model's context 512"):
        continue_prompts(model, tokenizer, [[5], [5] * 512], max_new_tokens=4)


def test_continuation_stops_at_the_end_of_the_context(model, tokenizer):
    tokens = greedy(model, [5] * 510, 2, set())
    found = continue_prompts(model, tokenizer, [[5] * 510], max_new_tokens=50)
    assert found == [tokenizer.decode(tokens, skip_special_tokens=True)]


def test_text_is_cut_at_the_earliest_stop():
    assert cut("one two three", ["three", "two"]) == "one "
    assert cut("one", ["two"]) == "one"


def test_generate_names_the_engine(tiny_model_dir, tokenizer):
    texts, engine = generate(
        str(tiny_model_dir), tokenizer, [[5, 6]], dtype="fp32", max_new_tokens=2
    )
    assert (len(texts), engine) == (1, "transformers")
