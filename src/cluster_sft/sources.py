"""Read `data.source`: raw rows from JSON, JSONL or Parquet, or a descriptor of where they are.

The kind is told from the bytes, not from the file's name. A defect of the file is an error with
file, line or row, and remedy. Nothing here looks at what a row means.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from cluster_sft import descriptors, text_files
from cluster_sft.errors import UserError

PARQUET = b"PAR1"
WRAPPERS = ("data", "rows")


@dataclass(frozen=True)
class Source:
    """The rows of a source, in its own order.

    Attributes:
        rows: objects as the source holds them.
        fields: column mapping that a descriptor carries; `data.fields` goes before it.
        places: where each row stands, e.g. its line; empty where only its position is known.
    """

    name: str
    rows: list[dict[str, Any]]
    fields: dict[str, str] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)

    def where(self, row: int) -> str:
        """Return the place of a row (0-based) for an error message."""
        return f"{self.name}, row {row}" + (f" ({self.places[row]})" if self.places else "")


def read(path: Path, *, key: str = "data.source") -> Source:
    """Read every row of a source.

    Args:
        path: of a file of rows, or of a descriptor.
        key: of params.yaml that named it, for messages.

    Raises:
        UserError: no such file, unreadable, empty, of another encoding, or not what it should be.
    """
    if path.suffix.lower() in (".yaml", ".yml"):
        described = descriptors.read(path)
        return Source(str(path), described.rows(), described.fields)
    data = text_files.read_bytes(path, key=key)
    if data.startswith(PARQUET):
        source = _parquet(path, data)
    else:
        source = _json(path, text_files.decode(path, data), key)
    if not source.rows:
        raise UserError(f"{path}: holds no rows; {key} must name a file with at least one")
    for number, row in enumerate(source.rows):
        if not isinstance(row, dict):
            raise UserError(
                f"{source.where(number)}: a row must be an object of named fields, "
                f"got {type(row).__name__}"
            )
    return source


def _json(path: Path, content: str, key: str) -> Source:
    """Return the rows of JSONL, of one JSON array, or of the one list in a JSON object."""
    if not content.strip():
        raise UserError(f"{path}: the file is empty; {key} must name a file with rows")
    start = content.lstrip()[0]
    first = content.lstrip().split("\n", 1)[0]
    if start == "{" and _parses(first):
        return _lines(path, content)
    if start not in "[{":
        raise UserError(
            f"{path}: does not start like JSON, got {first[:20]!r}; {key} must be JSON, "
            "JSONL or Parquet"
        )
    value = text_files.parse_json(path, content)
    if isinstance(value, dict):
        wrapped = [value[k] for k in WRAPPERS if isinstance(value.get(k), list)]
        # Without a wrapper it is a single row printed over several lines.
        value = wrapped[0] if wrapped else [value]
    return Source(str(path), value)


def _lines(path: Path, content: str) -> Source:
    numbered = list(text_files.json_lines(path, content))
    places = [f"line {number}" for number, _ in numbered]
    return Source(str(path), [row for _, row in numbered], places=places)


def _parses(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _parquet(path: Path, data: bytes) -> Source:
    try:
        return Source(str(path), pl.read_parquet(io.BytesIO(data)).to_dicts())
    # Polars panics, beside raising its own errors, on some damaged files.
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        reason = str(error).splitlines()[0][:120]
        raise UserError(f"{path}: damaged Parquet file ({reason}); fetch it again") from error
