"""Every artifact's file names, columns and dtypes, with its readers and writers.

Legend: N rows of the prepared data, H hidden size, K clusters, S selected rows.

A *leaf* is the directory that one stage writes. Tables are Parquet, arrays are NumPy `.npy`
(never pickled), small facts are JSON with sorted keys. Rows are joined by `id`, never by position.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.lib import format as npy

from cluster_sft.errors import UserError

MESSAGE = pl.Struct({"role": pl.String, "content": pl.String})

DATASET: dict[str, Any] = {
    "id": pl.String,  # digest of the rendered row; sorted
    "source_id": pl.String,  # the source's own id; may repeat, null where it has none
    "source_row": pl.Int64,  # 0-based row of the source
    "messages": pl.List(MESSAGE),
    "category": pl.String,  # null where the source has none
    "n_prompt_tokens": pl.Int32,
    "n_response_tokens": pl.Int32,  # supervised tokens
    "input_ids": pl.List(pl.Int32),
    "labels": pl.List(pl.Int32),  # -100 on everything that is not supervised
    "record": pl.String,  # the source's row as JSON text
}
DROPPED: dict[str, Any] = {"row": pl.Int64, "reason": pl.String, "detail": pl.String}
SAMPLES: dict[str, Any] = {
    "id": pl.String,
    "n_tokens": pl.Int32,  # |T(x)|, supervised tokens
    "nll": pl.Float32,  # mean negative log-likelihood, nats per supervised token
    "proxy_norm": pl.Float32,  # ||g(x)||
}
CLUSTERS: dict[str, Any] = {"id": pl.String, "cluster": pl.Int32, "distance": pl.Float32}
DISPLACED: dict[str, Any] = {"id": pl.String}  # rows that the capacity kept out of their nearest
SUBSET: dict[str, Any] = {
    "id": pl.String,
    "cluster": pl.Int32,
    "distance": pl.Float32,  # to the full cluster's centroid
    "weight": pl.Float64,  # w_c of the row's cluster
    "rank": pl.Int64,  # 0 = first choice inside its cluster
}

SCORES: dict[str, Any] = {
    "id": pl.String,  # ascending
    "score": pl.Float64,  # higher is better; null where the row is excluded
    "reason": pl.String,  # of the exclusion; null where the row is scored
}
GROUPS: dict[str, Any] = {  # of scores that come with groups of like rows
    "source": pl.Int32,
    "group": pl.Int32,  # within its source; null where the row is excluded
}
TRAJECTORIES: dict[str, Any] = {"id": pl.String}  # of the rows of trajectories.npy (N, T) float32

GRADIENTS: dict[str, Any] = {  # of the rows of features-1.npy, ... (N, k) float16
    "id": pl.String,
    "subtask": pl.String,  # of a target example; null where it has none
    "reason": pl.String,  # null, or why the row's features are 0
}

TABLES: dict[str, dict[str, Any]] = {
    "dataset.parquet": DATASET,
    "heldout.parquet": DATASET,
    "dropped.parquet": DROPPED,
    "samples.parquet": SAMPLES,
    "clusters.parquet": CLUSTERS,
    "displaced.parquet": DISPLACED,
    "subset.parquet": SUBSET,
    "scores.parquet": SCORES,
    "trajectories.parquet": TRAJECTORIES,
    "gradients.parquet": GRADIENTS,
}
MANIFEST = "manifest.json"
SUMMARY = "summary.json"


def write_table(leaf: Path, name: str, frame: pl.DataFrame) -> None:
    """Write `frame` as `leaf/name` with exactly the columns, order and dtypes of `TABLES[name]`.

    Raises:
        OSError: the disk is full, which polars reports in an exception of its own.
    """
    _write(leaf / name, frame, TABLES[name])


def read_table(leaf: Path, name: str, columns: list[str] | None = None) -> pl.DataFrame:
    """Read `leaf/name`, checked against its schema and with its dtypes.

    Raises:
        UserError: the file is missing, damaged or has other columns or dtypes.
    """
    return _read(leaf / name, {c: TABLES[name][c] for c in columns or TABLES[name]})


def write_scores(leaf: Path, frame: pl.DataFrame) -> None:
    """Write scores.parquet, with the columns of groups where `frame` has them.

    Raises:
        OSError: the disk is full.
    """
    groups = GROUPS if "group" in frame.columns else {}
    _write(leaf / "scores.parquet", frame, {**SCORES, **groups})


def read_scores(leaf: Path) -> pl.DataFrame:
    """Read scores.parquet, with the columns of groups where it has them.

    Raises:
        UserError: the file is missing, damaged or has other columns or dtypes.
    """
    path = leaf / "scores.parquet"
    groups = GROUPS if path.is_file() and "group" in _columns(path) else {}
    return _read(path, {**SCORES, **groups})


def _write(path: Path, frame: pl.DataFrame, schema: Mapping[str, Any]) -> None:
    exact = frame.select(pl.col(c).cast(t) for c, t in schema.items())
    try:
        exact.write_parquet(path, compression="zstd", statistics=True)
    except pl.exceptions.ComputeError as error:
        if os.strerror(errno.ENOSPC) in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise


def _read(path: Path, wanted: Mapping[str, Any]) -> pl.DataFrame:
    if not path.is_file():
        raise UserError(f"{path}: no such file; {path.parent} is not the leaf expected here")
    found = _columns(path)
    if wrong := [c for c, t in wanted.items() if not _widens(found.get(c), t)]:
        raise UserError(
            f"{path}: column {wrong[0]!r} must be {wanted[wrong[0]]}, "
            f"got {found.get(wrong[0], 'no such column')}; delete the leaf and run it again"
        )
    with _damage_told(path):
        frame = pl.read_parquet(path, columns=list(wanted))
        return frame.with_columns(pl.col(c).cast(t) for c, t in wanted.items())


def _columns(path: Path) -> dict[str, Any]:
    with _damage_told(path):
        return dict(pl.read_parquet_schema(path))


@contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    """Say in one line that a table is damaged."""
    try:
        yield
    # Polars panics, beside raising its own errors, on some damaged files.
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise UserError(
            f"{path}: damaged ({str(error).splitlines()[0][:120]}); delete the leaf and run it "
            "again"
        ) from error


def _widens(found: Any, wanted: Any) -> bool:
    """Whether a column is as wanted, or holds the same kind of number in another width.

    Tables that other programs write come with 64-bit numbers, whose values are what counts.
    """
    if found is None or isinstance(wanted, pl.List | pl.Struct):
        return found == wanted
    kinds = (lambda t: t.is_integer(), lambda t: t.is_float())
    return found == wanted or any(kind(found) and kind(wanted()) for kind in kinds)


def create_array(path: Path, shape: tuple[int, ...], dtype: np.dtype | type) -> np.memmap:
    """Create an `.npy` file of the given shape (zeros) and return it memory-mapped for writing.

    The blocks are allocated at once: on a full disk this raises OSError here, where a sparse file
    would kill the process with SIGBUS at some later write.
    """
    dtype = np.dtype(dtype)
    with path.open("wb") as file:
        header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        npy.write_array_header_1_0(file, header)
        offset = file.tell()
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if size:
            os.posix_fallocate(file.fileno(), offset, size)
    return np.memmap(path, dtype=dtype, mode="r+", offset=offset, shape=shape)


def read_array(path: Path, *, ndim: int, dtype: type, mmap: bool = True) -> np.ndarray:
    """Read an `.npy` file, memory-mapped read-only by default, checked for rank and dtype.

    Raises:
        UserError: the file is missing, truncated, or of another rank or dtype.
    """
    try:
        array = np.load(path, mmap_mode="r" if mmap else None, allow_pickle=False)
    except FileNotFoundError as error:
        raise UserError(
            f"{path}: no such file; {path.parent} is not the leaf expected here"
        ) from error
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"{path}: damaged ({error}); delete the leaf and run it again") from error
    if array.ndim != ndim or array.dtype != np.dtype(dtype):
        raise UserError(
            f"{path}: must have {ndim} dimensions of {np.dtype(dtype)}, "
            f"got shape {array.shape} of {array.dtype}"
        )
    return array


def read_embeddings(leaf: Path) -> tuple[np.ndarray, pl.DataFrame]:
    """Return embeddings (N, H) float16, memory-mapped, and their samples table of N rows."""
    embeddings = read_array(leaf / "embeddings.npy", ndim=2, dtype=np.float16)
    samples = read_table(leaf, "samples.parquet")
    if len(samples) != len(embeddings):
        raise UserError(
            f"{leaf}: embeddings.npy has {len(embeddings)} rows, samples.parquet {len(samples)}; "
            "delete the leaf and run it again"
        )
    return embeddings, samples


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON with sorted keys, one key a line; non-finite numbers are refused."""
    path.write_text(_json_text(value))


def replace_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON as `write_json` over what is there: a kill leaves the old file or the new one."""
    replace_text(path, _json_text(value))


def _json_text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n"


def replace_text(path: Path, text: str) -> None:
    """Write a file over what is there: a kill leaves the old one or the new one."""
    beside = path.with_suffix(".partial")
    beside.write_text(text)
    beside.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: the file is missing or is no JSON object.
    """
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: missing or damaged ({error}); run its stage again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value
