"""Text files of rows, questions and problems, plain or compressed, and the JSON in them.

Compression (.gz, .zst) is told from the bytes, not from the file's name. Each fault is one line
with the file and, where it has one, the line.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zstandard

from cluster_sft.errors import UserError

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
FOREIGN = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip", b"7z\xbc\xaf": "7-Zip"}
UTF16 = (b"\xff\xfe", b"\xfe\xff")


def read_text(path: Path, *, key: str) -> str:
    """Return the UTF-8 text of a file without its byte-order mark.

    Raises:
        UserError: as `read_bytes`, or the file is of another encoding.
    """
    return decode(path, read_bytes(path, key=key))


def read_bytes(path: Path, *, key: str) -> bytes:
    """Return a file's bytes, decompressed.

    Args:
        path: of the file.
        key: that named it, for messages.

    Raises:
        UserError: the file is missing, unreadable, damaged or compressed in another way.
    """
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


def decode(path: Path, data: bytes) -> str:
    """Return UTF-8 text without its byte-order mark.

    Raises:
        UserError: it is of another encoding.
    """
    if data.startswith(UTF16) or b"\x00" in data[:64]:
        raise UserError(
            f"{path}: is encoded in UTF-16 or UTF-32, not UTF-8; "
            "convert it: iconv -f UTF-16 -t UTF-8"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Its positions do not count the byte-order mark.
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}, line {line}: byte 0x{error.object[error.start]:02x} is not UTF-8; if the "
            "file is Latin-1 convert it: iconv -f LATIN1 -t UTF-8"
        ) from error


def json_lines(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Yield the number and the JSON value of each line of a file that is not blank.

    Raises:
        UserError: a line is no JSON.
    """
    # Only "\n" ends a line: str.splitlines would also cut at U+2028 inside a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, parse_json(path, line, line=number)


def parse_json(path: Path, text: str, *, line: int = 1) -> Any:
    """Return the JSON value of `text`, which starts at `line` of a file.

    Raises:
        UserError: it is no JSON, nested too deeply, or an object has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}, line {line + error.lineno - 1}: not valid JSON ({error.msg} at column "
            f"{error.colno}); repair or remove it"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}, line {line}: not usable JSON ({error}); repair or remove it"
        ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [k for k, _ in pairs]
        twice = next(k for k in names if names.count(k) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found
