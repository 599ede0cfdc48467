"""Prompt and completion, under whichever of their usual names; text, or lists of messages."""

from __future__ import annotations

from cluster_sft.formats import Format, Message, Row


def convert(row: Row) -> tuple[list[Message], str]:
    """Return one exchange, or the two lists of messages one after the other."""
    if isinstance(row.values["prompt"], list) and isinstance(row.values["completion"], list):
        return row.turns("prompt") + row.turns("completion"), ""
    return [
        {"role": "user", "content": row.text("prompt")},
        {"role": "assistant", "content": row.text("completion")},
    ], ""


FORMAT = Format(
    required={
        "prompt": ("prompt", "problem", "question", "query"),
        "completion": ("completion", "solution", "answer", "response"),
    },
    inner={"role": ("role",), "content": ("content",)},
    convert=convert,
    example={"prompt": "q", "completion": "a"},
)
