"""The one exception that a user can cause: a single line that says how to go on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Report what a user or a file caused: what, where, the rule, the value got and the remedy.

    The command line prints the message as one line on stderr and exits with status 2. It is a
    `ValueError`, so that callers of the Python functions can catch it without this package.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def nearest(name: object, known: Iterable[str]) -> str:
    """Return `did you mean 'X'? ` for a name that comes close to a known one, else ""."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def known_names(name: object, known: Iterable[str]) -> str:
    """Return the remedy for an unknown name: the nearest known one, if any, and all of them."""
    choices = list(known)
    return f"{nearest(name, choices)}known: {', '.join(choices) or 'none'}"
