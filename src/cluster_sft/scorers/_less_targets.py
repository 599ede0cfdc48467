"""Projected gradients of the target examples that LESS selects for.

The targets are a raw file of any shape that stage prepare reads, with an optional field `subtask`,
or `split: heldout` in a YAML file: the held-out rows of the prepared data. Gradients are plain,
whatever those of the training rows are.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from cluster_sft import costs, descriptors, formats, models, sources
from cluster_sft.artifacts import DATASET, read_table
from cluster_sft.errors import UserError
from cluster_sft.heads import IGNORED
from cluster_sft.preparation import context_length
from cluster_sft.rendering import Renderer, TemplateRefusal
from cluster_sft.scorers._less_features import write_features
from cluster_sft.token_batches import write_tokens

if TYPE_CHECKING:
    from cluster_sft.params import Launch
    from cluster_sft.stage_params import LessParams

SUBTASK = "subtask"
SCHEMA = {"id": pl.String, SUBTASK: pl.String} | {k: DATASET[k] for k in ("input_ids", "labels")}


def write_targets(
    params: LessParams,
    dataset: Path,
    *,
    warmup: Path,
    out: Path,
    scratch: Path,
    launch: Launch,
) -> None:
    """Compute and write the features of every target example at every checkpoint of the warm-up.

    Raises:
        UserError: a defect of the file, or none of its examples can be used.
    """
    meter = costs.start()
    path = Path(params.targets)
    rows = _heldout(dataset, path) if descriptors.names_heldout(path) else _rendered(params, path)
    write_tokens(zip(rows["input_ids"].to_list(), rows["labels"].to_list(), strict=True), scratch)
    write_features(
        params,
        rows.select("id", SUBTASK),
        label="less: targets",
        gradient="sgd",
        tokens=scratch,
        warmup=warmup,
        out=out,
        scratch=scratch,
        launch=launch,
        meter=meter,
    )


def _heldout(dataset: Path, path: Path) -> pl.DataFrame:
    rows = read_table(dataset, "heldout.parquet", ["id", "record", "input_ids", "labels"])
    if rows.is_empty():
        raise descriptors.no_heldout_rows(path)
    subtasks = [
        _subtask(json.loads(record), f"{path}, row {i}") for i, record in enumerate(rows["record"])
    ]
    return rows.with_columns(pl.Series(SUBTASK, subtasks, pl.String)).select(*SCHEMA)


def _rendered(params: LessParams, path: Path) -> pl.DataFrame:
    """Read, render and tokenise the examples as stage prepare does its rows."""
    source = sources.read(path, key="score.less.targets")
    reader = formats.reader(source.rows, name="auto", fields=source.fields, where=source.where(0))
    renderer = Renderer.of(models.load_tokenizer(params.model), template=params.template)
    limit = params.max_length or context_length(params.model)
    rendered, found, left_out = [], [], Counter()
    for number, record in enumerate(source.rows):
        try:
            sample = reader.read(record)
            text = renderer.conversation(sample.messages, context=sample.context)
        except formats.Malformed as error:
            raise UserError(f"{source.where(number)}: {error}") from error
        except formats.Unusable as error:
            left_out[error.reason] += 1
            continue
        except TemplateRefusal:
            left_out["template_refused"] += 1
            continue
        rendered.append(text)
        found.append((renderer.row_id(text), _subtask(record, source.where(number))))
    rows = []
    for (row, subtask), tokens in zip(found, renderer.encode(rendered), strict=True):
        ids, labels = tokens.input_ids[:limit], tokens.labels[:limit]
        if (labels == IGNORED).all():
            left_out["prompt_fills_max_length"] += 1
            continue
        rows.append((row, subtask, ids, labels))
    reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(left_out.items()))
    if not rows:
        raise UserError(f"{path}: none of {len(source.rows)} examples can be used ({reasons})")
    if left_out:
        told = f"less: {len(rows)} of {len(source.rows)} examples are used ({reasons})"
        print(told, file=sys.stderr)
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def _subtask(record: dict[str, Any], where: str) -> str | None:
    value = record.get(SUBTASK)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: {SUBTASK} must be text, got {value!r}")
    return value
