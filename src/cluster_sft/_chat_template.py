"""Render conversations by a tokenizer's chat template, and find the assistant's turns in the text.

A template may trim, move or add text, so where a turn lies cannot be read off its content: the
turns' text is located by colours (`_provenance`), and what stands around it is compared with the
generation prompt and with what the template puts after an answer.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from cluster_sft._provenance import (
    COLOUR,
    COLOURS,
    RUN,
    Message,
    Rendered,
    Span,
    common,
    literals,
    located,
    narrowed,
)
from cluster_sft.errors import UserError

Shape = tuple[tuple[str, str | None], ...]  # of each turn: role, and its text if that is blank

# Declared to return one string, it returns (texts, spans of generation blocks).
_render: Any = render_jinja_template
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A template that asks for today's date would render other text every day.
DATE = (
    "{% macro strftime_now(format) %}{{ format | replace('%d', '26') | replace('%b', 'Jul') "
    "| replace('%B', 'July') | replace('%m', '07') | replace('%Y', '2024') | replace('%y', '24') "
    "| replace('%A', 'Friday') | replace('%a', 'Fri') | replace('%H', '00') | replace('%M', '00') "
    "| replace('%S', '00') }}{% endmacro %}{{ '' }}"
)


class TemplateRefusal(ValueError):
    """A conversation that the template does not take; the message is the template's reason."""


