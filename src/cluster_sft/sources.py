"""Read `data.source`: raw rows from JSON, JSONL or Parquet, or a descriptor of where they are.

Compression (.gz, .zst) and kind are told from the bytes, not from the file's name. A defect of the
file is an error with file, line or row, and remedy. Nothing here looks at what a row means.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import zstandard

from cluster_sft import descriptors
from cluster_sft.errors import UserError

GZIP, ZSTD, PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
FOREIGN = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip", b"7z\xbc\xaf": "7-Zip"}
UTF16 = (b"\xff\xfe", b"\xfe\xff")
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
    data = _bytes(path, key)
    is_parquet = data.startswith(PARQUET)
    source = _parquet(path, data) if is_parquet else _json(path, _decoded(path, data, key), key)
    if not source.rows:
        raise UserError(f"{path}: holds no rows; {key} must name a file with at least one")
    for number, row in enumerate(source.rows):
        if not isinstance(row, dict):
            raise UserError(
                f"{source.where(number)}: a row must be an object of named fields, "
                f"got {type(row).__name__}"
            )
    return source


def _bytes(path: Path, key: str) -> bytes:
    """Return the file's bytes, decompressed."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; {key} must name an existing file") from error
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); {key} must name a readable file"
        ) from error
    for magic, name in FOREIGN.items():
        if data.startswith(magic):
            raise UserError(f"{path}: {name} is not supported; use plain, .gz or .zst")
    try:
        if data.startswith(GZIP):
            data = gzip.decompress(data)
        elif data.startswith(ZSTD):
            data = b"".join(_frames(data))
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"{path}: damaged compressed file ({error}); fetch it again") from error
    return data


def _frames(data: bytes) -> Iterator[bytes]:
    """Yield the content of each zstd frame; EOFError if the last one is cut off."""
    while data:
        frame = zstandard.ZstdDecompressor().decompressobj()
        yield frame.decompress(data)
        if not frame.eof:
            raise EOFError("the last frame is incomplete")
        data = frame.unused_data


def _decoded(path: Path, data: bytes, key: str) -> str:
    """Return UTF-8 text without its byte-order mark."""
    if data.startswith(UTF16) or b"\x00" in data[:64]:
        raise UserError(
            f"{path}: is encoded in UTF-16 or UTF-32, not UTF-8; "
            "convert it: iconv -f UTF-16 -t UTF-8"
        )
    try:
        content = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}, line {line}: byte 0x{data[error.start]:02x} is not UTF-8; if the file is "
            "Latin-1 convert it: iconv -f LATIN1 -t UTF-8"
        ) from error
    if not content.strip():
        raise UserError(f"{path}: the file is empty; {key} must name a file with rows")
    return content


def _json(path: Path, content: str, key: str) -> Source:
    """Return the rows of JSONL, of one JSON array, or of the one list in a JSON object."""
    start = content.lstrip()[0]
    first = content.lstrip().split("\n", 1)[0]
    if start == "{" and _parses(first):
        return _lines(path, content)
    if start not in "[{":
        raise UserError(
            f"{path}: does not start like JSON, got {first[:20]!r}; {key} must be JSON, "
            "JSONL or Parquet"
        )
    value = _parse(content, f"{path}, line", 1)
    if isinstance(value, dict):
        wrapped = [value[k] for k in WRAPPERS if isinstance(value.get(k), list)]
        # Without a wrapper it is a single row printed over several lines.
        value = wrapped[0] if wrapped else [value]
    return Source(str(path), value)


def _lines(path: Path, content: str) -> Source:
    rows, places = [], []
    # Only "\n" ends a line: str.splitlines would also cut at U+2028 inside a string.
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            rows.append(_parse(line, f"{path}, line", number))
            places.append(f"line {number}")
    return Source(str(path), rows, places=places)


def _parses(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _parse(text: str, where: str, line: int) -> Any:
    """Return the JSON value of `text`, which starts at `line` of its file."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where} {line + error.lineno - 1}: not valid JSON ({error.msg} at column "
            f"{error.colno}); repair or remove it"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{where} {line}: not usable JSON ({error}); repair or remove it"
        ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [k for k, _ in pairs]
        twice = next(k for k in names if names.count(k) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


def _parquet(path: Path, data: bytes) -> Source:
    try:
        return Source(str(path), pl.read_parquet(io.BytesIO(data)).to_dicts())
    # Polars panics, beside raising its own errors, on some damaged files.
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        reason = str(error).splitlines()[0][:120]
        raise UserError(f"{path}: damaged Parquet file ({reason}); fetch it again") from error
