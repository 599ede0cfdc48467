"""Tell which turn of a conversation each rendered character came from, by colouring the turns."""

from __future__ import annotations

import re
from collections.abc import Sequence

Message = dict[str, str]
Span = tuple[int, int]

COLOUR = 0xF0000  # private use; turn i is coloured with the i-th character from here on
COLOURS = 0xFFFE
RUN = re.compile(f"([{chr(COLOUR)}-{chr(COLOUR + COLOURS - 1)}])\\1*")


def coloured(content: str, turn: int, kept: re.Pattern[str] | None) -> str:
    """Return `content` with its text, not the white space around it, replaced by the colour."""
    colour = chr(COLOUR + turn)
    core = content.strip()
    if kept is None:
        return content.replace(core, colour * len(core), 1) if core else content
    out, cursor = [], 0
    for match in kept.finditer(content):
        out += [re.sub(r"\S", colour, content[cursor : match.start()]), match[0]]
        cursor = match.end()
    return "".join([*out, re.sub(r"\S", colour, content[cursor:])])


def matched(text: str, shadow: str, messages: Sequence[Message]) -> dict[int, list[Span]] | None:
    """Return the spans of each turn's text, by the colours; None if the two texts disagree."""
    if len(text) != len(shadow):
        return None
    places: dict[int, list[Span]] = {}
    seen: dict[int, int] = {}
    cursor = 0
    for run in RUN.finditer(shadow):
        start, end = run.span()
        turn = ord(run[1]) - COLOUR
        if turn >= len(messages) or text[cursor:start] != shadow[cursor:start]:
            return None
        at = messages[turn]["content"].find(text[start:end], seen.get(turn, 0))
        if at < 0:
            return None
        places.setdefault(turn, []).append((start, end))
        seen[turn] = at + end - start
        cursor = end
    return places if text[cursor:] == shadow[cursor:] else None


def common(first: str, second: str) -> int:
    """Return the length of the longest common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