@dataclass
class ChatTemplate:
    """A tokenizer's chat template.

    Attributes:
        source: the Jinja template.
        tokens: the tokenizer's named special tokens, which templates print.
        specials: finds every control token of the tokenizer in a text.
        eos: the end-of-sequence token, "" for none.
    """

    source: str
    tokens: dict[str, Any]
    specials: re.Pattern[str]
    eos: str
    _heads: dict[Shape, str | None] = field(default_factory=dict)
    _labels: dict[Shape, str] = field(default_factory=dict)
    _ends: dict[Shape, tuple[str, str]] = field(default_factory=dict)
    _headers: dict[Shape, str] = field(default_factory=dict)

    @functools.cached_property
    def _literals(self) -> re.Pattern[str] | None:
        return literals(self.source, self.specials)

    @functools.cached_property
    def _header(self) -> re.Pattern[str]:
        control = self.specials.pattern
        return re.compile(rf"(?is:.*(?:{control})\w*\s*|\W*assistant\W*)")

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, specials: re.Pattern[str]) -> ChatTemplate:
        """Return the chat template of `tokenizer`.

        Raises:
            UserError: it has none, or one that is no valid Jinja.
        """
        where = f"model {tokenizer.name_or_path!r}: its tokenizer"
        remedy = "set model.template to alpaca, magicoder or plain"
        if not tokenizer.chat_template:
            raise UserError(f"{where} has no chat template; {remedy}")
        try:
            source = tokenizer.get_chat_template()
        except ValueError as error:
            raise UserError(
                f"{where} has several chat templates, none default; {remedy}"
            ) from error
        prelude = DATE if "strftime_now" in source else ""
        tokens = dict(tokenizer.special_tokens_map)
        template = cls(prelude + source, tokens, specials, str(tokenizer.eos_token or ""))
        try:
            _render([[]], chat_template=template.source, **tokens)
        except TemplateSyntaxError as error:
            what = f"no valid Jinja (line {error.lineno}: {error.message})"
            raise UserError(f"{where} has a chat template that is {what}; {remedy}") from error
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError):
            pass  # it refuses an empty conversation, as it may
        return template

    def prompt(self, messages: Sequence[Message]) -> Rendered:
        """Return the text after which the next answer starts; nothing in it is supervised."""
        text = self._text(messages, prompt=True)
        render = functools.partial(self._text, prompt=True)
        places = located(text, messages, render, specials=self.specials, literals=self._literals)
        if places is None:
            raise TemplateRefusal("the template rewrites the text of a turn")
        data = sorted(span for spans in places.values() for span in spans)
        return Rendered(text + self._label(_shape(messages)), [], data)

    def conversation(self, messages: Sequence[Message]) -> Rendered:
        """Return the rendered conversation; supervised is what is rendered of the assistant.

        Raises:
            TemplateRefusal: the template refuses it, or rewrites a turn beyond recognition.
        """
        if len(messages) > COLOURS:
            raise TemplateRefusal(f"{len(messages)} turns are more than {COLOURS}")
        text, blocks = self._text_and_blocks(messages)
        places = located(
            text, messages, self._text, specials=self.specials, literals=self._literals
        )
        if places is None:
            return Rendered(text, self._by_prefix(text, messages), [])
        data = sorted(span for spans in places.values() for span in spans)
        supervised = []
        for turn, message in enumerate(messages):
            if message["role"] == "assistant" and turn in places:
                span = self._turn(text, messages, places, turn)
                if blocks is not None:
                    span = narrowed(span, blocks)
                supervised += [span] if span else []
        if any(b[0] < a[1] for a, b in itertools.pairwise(supervised)):
            raise TemplateRefusal("the template interleaves the turns of the assistant")
        if not supervised:
            raise TemplateRefusal("the template renders none of the assistant's turns")
        return Rendered(text, supervised, data)

    def header(self, messages: Sequence[Message]) -> str:
        """Return the assistant's header, which stands in front of the answer to `messages`.

        It is what the generation prompt adds; all that follows the last turn's text if that is
        nothing.
        """
        shape = _shape(messages)
        if shape not in self._headers:
            head = (self._tail(shape, prompt=True) or "") + self._label(shape)
            added = head.removeprefix(self._tail(shape, prompt=False) or "")
            self._headers[shape] = added or head
        return self._headers[shape]

    def end_of_turn(self, shape: Shape) -> tuple[str, str]:
        """Return the control token that ends an assistant's turn, and the text in front of it.

        The token is "" where the template ends such turns by text alone, or not at all.
        """
        if shape not in self._ends:
            tail = self._tail(shape, prompt=False) or ""
            found = self.specials.search(tail)
            self._ends[shape] = (found[0], "") if found else ("", tail.strip())
        return self._ends[shape]

    def _by_prefix(self, text: str, messages: Sequence[Message]) -> list[Span]:
        """Return the supervised spans where the template rewrites the text of a turn.

        What the conversation's beginnings render as then tells the turns apart.
        """
        if any(self.specials.search(m["content"]) for m in messages):
            raise TemplateRefusal(
                "the template rewrites a turn in which a control token is spelled"
            )
        spans = []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._text(messages[:turn], prompt=True) + self._label(_shape(messages[:turn]))
            whole = self._text(messages[: turn + 1])
            if not (text.startswith(whole) and whole.startswith(prompt)):
                raise TemplateRefusal(f"the template rewrites the text of turn {turn}")
            token, textual = self.end_of_turn(_shape(messages[: turn + 1]))
            end = whole.rfind(token or textual, len(prompt))
            spans.append((len(prompt), end + len(token or textual) if end >= 0 else len(whole)))
        return spans

    def _turn(
        self, text: str, messages: Sequence[Message], places: dict[int, list[Span]], turn: int
    ) -> Span:
        first, last = places[turn][0][0], places[turn][-1][1]
        others = [span for t, spans in places.items() if t != turn for span in spans]
        if any(first < start < last for start, _ in others):
            raise TemplateRefusal(f"the template scatters the text of turn {turn}")
        before = max((end for _, end in others if end <= first), default=0)
        after = min((start for start, _ in others if start >= last), default=len(text))
        content = messages[turn]["content"]
        start = self._start(text[:first], messages[:turn], before)
        if start is None and any(
            m["content"].strip() and t not in places for t, m in enumerate(messages[:turn])
        ):
            raise TemplateRefusal(f"the start of turn {turn} cannot be told from what is before it")
        if start is None:  # no rendering to compare with: all before the content is the header
            lead = content[: len(content) - len(content.lstrip())]
            start = first - len(lead) if text[before:first].endswith(lead) else first
        return start, last + self._end(text[last:after], _shape(messages[: turn + 1]), content)

    def _start(self, text: str, messages: Sequence[Message], before: int) -> int | None:
        """Return where the prompt for the turn after `messages` ends in `text`.

        Args:
            text: all that is rendered before the turn's own content.
            messages: the turns before it.
            before: where the content of the last of them ends.
        """
        shape = _shape(messages)
        if shape not in self._heads:
            tail = self._tail(shape, prompt=True)
            self._heads[shape] = None if tail is None else tail + self._label(shape)
        head = self._heads[shape]
        if head is None:
            return None
        # The turn before may keep its trailing white space in front of the header.
        spaces = [m["content"][len(m["content"].rstrip()) :] for m in messages]
        starts = [before, *(before + len(s) for s in spaces if text.startswith(s, before))]
        for start in sorted(starts):
            if text.startswith(head, start):
                return start + len(head)
        # In the middle of a conversation the header may be rendered otherwise than at its end.
        plain = self._tail(shape, prompt=False) or ""
        for mark in (head, head.removeprefix(plain)):
            if mark and (at := text.rfind(mark, before)) >= 0:
                return at + len(mark)
        return max(s + common(head, text[s:]) for s in starts)

    def _label(self, shape: Shape) -> str:
        """Return the assistant's header where the template has no generation prompt, else "".

        Without a generation prompt the header is what looks like one: up to the last control token
        and the role's name, or a line that names the assistant.
        """
        if shape not in self._labels:
            self._labels[shape] = ""
            tail = self._tail(shape, prompt=True)
            if tail is not None and tail == self._tail(shape, prompt=False):
                frame = self._tail((*shape, ("assistant", None)), prompt=False, before_last=True)
                found = self._header.match((frame or "").removeprefix(tail))
                self._labels[shape] = found[0] if found else ""
        return self._labels[shape]

    def _end(self, region: str, shape: Shape, content: str) -> int:
        """Return how far the turn reaches into `region`, the text between it and the next."""
        token, textual = self.end_of_turn(shape)
        for mark in (token, textual):
            if mark and (at := region.find(mark)) >= 0:
                return at + len(mark)
        lead = len(region) - len(region.lstrip())
        if self.eos and region.startswith(self.eos, lead):  # printed between turns only
            return lead + len(self.eos)
        return common(content[len(content.rstrip()) :], region)

    def _tail(self, shape: Shape, *, prompt: bool, before_last: bool = False) -> str | None:
        """Return what is rendered after the last turn's text; None if such turns are refused.

        With `before_last` it is what is rendered between the last turn's text and the one before.
        """
        messages = [
            {"role": role, "content": chr(COLOUR + i) if blank is None else blank}
            for i, (role, blank) in enumerate(shape)
        ]
        try:
            text = self._text(messages, prompt=prompt)
        except TemplateRefusal:
            return None
        if before_last:
            text = text.partition(chr(COLOUR + len(shape) - 1))[0]
        return text[max((run.end() for run in RUN.finditer(text)), default=0) :]

    def _text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        return self._rendered(messages, prompt=prompt, blocks=False)[0]

    def _text_and_blocks(self, messages: Sequence[Message]) -> tuple[str, list[Span] | None]:
        """Return the text, and the spans of `{% generation %}` blocks if the template has them."""
        marked = bool(GENERATION.search(self.source))
        text, blocks = self._rendered(messages, prompt=False, blocks=marked)
        return text, blocks if marked else None

    def _rendered(
        self, messages: Sequence[Message], *, prompt: bool, blocks: bool
    ) -> tuple[str, list[Span]]:
        try:
            texts, found = _render(
                [list(messages)],
                chat_template=self.source,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=blocks,
                **self.tokens,
            )
        # Beside its own refusals a template fails in whatever way its expressions can.
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise TemplateRefusal(str(error) or type(error).__name__) from error
        return texts[0], [(a, b) for a, b in found[0]] if blocks else []


def _shape(messages: Sequence[Message]) -> Shape:
    return tuple((m["role"], None if m["content"].strip() else m["content"]) for m in messages)
