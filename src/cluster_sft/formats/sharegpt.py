"""ShareGPT: a list `conversations` of turns `from` (human, gpt, system) and `value`."""

from __future__ import annotations

from cluster_sft.formats import Format, Message, Row


def convert(row: Row) -> tuple[list[Message], str]:
    """Return the turns."""
    return row.turns("conversations"), ""


FORMAT = Format(
    required={"conversations": ("conversations", "conversation")},
    inner={"role": ("from", "role"), "content": ("value", "content")},
    convert=convert,
    example={"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
)
