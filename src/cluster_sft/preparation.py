"""Stage prepare: from a source of any shape to tokenised, labelled rows with stable ids.

Reads `data.source`; writes dataset.parquet, heldout.parquet, dropped.parquet and summary.json.
Every row of the source ends in exactly one of the three tables.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from tqdm import tqdm

from cluster_sft import formats, models, sources
from cluster_sft._records import as_json
from cluster_sft.artifacts import DATASET, DROPPED, SUMMARY, write_json, write_table
from cluster_sft.errors import UserError
from cluster_sft.rendering import Encoded, Rendered, Renderer, TemplateRefusal

if TYPE_CHECKING:
    from cluster_sft.stage_params import PrepareParams

BATCH = 512  # rows tokenised together; cannot change a result


@dataclass(frozen=True)
class Candidate:
    """A row that rendered: its place in the source, its conversation and its digest."""

    row: int
    id: str
    sample: formats.Sample
    rendered: Rendered

    @functools.cached_property
    def prompt(self) -> str:
        """Return what comes before the first answer, as text that equal prompts share."""
        turns = []
        for message in self.sample.messages:
            if message["role"] == "assistant":
                break
            turns.append([message["role"], message["content"].strip()])
        return json.dumps(turns)


@dataclass(frozen=True)
class Drop:
    """A row that is left out, and why."""

    row: int
    reason: str
    detail: str


def run(params: PrepareParams, *, out: Path, scratch: Path, launch: object) -> None:
    """Prepare `params.source` and write the leaf's payload into `out`.

    `max_samples` bounds the rows before the held-out prompts are taken from among them.

    Raises:
        UserError: a defect of the file, the settings or the model's tokenizer, or no row left.
    """
    source = sources.read(Path(params.source))
    reader = formats.reader(
        source.rows,
        name=params.format,
        fields={**source.fields, **params.fields},
        where=source.where(0),
    )
    renderer = Renderer.of(models.load_tokenizer(params.model), template=params.template)
    limit = _length_limit(params.max_length, params.model)
    candidates, drops = render_rows(source, reader, renderer)
    kept, encoded, late = encode_rows(
        candidates, renderer, max_length=limit, max_samples=params.max_samples
    )
    drops = sorted([*drops, *late], key=lambda d: d.row)
    held = held_out_prompts([c.prompt for c in kept], share=params.holdout, seed=params.seed)
    _check_left(source, drops, kept=len(kept), train=sum(c.prompt not in held for c in kept))
    tables = {"dataset.parquet": [], "heldout.parquet": []}
    for candidate, tokens in zip(kept, encoded, strict=True):
        name = "heldout.parquet" if candidate.prompt in held else "dataset.parquet"
        tables[name].append(_table_row(candidate, tokens, source.rows[candidate.row]))
    for name, rows in tables.items():
        write_table(out, name, pl.DataFrame(rows, schema=DATASET, orient="row"))
    write_table(out, "dropped.parquet", _dropped_table(drops))
    summary = {
        **_counts(source, tables, drops),
        "format": reader.name,
        "template": renderer.name,
        "max_length": limit,
        "prompts": len({c.prompt for c in kept}),
        "prompts_heldout": len(held),
    }
    write_json(out / SUMMARY, summary)
    _tell(summary, renderer)


def render_rows(
    source: sources.Source, reader: formats.Reader, renderer: Renderer
) -> tuple[list[Candidate], list[Drop]]:
    """Return every usable row once, sorted by id, and the rows left out.

    Of rows that render alike the first is kept.

    Raises:
        UserError: a defect of the file; the message names file and row.
    """
    found: dict[str, Candidate] = {}
    drops = []
    for row, record in enumerate(tqdm(source.rows, desc="prepare: rendering", unit="row", delay=1)):
        try:
            sample = reader.read(record)
            rendered = renderer.conversation(sample.messages, context=sample.context)
        except formats.Malformed as error:
            raise UserError(f"{source.where(row)}: {error}") from error
        except formats.Unusable as error:
            drops.append(Drop(row, error.reason, error.detail))
            continue
        except TemplateRefusal as error:
            drops.append(Drop(row, "template_refused", str(error)))
            continue
        candidate = Candidate(row, renderer.row_id(rendered), sample, rendered)
        first = found.setdefault(candidate.id, candidate)
        if first is not candidate:
            drops.append(Drop(row, "duplicate", f"equals row {first.row}"))
    return sorted(found.values(), key=lambda c: c.id), drops


def encode_rows(
    candidates: Sequence[Candidate],
    renderer: Renderer,
    *,
    max_length: int | None,
    max_samples: int | None,
) -> tuple[list[Candidate], list[Encoded], list[Drop]]:
    """Tokenise candidates in order, cut at the right, until `max_samples` are kept.

    Returns the candidates kept, their tokens, and the others as drops: `prompt_fills_max_length`
    where no supervised token is left, `max_samples` beyond the limit.
    """
    kept: list[Candidate] = []
    encoded: list[Encoded] = []
    drops: list[Drop] = []
    wanted = len(candidates) if max_samples is None else max_samples
    total = min(wanted, len(candidates))
    progress = tqdm(total=total, desc="prepare: tokenising", unit="row", delay=1)
    for batch in _batches(candidates):
        if len(kept) >= wanted:
            tokens: list[Encoded] = []
        else:
            tokens = renderer.encode([c.rendered for c in batch])
        for number, candidate in enumerate(batch):
            if len(kept) >= wanted:
                drops.append(Drop(candidate.row, "max_samples", f"beyond the first {wanted}"))
                continue
            cut = Encoded(tokens[number].input_ids[:max_length], tokens[number].labels[:max_length])
            if (cut.labels == -100).all():
                length = len(tokens[number].input_ids)
                detail = f"{length} tokens, none of the first {max_length} supervised"
                drops.append(Drop(candidate.row, "prompt_fills_max_length", detail))
                continue
            kept.append(candidate)
            encoded.append(cut)
            progress.update()
    progress.close()
    return kept, encoded, drops


def held_out_prompts(prompts: Sequence[str], *, share: float, seed: int) -> set[str]:
    """Return the first round(share * n) of the n different prompts, by digest of seed and prompt.

    `share` is read as an exact decimal and halves round up.
    """
    different = set(prompts)
    count = int(Fraction(str(share)) * len(different) + Fraction(1, 2))
    return set(sorted(different, key=lambda p: (_digest(seed, p), p))[:count])


def _length_limit(max_length: int | None, model: str) -> int | None:
    """Return the tokens that a row may have."""
    context = context_length(model)
    if max_length and context and max_length > context:
        raise UserError(
            f"model.max_length must be at most the model's own context of {context} tokens, got "
            f"{max_length} for {model}; lower it, or set it to null for that context"
        )
    return max_length or context


def context_length(model: str) -> int | None:
    """Return the model's number of positions; None if its configuration does not bound them.

    Raises:
        UserError: the configuration cannot be read.
    """
    config = models.load_config(model)
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def _tell(summary: Mapping[str, Any], renderer: Renderer) -> None:
    reasons = "".join(f", {reason} {n:,}" for reason, n in summary["dropped"].items())
    print(
        f"prepare: {summary['rows_in']:,} rows: {summary['rows_kept']:,} kept, "
        f"{summary['rows_heldout']:,} held out{reasons}",
        file=sys.stderr,
    )
    if not renderer.ends_answers:
        print(
            "prepare: warning: the chat template puts nothing after an answer, so that the model "
            "cannot learn to stop; see model.template",
            file=sys.stderr,
        )


def _digest(seed: int, prompt: str) -> str:
    return hashlib.sha256(f"{seed}\n{prompt}".encode()).hexdigest()


def _batches(candidates: Sequence[Candidate]) -> Iterator[Sequence[Candidate]]:
    for start in range(0, len(candidates), BATCH):
        yield candidates[start : start + BATCH]


def _check_left(source: sources.Source, drops: Sequence[Drop], *, kept: int, train: int) -> None:
    if not kept:
        reasons = ", ".join(f"{r} {n}" for r, n in Counter(d.reason for d in drops).most_common())
        raise UserError(
            f"{source.name}: all {len(source.rows)} rows were dropped ({reasons}; row "
            f"{drops[0].row}: {drops[0].detail}); at least one must be usable: mend the data, "
            "or change model.template or model.max_length"
        )
    if not train:
        raise UserError(
            f"{source.name}: data.holdout holds out all {kept} usable rows; lower it so that at "
            "least one prompt is left for training"
        )


def _table_row(
    candidate: Candidate, tokens: Encoded, record: Mapping[str, Any]
) -> tuple[object, ...]:
    supervised = np.flatnonzero(tokens.labels != -100)
    return (
        candidate.id,
        candidate.sample.source_id,
        candidate.row,
        candidate.sample.messages,
        candidate.sample.category,
        int(supervised[0]),
        len(supervised),
        tokens.input_ids,
        tokens.labels,
        as_json(record),
    )


def _dropped_table(drops: Sequence[Drop]) -> pl.DataFrame:
    return pl.DataFrame([(d.row, d.reason, d.detail) for d in drops], schema=DROPPED, orient="row")


def _counts(
    source: sources.Source, tables: Mapping[str, list[Any]], drops: Sequence[Drop]
) -> dict[str, Any]:
    kept = tables["dataset.parquet"]
    return {
        "rows_in": len(source.rows),
        "rows_kept": len(kept),
        "rows_heldout": len(tables["heldout.parquet"]),
        "rows_dropped": len(drops),
        "dropped": dict(sorted(Counter(d.reason for d in drops).items())),
        "tokens": sum(len(r[7]) for r in kept),
        "tokens_supervised": sum(r[6] for r in kept),
    }
