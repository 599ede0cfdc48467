"""Turns of a conversation: reading them, and the order that makes them usable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Message = dict[str, str]

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "call",
    "tool_call": "call",
}


class Malformed(ValueError):
    """A row whose form is at fault: an error, with the row's place added by the caller."""


class Unusable(ValueError):
    """A row whose content cannot be trained on: dropped under `reason`, with a detail."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def text(value: Any, key: str) -> str:
    """Return `value` if it is text, unchanged.

    Raises:
        Malformed: it is no string, or holds half of a UTF-16 surrogate pair.
    """
    if not isinstance(value, str):
        raise Malformed(
            f"{key!r} must be a string, got {type(value).__name__} ({_short(value)}); "
            "convert the column to text"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Malformed(
            f"{key!r} holds the lone surrogate {value[error.start]!a} at character {error.start}, "
            "which is no text; remove it"
        ) from error
    return value


def turns(value: Any, column: str, keys: Mapping[str, tuple[str, ...]]) -> list[Message]:
    """Return a list of turns as messages.

    Args:
        value: a list of objects; a turn's text is a string or a list of `{type: text, text}`.
        column: where the list stands, for error messages.
        keys: `role` and `content` -> the keys of a turn that may hold them.

    Raises:
        Malformed: no list of objects, an unknown role, a missing key or a wrong type.
        Unusable: a turn that only calls a tool.
    """
    if not isinstance(value, list):
        raise Malformed(f"{column!r} must be a list of turns, got {type(value).__name__}")
    messages = []
    for number, turn in enumerate(value):
        place = f"{column}[{number}]"
        if not isinstance(turn, Mapping):
            raise Malformed(f"{place} must be an object, got {type(turn).__name__}")
        role = ROLES.get(str(_pick(turn, keys["role"], place)).strip().lower())
        if role is None:
            raise Malformed(
                f"{place} has the unknown role {_pick(turn, keys['role'], place)!r}; "
                f"known: {', '.join(ROLES)}"
            )
        calls = role == "call" or bool(turn.get("tool_calls")) or bool(turn.get("function_call"))
        content = _content(turn, keys["content"], place, optional=calls)
        if calls and (role == "call" or not content.strip()):
            raise Unusable("tool_call_without_content", f"{place} calls a tool and says nothing")
        messages.append({"role": role, "content": content})
    return messages


def check_turns(messages: list[Message]) -> None:
    """Check that the turns can be trained on: user and assistant alternate, and both speak.

    A system turn may come first; tool turns stand after an assistant's; a last turn of the user
    without an answer is context that nothing is learned from.

    Raises:
        Unusable: they cannot; the detail names the turn.
    """
    roles = [m["role"] for m in messages]
    spoken = roles[1:] if roles[:1] == ["system"] else roles
    if "user" not in spoken:
        raise Unusable("no_user_turn", f"roles: {', '.join(roles) or 'none'}")
    if spoken[0] == "assistant":
        raise Unusable("starts_with_assistant", f"roles: {', '.join(roles[:6])}")
    previous = ""
    allowed = {"": ("user",), "user": ("assistant",), "assistant": ("user", "tool")}
    for role in spoken:
        if role not in allowed.get(previous, ("assistant", "tool", "user")):
            raise Unusable("bad_turn_order", f"{role} after {previous or 'the start'}")
        previous = role
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and not message["content"].strip():
            raise Unusable("empty_response", f"turn {number} of {len(messages)} is empty")
    if "assistant" not in spoken:
        raise Unusable("empty_response", "no turn of the assistant")


def _pick(turn: Mapping[str, Any], keys: tuple[str, ...], place: str) -> Any:
    found = [k for k in keys if turn.get(k) is not None]
    if not found:
        raise Malformed(
            f"{place} lacks {' or '.join(map(repr, keys))}; keys found: "
            f"{', '.join(map(str, turn)) or 'none'}"
        )
    return turn[found[0]]


def _content(turn: Mapping[str, Any], keys: tuple[str, ...], place: str, *, optional: bool) -> str:
    if optional and all(turn.get(k) is None for k in keys):
        return ""
    value = _pick(turn, keys, place)
    key = next(k for k in keys if turn.get(k) is not None)
    if not isinstance(value, list):
        return text(value, f"{place}.{key}")
    parts = []
    for part in value:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise Malformed(
                f"{place}.{key} holds a part of type {kind!r}; only text is supported: "
                "leave such rows out"
            )
        parts.append(text(part.get("text"), f"{place}.{key}.text"))
    return "".join(parts)


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
