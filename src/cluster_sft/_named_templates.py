"""Named prompt templates, for models whose tokenizer has no chat template.

A template is text around the turns of a conversation; the answer is followed by the tokenizer's
end-of-sequence token. `alpaca` is Stanford Alpaca's prompt, `magicoder` is Magicoder's, and `plain`
adds nothing but the line break between a turn and the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster_sft.errors import UserError, known_names

Piece = tuple[str, str]  # text, and what it is: "frame", "data", "answer" (data) or "end"

ALPACA = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request."
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request."
)
MAGICODER = (
    "You are an exceptionally intelligent coding assistant that consistently delivers accurate "
    "and reliable responses to user instructions."
)


@dataclass(frozen=True)
class NamedTemplate:
    """The frame around the turns: `before` and `after` the user's text, `between` exchanges.

    Attributes:
        system: opens the prompt unless the conversation brings its own system turn.
        context: stands between an instruction and its separate input; None joins the two plainly.
        system_context: takes the place of `system` where there is a separate input.
    """

    system: str
    before: str
    after: str
    between: str
    context: str | None = None
    system_context: str = ""

    def pieces(
        self, messages: Sequence[dict[str, str]], *, context: str, end: str
    ) -> list[Piece] | None:
        """Return the rendered text in pieces; None if a turn's role has no place in it.

        Args:
            messages: ending with a user's turn, they render as a prompt for the next answer.
            context: the separate input that ends the first user's content, "" for none.
            end: the end-of-sequence token.
        """
        split = bool(context) and self.context is not None
        system = self.system_context if split else self.system
        out: list[Piece] = [(system + self.between, "frame")] if system else []
        for number, message in enumerate(messages):
            role, content = message["role"], message["content"]
            if role == "system":
                out = [(content, "data"), (self.between, "frame")]
            elif role == "user":
                if number and messages[number - 1]["role"] == "assistant":
                    out.append((self.between, "frame"))
                out += [(self.before, "frame"), *self._user(content, context if split else "")]
                out.append((self.after, "frame"))
                split = False
            elif role == "assistant":
                out += [(content, "answer"), (end, "end")]
            else:
                return None
        return [piece for piece in out if piece[0]]

    def _user(self, content: str, context: str) -> list[Piece]:
        if not context:
            return [(content, "data")]
        instruction = content.removesuffix(context).removesuffix("\n\n")
        return [(instruction, "data"), (self.context or "", "frame"), (context, "data")]


NAMED = {
    "alpaca": NamedTemplate(
        system=ALPACA,
        before="### Instruction:\n",
        after="\n\n### Response:",
        between="\n\n",
        context="\n\n### Input:\n",
        system_context=ALPACA_INPUT,
    ),
    "magicoder": NamedTemplate(
        system=MAGICODER, before="@@ Instruction\n", after="\n\n@@ Response\n", between="\n\n"
    ),
    "plain": NamedTemplate(system="", before="", after="\n", between="\n"),
}


def named_template(name: str) -> NamedTemplate:
    """Return the template of a name.

    Raises:
        UserError: there is none; the nearest name is given.
    """
    if name not in NAMED:
        remedy = known_names(name, ["auto", *NAMED])
        raise UserError(f"model.template: unknown template {name!r}; {remedy}")
    return NAMED[name]
