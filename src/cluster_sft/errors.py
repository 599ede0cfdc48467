"""The one exception that a user can cause: a single line that says how to go on."""

from __future__ import annotations


class UserError(ValueError):
    """Report what a user or a file caused: what, where, the rule, the value got and the remedy.

    The command line prints the message as one line on stderr and exits with status 2. It is a
    `ValueError`, so that callers of the Python functions can catch it without this package.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
