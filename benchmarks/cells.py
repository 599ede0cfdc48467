"""Numbers and tables as docs/benchmarks.md shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """Return a table in Markdown; the first `words` columns are text, the others numbers."""
    rule = ["---" if i < words else "---:" for i in range(len(heads))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, rule, *rows])


def cell(spread: dict[str, Any], digits: int = 2) -> str:
    """Return a median with the least and greatest value, for a table."""
    low, mid, high = (f"{spread[name]:,.{digits}f}" for name in ("min", "median", "max"))
    return mid if low == high else f"{mid} ({low} to {high})"


def gigabytes(size: float) -> str:
    """Return bytes as GB of 10^9."""
    return f"{size / 1e9:.2f} GB"
