"""Tell which turn of a conversation each rendered character came from, by colouring the turns.

A conversation is rendered twice: as it is, and with every turn's text replaced by equally many
copies of one private character, a colour per turn. If the two agree apart from the colours, the
colours tell which turn each character came from, and the rest is the template's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Message = dict[str, str]
Span = tuple[int, int]

COLOUR = 0xF0000  # private use; turn i is coloured with the i-th character from here on
COLOURS = 0xFFFE
RUN = re.compile(f"([{chr(COLOUR)}-{chr(COLOUR + COLOURS - 1)}])\\1*")
LITERAL = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation: what is supervised and what is data, as character spans."""

    text: str
    supervised: list[Span]
    data: list[Span]


def located(
    text: str,
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], str],
    *,
    specials: re.Pattern[str],
    literals: re.Pattern[str] | None,
) -> dict[int, list[Span]] | None:
    """Return, for each turn that is rendered, the spans of its text in `text`.

    Args:
        text: `render(messages)`.
        messages: the conversation.
        render: the template; it may raise ValueError for messages that it refuses.
        specials: finds control tokens; turns that spell one are always located.
        literals: finds texts that the template looks for inside a turn, such as `</think>`.

    Returns None if the template rewrites the text of a turn, so that no colours fit.
    """
    everyone = range(len(messages))
    answers = [i for i in everyone if messages[i]["role"] == "assistant"]
    # Other turns may be rewritten, unless a control token in them must be told from the template's.
    quiet = not any(
        specials.search(m["content"]) for i, m in enumerate(messages) if i not in answers
    )
    for turns in (everyone, answers) if quiet else (everyone,):
        for kept in (None, literals):
            shown = [
                {**m, "content": _coloured(m["content"], i, kept)} if i in turns else m
                for i, m in enumerate(messages)
            ]
            try:
                shadow = render(shown)
            except ValueError:
                continue
            if (places := _matched(text, shadow, messages)) is not None:
                return places
    return None


def literals(source: str, specials: re.Pattern[str]) -> re.Pattern[str] | None:
    """Return what finds the string literals of a template's code that are no words or tokens."""
    code = " ".join(re.findall(r"\{[{%].*?[%}]\}", source, re.DOTALL))
    found = {(a or b).replace("\\n", "\n") for a, b in LITERAL.findall(code)}
    kept = [t for t in found if t.strip() and not t.isidentifier() and not specials.search(t)]
    kept.sort(key=lambda t: (-len(t), t))
    return re.compile("|".join(map(re.escape, kept))) if kept else None


def _coloured(content: str, turn: int, kept: re.Pattern[str] | None) -> str:
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


def _matched(text: str, shadow: str, messages: Sequence[Message]) -> dict[int, list[Span]] | None:
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


def narrowed(span: Span, blocks: list[Span]) -> Span | None:
    """Return the span from where a generation block begins in it; None if no block meets it."""
    met = [block for block in blocks if block[0] < span[1] and block[1] > span[0]]
    return (max(span[0], met[0][0]), span[1]) if met else None
