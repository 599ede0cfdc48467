"""Step ifd of score: how little the instruction helps to predict the response.

    loss_ratio        IFD = L_cond / L_dir           (Li et al., 2024, From Quantity to Quality)
    perplexity_ratio  IFD = exp(L_cond - L_dir)      (Li et al., 2024, Superfiltering)

L_cond is the mean loss of the response's tokens after the whole prompt, L_dir that of the same
tokens after the assistant's header alone (and BOS, where the row has one). The header's tokens are
taken from the row itself. Of a conversation the last answer is scored, given all before it.

Legend: N rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pyarrow.parquet as pq

from cluster_sft import costs, models
from cluster_sft.artifacts import SUMMARY, read_json, read_table
from cluster_sft.errors import UserError
from cluster_sft.heads import IGNORED
from cluster_sft.rendering import Renderer
from cluster_sft.row_losses import Pass, row_losses
from cluster_sft.score_files import write_scored
from cluster_sft.token_batches import write_tokens

if TYPE_CHECKING:
    from cluster_sft.params import Launch
    from cluster_sft.stage_params import IfdParams

READ_ROWS = 1024
Text = tuple[np.ndarray, np.ndarray]  # input_ids and labels


def run(params: IfdParams, *, dataset: Path, out: Path, scratch: Path, launch: Launch) -> None:
    """Score every row of the prepared data under the model's starting weights.

    Args:
        params: formula, model and dtype.
        dataset: leaf of stage prepare.
        out: empty folder for the payload.
        scratch: folder of partial results; a later call with the same data and model resumes.
        launch: processes, threads of all of them together, and tokens of a batch.

    Raises:
        UserError: no rows or no such model.
    """
    meter = costs.start()
    ids = read_table(dataset, "dataset.parquet", ["id"])["id"]
    if not len(ids):
        raise UserError(f"{dataset}: dataset.parquet has no rows; there is nothing to score")
    write_tokens(_texts(dataset, params.model), scratch)
    losses = row_losses(
        scratch,
        [Pass(scratch)],
        model=params.model,
        dtype=params.dtype,
        launch=launch,
        scratch=scratch,
        label="ifd",
    )
    with_N, without_N = losses.nll[0].astype(np.float64).reshape(-1, 2).T
    score_N = difficulty(with_N, without_N, formula=params.formula)
    empty = pl.Series(np.isnan(with_N))
    frame = pl.DataFrame({"id": ids, "score": score_N, "empty": empty}).with_columns(
        reason=pl.when("empty").then(pl.lit("no_response_tokens"))
    )
    write_scored(
        out,
        frame,
        meter=meter,
        facts={
            "formula": params.formula,
            "above_one": int((score_N[np.isfinite(score_N)] > 1).sum()),
            "resumed_tokens": losses.resumed_tokens,
        },
        forward_passes=2 * len(ids),
        tokens=losses.tokens,
        peak_memory_bytes=losses.peak_memory_bytes,
        earlier_seconds=losses.earlier_seconds,
    )


def difficulty(with_N: np.ndarray, without_N: np.ndarray, *, formula: str) -> np.ndarray:
    """Return the instruction-following difficulty, float64 (N,); not finite where undefined.

    Args:
        with_N: mean loss of the response given the instruction, nats per token.
        without_N: the same without it.
        formula: loss_ratio or perplexity_ratio.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if formula == "loss_ratio":
            return with_N / without_N
        return np.exp(with_N - without_N)


def _texts(dataset: Path, model: str) -> Iterator[Text]:
    """Yield of every row the response after its prompt, then the response after its header."""
    summary = read_json(dataset / SUMMARY)
    renderer = Renderer.of(models.load_tokenizer(model), template=summary["template"])
    decode = functools.lru_cache(1 << 12)(
        lambda ids: renderer.tokenization.backend.decode(ids, skip_special_tokens=False)
    )
    columns = ["messages", "input_ids", "labels"]
    file = pq.ParquetFile(dataset / "dataset.parquet")
    for block in file.iter_batches(READ_ROWS, columns=columns):
        for messages, input_ids, labels in zip(
            *(block[c].to_pylist() for c in columns), strict=True
        ):
            header = renderer.header(_before_last_answer(messages))
            ids, marks = np.array(input_ids, np.int32), np.array(labels, np.int32)
            yield from texts(
                ids, marks, header=header, bos=renderer.tokenization.bos, decode=decode
            )


def texts(
    input_ids: np.ndarray,
    labels: np.ndarray,
    *,
    header: str,
    bos: int | None,
    decode: Callable[[tuple[int, ...]], str],
) -> tuple[Text, Text]:
    """Return the last response after all before it, and after the header's tokens alone.

    Args:
        input_ids: int32 (T,), a prepared row.
        labels: int32 (T,), -100 on everything that is not supervised.
        header: text that announces the answer.
        bos: the token that a text starts with; None for none.
        decode: returns the text of token ids.
    """
    supervised = np.flatnonzero(labels[1:] != IGNORED) + 1
    if not len(supervised):
        return (input_ids[:1], labels[:1]), (input_ids[:1], labels[:1])
    end = int(supervised[-1]) + 1
    gaps = np.flatnonzero(np.diff(supervised) > 1)
    start = int(supervised[gaps[-1] + 1] if len(gaps) else supervised[0])
    count = header_tokens(input_ids[:start].tolist(), header, decode)
    first = start - count
    lead = input_ids[:1] if first > 0 and int(input_ids[0]) == bos else input_ids[:0]
    without = np.concatenate([lead, input_ids[first:end]])
    answer = labels[start:end]
    return _answering(input_ids[:end], answer), _answering(without, answer)


def _answering(input_ids: np.ndarray, answer: np.ndarray) -> Text:
    """Return a text whose last tokens alone are supervised, with the labels `answer`."""
    prompt = np.full(len(input_ids) - len(answer), IGNORED, answer.dtype)
    return input_ids, np.concatenate([prompt, answer])


def header_tokens(
    before: Sequence[int], header: str, decode: Callable[[tuple[int, ...]], str]
) -> int:
    """Return how many of the last tokens before a response are the header's, at least 1.

    A token that the header shares with the prompt is not the header's; one that it shares with the
    response is not before it. Without any token the response's first would have nothing before it.
    """
    count = 1
    # No token stands for less than a byte; parts of a character decode to what is not in the text.
    for n in range(1, min(len(before), len(header.encode()) + 1) + 1):
        text = decode(tuple(before[-n:]))
        if text and text in header:
            count = n
        elif len(text) > len(header):
            break
    return count


def _before_last_answer(messages: Sequence[dict[str, str]]) -> Sequence[dict[str, str]]:
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: answers[-1]] if answers else messages
