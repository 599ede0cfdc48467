"""Alpaca: an instruction, an optional input that it is about, and a response."""

from __future__ import annotations

from cluster_sft.formats import Format, Message, Row


def convert(row: Row) -> tuple[list[Message], str]:
    """Return one exchange; the input, if any, ends the user's turn after an empty line."""
    instruction, context = row.text("instruction"), row.text("input")
    prompt = f"{instruction}\n\n{context}" if context else instruction
    return [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": row.text("response")},
    ], context


FORMAT = Format(
    required={"instruction": ("instruction",), "response": ("output", "response")},
    optional={"input": ("input", "context")},
    convert=convert,
    example={"instruction": "q", "input": "", "output": "a"},
)
