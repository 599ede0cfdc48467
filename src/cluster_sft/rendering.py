"""From conversations to training rows: rendered text, what of it is supervised, tokens, labels.

Supervised is what the template renders of the assistant's turns, with the end-of-turn token. The
whole text is tokenised once, and a token is supervised if it holds a supervised character: never is
a prefix tokenised again, whose last token may differ. Text is data: a control token that is merely
spelled in a turn's content stays text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from cluster_sft._chat_template import ChatTemplate, TemplateRefusal
from cluster_sft._named_templates import NamedTemplate, named_template
from cluster_sft._provenance import Message, Rendered, Span
from cluster_sft._tokenization import Encoded, Tokenization
from cluster_sft.errors import UserError

__all__ = [
    "Encoded",
    "Rendered",
    "Renderer",
    "TemplateRefusal",
    "prompt_tokens",
    "render_prompt",
    "stop_tokens",
]


@dataclass(frozen=True)
class Renderer:
    """A template bound to a tokenizer.

    Attributes:
        name: the template's name; "auto" is the tokenizer's chat template.
        eos: the token that ends an answer of a named template.
    """

    name: str
    template: ChatTemplate | NamedTemplate
    tokenization: Tokenization
    eos: str

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, *, template: str) -> Renderer:
        """Return the renderer of `template` ("auto" or a name) for `tokenizer`.

        Raises:
            UserError: an unknown name, no chat template, no end-of-sequence token, or a tokenizer
                that cannot tell which characters a token stands for.
        """
        tokenization = Tokenization.of(tokenizer)
        if template == "auto":
            chat = ChatTemplate.of(tokenizer, tokenization.specials)
            return cls(template, chat, tokenization, str(tokenizer.eos_token or ""))
        named = named_template(template)
        if not tokenizer.eos_token:
            raise UserError(
                f"model {tokenizer.name_or_path!r}: template {template!r} ends answers with the "
                "end-of-sequence token, and the tokenizer defines none; set its eos_token"
            )
        return cls(template, named, tokenization, str(tokenizer.eos_token))

    def conversation(self, messages: Sequence[Message], *, context: str = "") -> Rendered:
        """Return a whole conversation as text with its supervised spans.

        Args:
            messages: `{"role", "content"}` each.
            context: an instruction's separate input, which also ends the first user's content.

        Raises:
            TemplateRefusal: the template does not take the conversation.
        """
        if isinstance(self.template, ChatTemplate):
            return self.template.conversation(messages)
        return self._named(self.template, messages, context)

    def prompt(self, messages: Sequence[Message], *, context: str = "") -> Rendered:
        """Return the text after which an answer to `messages` starts.

        Raises:
            TemplateRefusal: the template does not take the conversation.
        """
        if isinstance(self.template, ChatTemplate):
            return self.template.prompt(messages)
        return self._named(self.template, messages, context)

    def header(self, messages: Sequence[Message]) -> str:
        """Return the text that announces the answer to `messages`, the assistant's header."""
        if isinstance(self.template, ChatTemplate):
            return self.template.header(messages)
        return self.template.after

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        """Return the token ids and labels of each rendered text, one leading BOS included."""
        return self.tokenization.encode(rendered)

    @property
    def ends_answers(self) -> bool:
        """Whether anything is rendered after an answer from which a model can learn to stop."""
        shape = (("user", None), ("assistant", None))
        return not isinstance(self.template, ChatTemplate) or any(self.template.end_of_turn(shape))

    def stop_ids(self) -> list[int]:
        """Return the ids of the tokens after which an answer is over, ascending."""
        tokens = {self.eos}
        if isinstance(self.template, ChatTemplate):
            tokens.add(self.template.end_of_turn((("user", None), ("assistant", None)))[0])
        return sorted({self.tokenization.id_of(t) for t in tokens if t})

    def row_id(self, rendered: Rendered) -> str:
        """Return 16 hex digits of the SHA-256 of the text, its supervised spans and its data.

        Of the data only control tokens spelled in it count: they alone change the token ids.
        """
        parts = [rendered.text, rendered.supervised, self.tokenization.spelled(rendered)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def _named(
        self, template: NamedTemplate, messages: Sequence[Message], context: str
    ) -> Rendered:
        pieces = template.pieces(messages, context=context, end=self.eos)
        if pieces is None:
            roles = ", ".join(m["role"] for m in messages)
            raise TemplateRefusal(f"template {self.name!r} has no place for all of: {roles}")
        supervised: list[Span] = []
        data: list[Span] = []
        cursor = 0
        for text, kind in pieces:
            span = (cursor, cursor + len(text))
            if kind in ("data", "answer"):
                data.append(span)
            if kind == "answer":
                supervised.append(span)
            elif kind == "end":
                supervised[-1] = (supervised[-1][0], span[1])
            cursor = span[1]
        return Rendered("".join(text for text, _ in pieces), supervised, data)


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, template: str, messages: Sequence[Message]
) -> str:
    """Return the training template's text of `messages` up to where the answer starts.

    Raises:
        UserError: an unknown template, or none.
        TemplateRefusal: the template does not take the conversation.
    """
    return Renderer.of(tokenizer, template=template).prompt(messages).text


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, template: str, conversations: Sequence[Sequence[Message]]
) -> list[list[int]]:
    """Return the token ids of each conversation's prompt, exactly as training tokenises it.

    BOS is included, and control tokens that are spelled in the content are kept as text.

    Raises:
        UserError: an unknown template, or none.
        TemplateRefusal: the template does not take a conversation.
    """
    renderer = Renderer.of(tokenizer, template=template)
    rendered = [renderer.prompt(messages) for messages in conversations]
    return [encoded.input_ids.tolist() for encoded in renderer.encode(rendered)]


def stop_tokens(tokenizer: PreTrainedTokenizerBase, template: str) -> list[int]:
    """Return the ids of the tokens after which an answer is over, ascending.

    Raises:
        UserError: an unknown template, or none.
    """
    return Renderer.of(tokenizer, template=template).stop_ids()
