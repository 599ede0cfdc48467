"""Messages: a list of turns with a role and a content, as chat templates take them."""

from __future__ import annotations

from cluster_sft.formats import Format, Message, Row


def convert(row: Row) -> tuple[list[Message], str]:
    """Return the turns."""
    return row.turns("messages"), ""


FORMAT = Format(
    required={"messages": ("messages",)},
    inner={"role": ("role",), "content": ("content",)},
    convert=convert,
    example={"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
)
