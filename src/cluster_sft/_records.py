"""Rows of a source as JSON text, so that a subset can be written in the source's own shape."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import date, datetime, time
from typing import Any


def as_json(record: Mapping[str, Any]) -> str:
    """Return a source's row as one line of JSON that any reader accepts.

    Numbers that JSON cannot express become null, and values of Parquet that JSON has no type for
    become text.
    """
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        text = json.dumps(_finite(record), ensure_ascii=False, default=_plain)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate in a column that is not used
        return json.dumps(_finite(record), default=_plain)
    return text


def _plain(value: object) -> object:
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    return value.hex() if isinstance(value, bytes) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
