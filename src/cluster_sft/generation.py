"""Greedy generation in batches."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from cluster_sft.errors import UserError
from cluster_sft.models import load_model

# Fixed, since the make-up of a batch decides how low-precision sums are rounded.
BATCH_ROWS = 16


def generate(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    dtype: str,
    max_new_tokens: int,
    ends: Sequence[int] = (),
    stop: Sequence[str] = (),
) -> tuple[list[str], str]:
    """Continue every prompt greedily; return the texts and the engine that made them.

    vLLM does it where it is installed and a GPU is present, Transformers otherwise.

    Args:
        name: the model, as for `load_model`.
        tokenizer: of the model.
        prompts: tokens of each prompt, special tokens included.
        dtype: of the weights, bf16 or fp32.
        max_new_tokens: at most so many for each, less where the model's context ends.
        ends: tokens that end a continuation, beside the model's own and the tokenizer's.
        stop: texts before which a continuation ends.

    Raises:
        UserError: a prompt leaves no room in the model's context, or the model cannot be loaded.
    """
    if torch.cuda.is_available() and importlib.util.find_spec("vllm"):
        return _generate_vllm(name, prompts, dtype, max_new_tokens, ends, stop), "vllm"
    model = load_model(name, dtype=dtype, device="auto")
    texts = continue_prompts(
        model, tokenizer, prompts, max_new_tokens=max_new_tokens, ends=ends, stop=stop
    )
    return texts, "transformers"


def continue_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    ends: Sequence[int] = (),
    stop: Sequence[str] = (),
    batch_rows: int = BATCH_ROWS,
) -> list[str]:
    """Continue every prompt with a loaded Transformers model; arguments as for `generate`.

    Prompts of similar length share a batch, padded on the left.
    """
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context and (long := [i for i, prompt in enumerate(prompts) if len(prompt) >= context]):
        raise UserError(
            f"prompt {long[0]} has {len(prompts[long[0]])} tokens, the model's context {context}; "
            "leave it out of the suite or take a model with a longer context"
        )
    all_ends = sorted({*ends, *end_tokens(model, tokenizer)})
    texts = [""] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    with tqdm(total=len(prompts), desc="generating", unit="prompt") as bar:
        for start in range(0, len(order), batch_rows):
            batch = order[start : start + batch_rows]
            room = context - len(prompts[batch[0]]) if context else max_new_tokens
            new = min(max_new_tokens, room)
            rows = [prompts[i] for i in batch]
            found = _continue_batch(model, tokenizer, rows, new, all_ends, stop)
            for i, text in zip(batch, found, strict=True):
                texts[i] = text
            bar.update(len(batch))
    return texts


def cut(text: str, stop: Sequence[str]) -> str:
    """Return `text` up to the first occurrence of any of `stop`."""
    return text[: min((text.index(s) for s in stop if s in text), default=len(text))]


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return every token that ends an answer: the model's own and the tokenizer's."""
    known: Any = model.generation_config.eos_token_id if model.generation_config else None
    found = [*(known if isinstance(known, list) else [known]), tokenizer.eos_token_id]
    return sorted({int(token) for token in found if token is not None})


@torch.inference_mode()
def _continue_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Sequence[int]],
    max_new_tokens: int,
    ends: list[int],
    stop: Sequence[str],
) -> list[str]:
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (ends or [0])[0]
    width = max(map(len, prompts))
    padded = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    # The model's own settings (sampling, penalties) would be merged in: greedy means greedy.
    config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=pad,
    )
    kept, model.generation_config = model.generation_config, config
    try:
        generate_tokens: Any = model.generate
        output = generate_tokens(
            padded.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([_StopAtText(tokenizer, stop, width)]),
        )
    finally:
        model.generation_config = kept
    texts = []
    for row in output[:, width:].tolist():
        # By position, since padding may be spelled like the end token.
        end = next((j for j, token in enumerate(row) if token in ends), len(row))
        texts.append(cut(str(tokenizer.decode(row[:end], skip_special_tokens=True)), stop))
    return texts


class _StopAtText(StoppingCriteria):
    """Ends each row for itself once one of some texts has appeared after the prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], width: int) -> None:
        self._tokenizer, self._stop, self._width = tokenizer, tuple(stop), width
        # A token is at least a byte, so no text spans more tokens than it has bytes.
        self._window = max((len(text.encode()) for text in stop), default=0) + 1

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        done = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        if not self._stop:
            return done
        tails = input_ids[:, self._width :][:, -self._window :].tolist()
        texts = self._tokenizer.batch_decode(tails, skip_special_tokens=True)
        for i, text in enumerate(texts):
            done[i] = any(stop in text for stop in self._stop)
        return done


def _generate_vllm(
    name: str,
    prompts: Sequence[Sequence[int]],
    dtype: str,
    max_new_tokens: int,
    ends: Sequence[int],
    stop: Sequence[str],
) -> list[str]:
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    from cluster_sft.models import local_path

    kinds = {"bf16": "bfloat16", "fp32": "float32"}
    engine = LLM(model=str(local_path(name)), dtype=kinds[dtype], seed=0)
    settings = SamplingParams(
        temperature=0.0, max_tokens=max_new_tokens, stop_token_ids=list(ends), stop=list(stop)
    )
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [cut(result.outputs[0].text, stop) for result in engine.generate(inputs, settings)]
