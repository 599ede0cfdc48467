"""Step s2l-proxy of score: train a small model on all rows, keeping its weights on the way.

The trainable weights after T steps, evenly spaced over the whole training, are kept (Yang et al.,
2024, SmallToLarge: AdamW, cosine schedule, mean over a batch's tokens). Where the proxy does not
read the data's own tokens, or not so many, the conversations are rendered anew for it.

Writes a folder `step-XXXXXXXX` each, the log of the training, summary.json and, if the rows were
rendered anew, dataset.parquet with their tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from cluster_sft import models, training
from cluster_sft.artifacts import DATASET, SUMMARY, read_table, write_json, write_table
from cluster_sft.checkpoints import WEIGHTS, snapshot_name
from cluster_sft.errors import UserError
from cluster_sft.heads import IGNORED
from cluster_sft.rendering import Encoded, Rendered, Renderer, TemplateRefusal
from cluster_sft.scorers._steps import check_steps
from cluster_sft.training_rows import plain_settings, write_subset

if TYPE_CHECKING:
    from cluster_sft.params import Launch
    from cluster_sft.stage_params import S2lProxyParams

BATCH = 512  # rows tokenised together; cannot change a result
WITHOUT_CHAT = "alpaca"  # the template of the method's authors, for a proxy without one


def run(params: S2lProxyParams, *, dataset: Path, out: Path, scratch: Path, launch: Launch) -> None:
    """Train the proxy on every row that supervises a token of it.

    Args:
        params: the proxy and its training; the data's own model, template and length.
        dataset: leaf of stage prepare.
        out: empty folder for the payload.
        scratch: folder of checkpoints; a later call with the same parameters and data resumes.
        launch: processes and the size of forward passes.

    Raises:
        UserError: no rows for the proxy, a training of a single step, or as `training.fit`.
    """
    rendered = _rendered(params, dataset)
    if rendered is not None:
        write_table(out, "dataset.parquet", rendered)
    source = dataset if rendered is None else out
    counts = read_table(source, "dataset.parquet", ["id", "n_response_tokens"])
    ids = counts.filter(pl.col("n_response_tokens") > 0)["id"].to_list()
    total = params.epochs * -(-len(ids) // params.batch_size)
    if not ids:
        raise UserError(
            f"{dataset}: no row supervises a token of {params.s2l_model!r} within its length; "
            "choose another score.s2l.model or raise model.max_length"
        )
    check_steps(
        total,
        warmup_ratio=params.warmup_ratio,
        rows=len(ids),
        label="s2l-proxy",
        remedy="lower score.s2l.batch_size or raise score.s2l.epochs",
    )
    write_subset(scratch / "subset", ids)
    steps = snapshot_steps(total, params.checkpoints)
    facts = training.fit(
        _settings(params),
        dataset=source,
        subset=scratch / "subset",
        out=out,
        scratch=scratch,
        launch=launch,
        snapshots=steps,
        label="s2l-proxy",
    )
    snapshots = [{"step": s, "weights": f"{snapshot_name(s)}/{WEIGHTS}"} for s in steps]
    summary = {
        **facts,
        "model": params.s2l_model,
        "snapshots": snapshots,
        "rendered_anew": rendered is not None,
        "rows_left_out": len(counts) - len(ids),
    }
    write_json(out / SUMMARY, summary)


def snapshot_steps(total: int, count: int) -> list[int]:
    """Return up to `count` different steps, evenly spaced, the last of them `total`."""
    return sorted({total * (i + 1) // count for i in range(count)} - {0})


def _settings(params: S2lProxyParams) -> dict[str, Any]:
    plain = plain_settings(
        model=params.s2l_model,
        epochs=params.epochs,
        learning_rate=params.learning_rate,
        batch_size=params.batch_size,
        warmup_ratio=params.warmup_ratio,
        precision=params.dtype,
        seed=params.seed,
    )
    return {**plain, "scheduler": "cosine", "loss_reduction": "token"}


def _rendered(params: S2lProxyParams, dataset: Path) -> pl.DataFrame | None:
    """Return the data's rows with the proxy's tokens; None if these are the data's own."""
    frame = read_table(dataset, "dataset.parquet", ["id", "messages", "input_ids"])
    context = _context(params.s2l_model)
    longest = int(frame["input_ids"].list.len().to_numpy().max(initial=0))
    if _same_tokens(params) and longest <= (context or longest):
        return None
    renderer = _renderer(params)
    limit = min((n for n in (params.max_length, context) if n), default=None)
    encoded = list(_encoded(renderer, frame["messages"], limit))
    table = pl.DataFrame(
        {
            "id": frame["id"],
            "input_ids": [e.input_ids for e in encoded],
            "labels": [e.labels for e in encoded],
            "n_response_tokens": [int((e.labels[1:] != IGNORED).sum()) for e in encoded],
        },
        schema_overrides={c: DATASET[c] for c in ("input_ids", "labels")},
    )
    empty = [pl.lit(None, t).alias(c) for c, t in DATASET.items() if c not in table.columns]
    return table.with_columns(empty)


def _same_tokens(params: S2lProxyParams) -> bool:
    """Whether the proxy's tokenizer and chat template are those that made the data's rows."""
    if params.s2l_model == params.model:
        return True
    ours, theirs = (models.load_tokenizer(m) for m in (params.s2l_model, params.model))
    marks = [(_backend(t), t.chat_template, t.special_tokens_map) for t in (ours, theirs)]
    return marks[0] == marks[1]


def _backend(tokenizer: Any) -> str | None:
    return tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else None


def _renderer(params: S2lProxyParams) -> Renderer:
    tokenizer = models.load_tokenizer(params.s2l_model)
    template = params.template
    if template == "auto" and not tokenizer.chat_template:
        template = WITHOUT_CHAT
        print(
            f"s2l-proxy: {params.s2l_model} has no chat template: its rows are rendered by "
            f"template {template}",
            file=sys.stderr,
        )
    return Renderer.of(tokenizer, template=template)


def _context(model: str) -> int | None:
    """Return the model's number of positions; None if its configuration does not bound them."""
    config = models.load_config(model).get_text_config()
    return getattr(config, "max_position_embeddings", None)


def _encoded(renderer: Renderer, messages: pl.Series, limit: int | None) -> Iterator[Encoded]:
    """Yield the rows' tokens, cut at the right; nothing of a row that is refused is supervised."""
    for start in range(0, len(messages), BATCH):
        rows: list[Rendered] = []
        for conversation in messages[start : start + BATCH].to_list():
            try:
                rows.append(renderer.conversation(conversation))
            except TemplateRefusal:
                rows.append(Rendered(" ", [], []))
        for encoded in renderer.encode(rows):
            yield Encoded(np.array(encoded.input_ids[:limit]), np.array(encoded.labels[:limit]))
