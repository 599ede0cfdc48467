"""Rendering: what is supervised under templates that trim, move and add; tokens; ids."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from cluster_sft.errors import UserError
from cluster_sft.rendering import (
    Renderer,
    TemplateRefusal,
    prompt_tokens,
    render_prompt,
    stop_tokens,
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# The system's text goes into the last user's turn, wherever that is.
MOVES = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}{{ bos_token }}"
    "{% for m in rest %}{% if m.role == 'user' %}[INST] "
    "{% if system is defined and loop.index0 >= rest | length - 2 %}{{ system }}\n\n{% endif %}"
    "{{ m.content }}[/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# Thoughts are dropped from earlier turns, and an empty one is put into the last.
THINKS = (
    "{% for m in messages %}{% set content = m.content %}{% if m.role == 'assistant' %}"
    "{% set content = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}{% set content = '<think>\n\n</think>\n\n' + content %}{% endif %}"
    "{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADDS = CHATML.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}So: {{ m.content | trim }} [over]{% else %}{{ m.content }}"
    "{% endif %}",
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}"
)
PADS_EOS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
FINAL_ONLY = (  # the end token stands between turns and not after the last
    "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }}\nASSISTANT:"
    "{% else %} {{ m.content }}{% if not loop.last %}{{ eos_token }}{% endif %}{% endif %}"
    "{% endfor %}"
)
CONTROLS = ["<s>", "</s>", "<|end|>", "<|user|>", "<|assistant|>", "[INST]", "[/INST]"]


def chat(*turns: str) -> list[dict[str, str]]:
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[t[0]], "content": t[2:]} for t in turns]


@pytest.fixture
def tokenizer_with(tiny_tokenizer):
    def build(template: str | None, *, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
        backend = copy.deepcopy(tiny_tokenizer.backend_tokenizer)
        backend.add_special_tokens(
            [AddedToken(c, special=True, normalized=False) for c in CONTROLS]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token="<s>",
            eos_token=eos,
            pad_token=eos,
            chat_template=template,
        )

    return build


def supervised(tokenizer, template: str, messages: list[dict[str, str]]) -> list[str]:
    rendered = Renderer.of(tokenizer, template=template).conversation(messages)
    return [rendered.text[a:b] for a, b in rendered.supervised]


TWO = chat("s:be brief", "u: hi \n", "a:\n yo\n", "u:more", "a:end")


@pytest.mark.parametrize(
    ("template", "eos", "expected"),
    [
        (CHATML, "<|im_end|>", ["\n yo\n<|im_end|>", "end<|im_end|>"]),
        (
            CHATML.replace("m.content", "m.content|trim"),
            "<|im_end|>",
            ["yo<|im_end|>", "end<|im_end|>"],
        ),
        (CHATML.split("{% if add")[0], "<|im_end|>", ["\n yo\n<|im_end|>", "end<|im_end|>"]),
        (LLAMA2, "</s>", [" yo </s>", " end </s>"]),
        (MOVES, "</s>", [" \n yo\n</s>", " end</s>"]),
        (THINKS, "<|im_end|>", ["yo\n<|im_end|>", "<think>\n\n</think>\n\nend<|im_end|>"]),
        (ADDS, "<|im_end|>", ["So: yo [over]<|im_end|>", "So: end [over]<|im_end|>"]),
        (MARKED, "<|im_end|>", ["\n yo\n<|im_end|>", "end<|im_end|>"]),
        (PADS_EOS, "</s>", ["\n yo\n<|end|>", "end<|end|>"]),
        (FINAL_ONLY, "</s>", [" \n yo\n</s>", " end"]),
        (
            CHATML.replace("m.content", "m.content|upper"),
            "<|im_end|>",
            ["\n YO\n<|im_end|>", "END<|im_end|>"],
        ),
    ],
    ids=[
        "chatml",
        "trim",
        "no-prompt",
        "llama2",
        "moves",
        "thinks",
        "adds",
        "marked",
        "pads-eos",
        "final-only",
        "upper",
    ],
)
def test_chat_template_two_exchanges_supervises_what_it_renders_of_the_assistant(
    tokenizer_with, template, eos, expected
):
    found = supervised(tokenizer_with(template, eos=eos), "auto", TWO)
    if template is THINKS:  # its own lstrip takes the line break, not the blank after it
        expected = [" " + expected[0], expected[1]]
    assert found == expected


def test_chat_template_that_splits_at_a_literal_of_its_own_is_followed(tokenizer_with):
    messages = chat("u:x", "a:<think>\nhm\n</think>\n\nyo", "u:more", "a:<think>k</think>end")
    assert supervised(tokenizer_with(THINKS), "auto", messages) == [
        "yo<|im_end|>",
        "<think>\n\n</think>\n\nend<|im_end|>",
    ]


@pytest.mark.parametrize("word", ["assistant", "user", "<|im_end|>", "</think>", "same"])
def test_chat_template_answer_equal_to_other_text_is_found_in_its_own_place(tokenizer_with, word):
    messages = chat(f"u:{word}", f"a:{word}", f"u:{word}", f"a:{word}")
    tokenizer = tokenizer_with(CHATML)
    rendered = Renderer.of(tokenizer, template="auto").conversation(messages)
    header = "<|im_start|>assistant\n"
    starts = [
        i + len(header) for i in range(len(rendered.text)) if rendered.text.startswith(header, i)
    ]
    assert rendered.supervised == [(s, s + len(f"{word}<|im_end|>")) for s in starts]


NASTY = (
    "<|im_end|> <|im_start|> </s> <think> </think> <| |> assistant user {{ So: [over] a é 😀 "
    "\n \t \r\n \u2028 \x85 \U000f0000 \U00100000"
)


def nasty(rng: random.Random) -> str:
    pieces = [*NASTY.split(" "), " "]
    return "".join(rng.choices(pieces, k=rng.randint(0, 6)))


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (CHATML, "{}"),
        (CHATML.split("{% if add")[0], "{}"),
        (ADDS, "So: {} [over]"),
    ],
    ids=["chatml", "no-prompt", "adds"],
)
def test_chat_template_whatever_the_text_supervises_the_answers_and_rewrites_nothing(
    tokenizer_with, template, answer
):
    tokenizer = tokenizer_with(template)
    renderer = Renderer.of(tokenizer, template="auto")
    rng = random.Random(0)
    for _ in range(60):
        messages, text, spans = [], "", []
        for role in ["system"] * rng.randint(0, 1) + ["user", "assistant"] * rng.randint(1, 3):
            content = nasty(rng) + ("x" if role == "assistant" else "")
            shown = content
            if role == "assistant":
                shown = answer.format(content.strip() if template is ADDS else content)
            messages.append({"role": role, "content": content})
            text += f"<|im_start|>{role}\n"
            if role == "assistant":
                spans.append((len(text), len(text) + len(f"{shown}<|im_end|>")))
            text += f"{shown}<|im_end|>\n"
        rendered = renderer.conversation(messages)
        assert (rendered.text, rendered.supervised) == (text, spans)
        (encoded,) = renderer.encode([rendered])
        assert tokenizer.decode(encoded.input_ids) == text
        controls = [tokenizer.convert_ids_to_tokens(int(i)) for i in encoded.input_ids]
        assert controls.count("<|im_start|>") == controls.count("<|im_end|>") == len(messages)
        assert "</s>" not in controls


def test_chat_template_that_leaves_the_answer_out_refuses(tokenizer_with):
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    renderer = Renderer.of(tokenizer_with(template), template="auto")
    with pytest.raises(TemplateRefusal, match="renders none of the assistant's turns"):
        renderer.conversation(chat("u:q", "a:x"))


def test_chat_template_other_roles_rewritten_still_locates_the_answers(tokenizer_with):
    template = CHATML.replace(
        "{{ m.content }}",
        "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}",
    )
    messages = chat("u:q", "a:call", 't:{"a":\n1}', "a:ok")
    found = supervised(tokenizer_with(template), "auto", messages)
    assert found == ["call<|im_end|>", "ok<|im_end|>"]


def test_chat_template_refusal_carries_the_templates_reason(tokenizer_with):
    renderer = Renderer.of(tokenizer_with(LLAMA2, eos="</s>"), template="auto")
    with pytest.raises(TemplateRefusal, match="roles must alternate"):
        renderer.conversation(chat("u:a", "u:b", "a:c"))


def test_chat_template_with_a_date_renders_the_same_text_every_day(tokenizer_with):
    template = "{{ strftime_now('%d %b %Y') }}\n" + CHATML
    rendered = Renderer.of(tokenizer_with(template), template="auto").conversation(TWO)
    assert rendered.text.startswith("26 Jul 2024\n<|im_start|>system")


def test_tokenizer_without_chat_template_names_the_remedy(tokenizer_with):
    with pytest.raises(UserError, match=r"set model\.template to alpaca, magicoder or plain"):
        Renderer.of(tokenizer_with(None), template="auto")


def test_chat_template_of_broken_jinja_is_an_error_of_the_model(tokenizer_with):
    with pytest.raises(UserError, match="no valid Jinja"):
        Renderer.of(tokenizer_with("{% for m in"), template="auto")


def test_unknown_template_names_the_nearest(tokenizer_with):
    with pytest.raises(UserError, match="did you mean 'alpaca'"):
        Renderer.of(tokenizer_with(CHATML), template="alpacca")


def test_encode_equals_plain_tokenisation_of_the_whole_text(tokenizer_with):
    tokenizer = tokenizer_with(CHATML.replace("m.content", "m.content|trim"))
    renderer = Renderer.of(tokenizer, template="auto")
    rendered = renderer.conversation(TWO)
    (encoded,) = renderer.encode([rendered])
    plain = tokenizer(rendered.text, add_special_tokens=False)["input_ids"]
    assert encoded.input_ids.tolist() == plain


def test_encode_labels_decode_to_the_supervised_text(tokenizer_with):
    tokenizer = tokenizer_with(CHATML)
    renderer = Renderer.of(tokenizer, template="auto")
    (encoded,) = renderer.encode([renderer.conversation(TWO)])
    kept = encoded.labels[encoded.labels != -100]
    assert tokenizer.decode(kept) == "\n yo\n<|im_end|>end<|im_end|>"
    assert (
        encoded.labels[encoded.labels != -100] == encoded.input_ids[encoded.labels != -100]
    ).all()


def test_encode_keeps_the_first_byte_of_an_answer_whose_token_reaches_into_the_prompt(
    tokenizer_with,
):
    # "\n" of the prompt and "\n" of the answer are one token, were it not supervised the answer
    # would lose a byte.
    backend = tokenizer_with(None).backend_tokenizer
    backend.add_tokens([AddedToken("\n\n", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    renderer = Renderer.of(tokenizer, template="plain")
    (encoded,) = renderer.encode([renderer.conversation(chat("u:q", "a:\nx"))])
    kept = encoded.labels[encoded.labels != -100]
    assert tokenizer.decode(kept) == "\n\nx<|im_end|>"


def test_encode_multibyte_text_supervises_every_byte(tokenizer_with):
    tokenizer = tokenizer_with(CHATML)
    renderer = Renderer.of(tokenizer, template="auto")
    (encoded,) = renderer.encode([renderer.conversation(chat("u:é", "a:😀 ñ\u2028z"))])
    kept = encoded.labels[encoded.labels != -100]
    assert tokenizer.decode(kept) == "😀 ñ\u2028z<|im_end|>"


@pytest.mark.parametrize("template", ["auto", "plain", "alpaca"])
def test_encode_spelled_control_tokens_stay_text(tokenizer_with, template):
    tokenizer = tokenizer_with(CHATML)
    renderer = Renderer.of(tokenizer, template=template)
    spelled = chat("u:say <|im_end|>", "a:a<|im_end|>\n<|im_start|>assistant\nb")
    harmless = chat("u:say nothing", "a:ab")
    rendered = [renderer.conversation(spelled), renderer.conversation(harmless)]
    first, second = renderer.encode(rendered)
    assert tokenizer.decode(first.input_ids) == rendered[0].text
    controls = set(tokenizer.all_special_ids)
    counts = [sum(int(i) in controls for i in e.input_ids) for e in (first, second)]
    assert counts[0] == counts[1]


def test_encode_spelled_control_token_leaves_all_other_tokens_as_they_are(tokenizer_with):
    tokenizer = tokenizer_with(CHATML)
    renderer = Renderer.of(tokenizer, template="auto")
    rendered = renderer.conversation(TWO)
    (plain,) = renderer.encode([rendered])
    twin = renderer.tokenization._marked(rendered)
    assert (twin.input_ids == plain.input_ids).all()
    assert (twin.labels == plain.labels).all()


def sentencepiece(scheme: str) -> PreTrainedTokenizerFast:
    """A word-piece BPE in Llama's manner: a BOS is added, blanks are "▁"; `first` or `legacy`."""
    from tokenizers import models, trainers

    bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if scheme == "legacy":
        bpe.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    bpe.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    bpe.train_from_iterator(["[INST] say hello [/INST] hello world </s", "<s> USER ok"], trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bpe.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize("scheme", ["legacy", "first"])
def test_encode_sentencepiece_spelled_tokens_change_nothing_else(scheme):
    tokenizer = sentencepiece(scheme)
    tokenizer.chat_template = LLAMA2
    renderer = Renderer.of(tokenizer, template="auto")
    rendered = renderer.conversation(chat("u:say hello", "a:hello world", "u:hello", "a:ok"))
    plain = tokenizer(rendered.text, add_special_tokens=False)["input_ids"]
    assert renderer.encode([rendered])[0].input_ids.tolist() == plain
    assert renderer.tokenization._marked(rendered).input_ids.tolist() == plain


@pytest.mark.parametrize("template", [LLAMA2, CHATML.replace("<|im_end|>", "</s>"), None])
def test_encode_model_with_bos_has_exactly_one(template):
    tokenizer = sentencepiece("first")
    tokenizer.chat_template = template
    renderer = Renderer.of(tokenizer, template="auto" if template else "alpaca")
    (encoded,) = renderer.encode([renderer.conversation(chat("u:hello", "a:world"))])
    assert encoded.input_ids[0] == tokenizer.bos_token_id
    assert (encoded.input_ids == tokenizer.bos_token_id).sum() == 1
    assert encoded.labels[0] == -100


def test_encode_model_whose_tokenizer_adds_no_bos_has_none(tokenizer_with):
    tokenizer = tokenizer_with(CHATML)
    renderer = Renderer.of(tokenizer, template="plain")
    (encoded,) = renderer.encode([renderer.conversation(chat("u:q", "a:x"))])
    assert tokenizer.bos_token_id not in encoded.input_ids


def test_slow_tokenizer_is_refused_with_the_remedy(tokenizer_with, monkeypatch):
    tokenizer = tokenizer_with(CHATML)
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    with pytest.raises(UserError, match=r"save a tokenizer\.json"):
        Renderer.of(tokenizer, template="auto")


def test_named_template_without_eos_token_is_refused(tokenizer_with):
    backend = tokenizer_with(None).backend_tokenizer
    with pytest.raises(UserError, match="set its eos_token"):
        Renderer.of(PreTrainedTokenizerFast(tokenizer_object=backend), template="plain")


def test_alpaca_template_shows_the_separate_input_under_its_own_heading(tokenizer_with):
    renderer = Renderer.of(tokenizer_with(None), template="alpaca")
    rendered = renderer.conversation(chat("u:Add.\n\n1, 2", "a:3"), context="1, 2")
    assert rendered.text == (
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n### Response:3<|im_end|>"
    )
    assert [rendered.text[a:b] for a, b in rendered.supervised] == ["3<|im_end|>"]


def test_magicoder_template_is_the_published_prompt(tokenizer_with):
    renderer = Renderer.of(tokenizer_with(None), template="magicoder")
    assert renderer.conversation(chat("u:Sort.", "a:sorted(x)")).text == (
        "You are an exceptionally intelligent coding assistant that consistently delivers accurate "
        "and reliable responses to user instructions.\n\n"
        "@@ Instruction\nSort.\n\n@@ Response\nsorted(x)<|im_end|>"
    )


def test_named_template_refuses_a_tools_turn(tokenizer_with):
    renderer = Renderer.of(tokenizer_with(None), template="magicoder")
    with pytest.raises(TemplateRefusal, match="no place for all of: user, assistant, tool"):
        renderer.conversation(chat("u:q", "a:c", "t:r", "a:x"))


@pytest.mark.parametrize("template", ["auto", "alpaca", "magicoder", "plain"])
def test_render_prompt_is_the_conversation_up_to_the_answer(tokenizer_with, template):
    tokenizer = tokenizer_with(CHATML)
    messages = chat("s:be brief", "u:q", "a:x")
    whole = Renderer.of(tokenizer, template=template).conversation(messages)
    prompt = render_prompt(tokenizer, template, messages[:-1])
    assert prompt == whole.text[: whole.supervised[0][0]]


def test_render_prompt_of_a_template_without_generation_prompt_ends_with_the_header(
    tokenizer_with,
):
    tokenizer = tokenizer_with(MARKED)
    assert render_prompt(tokenizer, "auto", chat("u:q")).endswith("<|im_start|>assistant\n")


def test_prompt_tokens_start_the_training_row(tokenizer_with):
    tokenizer = tokenizer_with(CHATML)
    messages = chat("u:say <|im_end|>", "a:no")
    renderer = Renderer.of(tokenizer, template="auto")
    (encoded,) = renderer.encode([renderer.conversation(messages)])
    (prompt,) = prompt_tokens(tokenizer, "auto", [messages[:-1]])
    assert prompt == encoded.input_ids[: np.flatnonzero(encoded.labels != -100)[0]].tolist()


@pytest.mark.parametrize(
    ("template", "expected"),
    [(PADS_EOS, ["</s>", "<|end|>"]), (LLAMA2, ["</s>"]), (CHATML, ["</s>", "<|im_end|>"])],
)
def test_stop_tokens_are_the_end_of_turn_and_the_end_of_sequence(
    tokenizer_with, template, expected
):
    tokenizer = tokenizer_with(template, eos="</s>")
    assert sorted(tokenizer.convert_ids_to_tokens(stop_tokens(tokenizer, "auto"))) == expected


def test_row_id_depends_on_the_text_and_on_what_is_supervised(tokenizer_with):
    renderer = Renderer.of(tokenizer_with(None), template="plain")
    one = renderer.conversation(chat("u:a", "a:b\nc"))
    other = renderer.conversation(chat("u:a\nb", "a:c"))
    assert one.text == other.text
    assert renderer.row_id(one) != renderer.row_id(other)
    assert renderer.row_id(one) == renderer.row_id(renderer.conversation(chat("u:a", "a:b\nc")))
