"""Shared fixtures: a 2-layer random model with a small tokenizer, and small leaves. No network."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import polars as pl
import pytest

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "Write a function that returns the sum of two numbers.",
    "def add(a, b):\n    return a + b\n",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nParis",
    "The quick brown fox jumps over the lazy dog. 0123456789",
]


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """A byte-level BPE of about 320 tokens with a ChatML template; pad equals eos, no BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )


@pytest.fixture(scope="session")
def tiny_model_dir(tiny_tokenizer, tmp_path_factory) -> Path:
    """A saved 2-layer Llama (hidden 32, tied embeddings, random weights) with `tiny_tokenizer`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("model") / "tiny"
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tiny_tokenizer.bos_token_id,
        eos_token_id=tiny_tokenizer.eos_token_id,
        pad_token_id=tiny_tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_dataset(tiny_tokenizer, tmp_path_factory) -> Path:
    """A prepared leaf of 40 short conversations of unequal length, sorted by id."""
    from cluster_sft.artifacts import DATASET, write_table

    leaf = tmp_path_factory.mktemp("dataset") / "prepare"
    leaf.mkdir()
    rows = [dataset_row(tiny_tokenizer, i) for i in range(40)]
    write_table(leaf, "dataset.parquet", pl.DataFrame(rows, schema=DATASET))
    return leaf


def dataset_row(tokenizer, i: int) -> dict:
    """Row `i` of `tiny_dataset`: a question, and an answer of up to 3 + 7 i characters."""
    question, answer = f"Count to {i}.", " ".join(["one", "two", "three", "four"] * 10)[: 3 + 7 * i]
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer_ids = tokenizer(f"{answer}<|im_end|>", add_special_tokens=False)["input_ids"]
    return {
        "id": f"{i:04d}",
        "source_id": str(i),
        "source_row": i,
        "messages": messages,
        "category": "even" if i % 2 == 0 else "odd",
        "n_prompt_tokens": len(prompt_ids),
        "n_response_tokens": len(answer_ids),
        "input_ids": prompt_ids + answer_ids,
        "labels": [-100] * len(prompt_ids) + answer_ids,
        "record": "{}",
    }
