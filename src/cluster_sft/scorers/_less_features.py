"""What the two gradient steps of LESS share: from a warm-up and a token store to a leaf.

A leaf holds `features-1.npy`, ... (N, k) float16, a file a checkpoint; gradients.parquet with id,
subtask and the reason of a row that is left out, whose features are 0; and summary.json with all
that decides whether two leaves can be compared.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from safetensors import safe_open

from cluster_sft import costs, models
from cluster_sft.artifacts import SUMMARY, read_json, write_json, write_table
from cluster_sft.checkpoints import WEIGHTS
from cluster_sft.errors import UserError
from cluster_sft.partial_results import Results
from cluster_sft.scorers._gradient_features import compute_features
from cluster_sft.token_batches import open_tokens

if TYPE_CHECKING:
    from cluster_sft.params import Launch
    from cluster_sft.stage_params import Projected


def write_features(
    params: Projected,
    rows: pl.DataFrame,
    *,
    label: str,
    gradient: str,
    tokens: Path,
    warmup: Path,
    out: Path,
    scratch: Path,
    launch: Launch,
    meter: costs.Meter,
) -> None:
    """Compute the features of `rows` at every checkpoint of the warm-up and write the leaf.

    Args:
        params: model, dtype, and dimensions and seed of the projection.
        rows: id and subtask, in the order of the token store.
        label: the step's name.
        gradient: "adam", "sgd" or "sign".
        tokens: folder of the token store.
        warmup: leaf of step less-warmup.
        out: empty folder.
        scratch: folder of partial results.
        launch: processes and the size of forward passes.
        meter: started with the work.

    Raises:
        UserError: as `compute_features`, or no row has a gradient.
    """
    warmed = read_json(warmup / SUMMARY)
    identity = _identity(params, warmed, warmup, gradient=gradient)
    job = _job(params, warmed, warmup, size=identity["n_parameters"])
    job |= {"label": label, "gradient": gradient}
    job |= {"tokens": str(tokens.resolve()), "scratch": str(scratch.resolve())}
    checkpoints = len(warmed["checkpoints"])
    results, facts = compute_features(
        job, columns=params.projection_dim, checkpoints=checkpoints, launch=launch
    )
    excluded = _write_rows(results, rows, out, label=label)
    passes = len(rows) * checkpoints
    cost = meter.stop(
        out,
        forward_passes=passes,
        backward_passes=passes,
        tokens=int(open_tokens(tokens).lengths.sum()) * checkpoints,
        peak_memory_bytes=facts["peak_memory_bytes"],
        earlier_seconds=facts["earlier_seconds"],
    )
    summary = {
        "rows": len(rows),
        "excluded": excluded,
        **identity,
        "exact_head": facts["exact_head"],
        "cost": cost,
    }
    write_json(out / SUMMARY, summary)


def _identity(
    params: Projected, warmed: Mapping[str, Any], warmup: Path, *, gradient: str
) -> dict[str, Any]:
    """Return what must be equal for two leaves to be compared, and what their gradients are."""
    folders = _folders(warmed, warmup)
    parameters = _shapes(folders[0])
    return {
        "gradient": gradient,
        "dtype": params.dtype,
        "projection_dim": params.projection_dim,
        "projection_seed": params.seed,
        "parameters": parameters,
        "n_parameters": sum(math.prod(shape) for _, shape in parameters),
        "warmup": [_digest(f / WEIGHTS) for f in folders],
        "weights": checkpoint_weights([c["learning_rate"] for c in warmed["checkpoints"]]),
    }


def _job(
    params: Projected, warmed: Mapping[str, Any], warmup: Path, *, size: int
) -> dict[str, Any]:
    """Return what of a job of `compute_features` its model, warm-up and projection decide."""
    return {
        "model": str(models.local_path(params.model)),
        "dtype": params.dtype,
        "lora": warmed["lora"],
        "folders": [str(f.resolve()) for f in _folders(warmed, warmup)],
        "size": size,
        "seed": params.seed,
    }


def _folders(warmed: Mapping[str, Any], warmup: Path) -> list[Path]:
    return [warmup / c["folder"] for c in warmed["checkpoints"]]


def _write_rows(
    results: Sequence[Results], rows: pl.DataFrame, out: Path, *, label: str
) -> dict[str, int]:
    """Write gradients.parquet and the features; return how many rows are left out, by reason."""
    rows = rows.with_columns(_reasons(results, rows, label))
    _blank(results, rows["reason"].is_not_null().to_numpy())
    write_table(out, "gradients.parquet", rows)
    for number, found in enumerate(results, start=1):
        found.move("features", np.arange(len(rows)), out / f"features-{number}.npy")
    return dict(rows.drop_nulls("reason").group_by("reason").len().sort("reason").iter_rows())


def checkpoint_weights(rates: Sequence[float]) -> list[float]:
    """Return what each checkpoint counts: its epoch's mean learning rate, over their sum."""
    total = sum(rates)
    if total <= 0:
        raise UserError("less: the warm-up's learning rate is 0 throughout; train more steps")
    return [rate / total for rate in rates]


def _reasons(results: Sequence[Results], rows: pl.DataFrame, label: str) -> pl.Series:
    """Return why rows are left out: a gradient that is not finite, or none, at any checkpoint."""
    norm_CN = np.stack([np.asarray(r["norm"]) for r in results])
    is_finite = np.asarray(np.isfinite(norm_CN).all(axis=0))
    for found in results:
        for start in range(0, len(rows), 4096):
            part = np.asarray(found["features"][start : start + 4096])
            is_finite[start : start + 4096] &= np.isfinite(part).all(axis=1)
    is_zero = np.asarray((norm_CN == 0).any(axis=0))
    reasons = [
        "non_finite" if not finite else "zero_gradient" if zero else None
        for finite, zero in zip(is_finite, is_zero, strict=True)
    ]
    if all(reasons):
        raise UserError(
            f"{label}: none of {len(reasons)} rows has a finite gradient other than 0; the model's "
            "weights hold NaN or overflow: check them, or set model.dtype to fp32"
        )
    return pl.Series("reason", reasons, pl.String)


def _blank(results: Sequence[Results], excluded: np.ndarray) -> None:
    """Set the features of excluded rows to 0, since no NaN may get into a product."""
    for found in results:
        found["features"][np.flatnonzero(excluded)] = 0
        found["features"].flush()


def _shapes(folder: Path) -> list[tuple[str, list[int]]]:
    """Return names and shapes of a checkpoint's weights, in the order of the features: by name."""
    with safe_open(folder / WEIGHTS, framework="np") as file:
        return [(name, list(file.get_slice(name).get_shape())) for name in sorted(file.keys())]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
