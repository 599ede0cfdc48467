"""Tokenise rendered text once, with labels from character spans and spelled tokens kept as text."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tokenizers import AddedToken, Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from cluster_sft._provenance import Rendered, Span
from cluster_sft.errors import UserError

# A tokenizer, mark by control token, and id of the control token by id of its mark.
Twin = tuple[Tokenizer, dict[str, str], dict[int, int]]

IGNORED = -100
# The last private-use plane, from which the marks that stand for control tokens are taken.
MARKS = (0x100000, 0x10FFFD)


@dataclass(frozen=True)
class Encoded:
    """A tokenised row: `input_ids` and `labels` (T,) int32, -100 on all that is not supervised."""

    input_ids: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Tokenization:
    """A fast tokenizer without its additions: no truncation, padding or added special tokens.

    Attributes:
        backend: the tokenizer.
        controls: the control tokens.
        specials: finds a control token in a text.
        bos: id of the token that the model expects first; None if it expects none.
    """

    backend: Tokenizer
    controls: list[str]
    specials: re.Pattern[str]
    bos: int | None
    _twins: dict[int, Twin] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Tokenization:
        """Return the tokenization of `tokenizer`.

        Raises:
            UserError: it is a slow tokenizer, which knows no character offsets.
        """
        if not tokenizer.is_fast:
            raise UserError(
                f"model {tokenizer.name_or_path!r}: its tokenizer has no fast (tokenizers) form, "
                "which labels by character offsets need; save a tokenizer.json in the directory"
            )
        original = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
        original.no_truncation()
        original.no_padding()
        added = original.get_added_tokens_decoder().values()
        controls = sorted((t.content for t in added if t.special), key=len, reverse=True)
        # A pattern that matches nothing, for a tokenizer without control tokens.
        specials = re.compile("|".join(map(re.escape, controls)) if controls else r"(?!)")
        # The model expects a BOS exactly if its tokenizer puts one in front of plain text.
        first = original.encode("a", add_special_tokens=True).ids[:1]
        bos = first[0] if first == [tokenizer.bos_token_id] else None
        # Its post-processor adds tokens and trims white space off the offsets.
        original.post_processor = None
        return cls(original, controls, specials, bos)

    def id_of(self, token: str) -> int:
        """Return the id of a token of the vocabulary."""
        found = self.backend.token_to_id(token)
        assert found is not None, token
        return found

    def spelled(self, rendered: Rendered) -> list[Span]:
        """Return where control tokens are spelled in the data: they are text, not control."""
        return [s for s in self._found(rendered.text) if _meets(s, rendered.data)]

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        """Return ids and labels of each text, with exactly one leading BOS if the model has one."""
        plain = [i for i, r in enumerate(rendered) if not self.spelled(r)]
        encodings = dict(
            zip(
                plain,
                self.backend.encode_batch(
                    [rendered[i].text for i in plain], add_special_tokens=False
                ),
                strict=True,
            )
        )
        out = []
        for i, row in enumerate(rendered):
            if i in encodings:
                ids = np.array(encodings[i].ids, np.int32)
                out.append(self._labelled(row, ids, encodings[i]))
            else:
                out.append(self._marked(row))
        return out

    def _found(self, text: str) -> list[Span]:
        return [match.span() for match in self.specials.finditer(text)]

    def _marked(self, row: Rendered) -> Encoded:
        """Return ids and labels of a row whose data spells control tokens.

        The template's own control tokens are replaced by marks of the same length, which a twin of
        the tokenizer knows as added tokens, while it reads control tokens as text.
        """
        used = {ord(c) for c in row.text if ord(c) >= MARKS[0]}
        windows = range(*MARKS, len(self.controls))
        start = next(s for s in windows if used.isdisjoint(range(s, s + len(self.controls))))
        if start not in self._twins:
            self._twins[start] = _twin(self.backend, start)
        twin, marks, controls = self._twins[start]
        text, cursor = [], 0
        for begin, end in self._found(row.text):
            if not _meets((begin, end), row.data):
                text += [row.text[cursor:begin], marks[row.text[begin:end]]]
                cursor = end
        encoding = twin.encode("".join([*text, row.text[cursor:]]), add_special_tokens=False)
        ids = np.array([controls.get(i, i) for i in encoding.ids], np.int32)
        return self._labelled(row, ids, encoding)

    def _labelled(self, row: Rendered, ids: np.ndarray, encoding: Encoding) -> Encoded:
        supervised = np.zeros(len(ids), bool)
        if len(ids):
            begin, end = np.array(encoding.offsets, np.int64).T
            for first, last in row.supervised:
                supervised |= (end > first) & (begin < last)
        labels = np.where(supervised, ids, IGNORED).astype(np.int32)
        if self.bos is not None and ids[:1].tolist() != [self.bos]:
            ids = np.concatenate([np.array([self.bos], np.int32), ids])
            labels = np.concatenate([np.array([IGNORED], np.int32), labels])
        # Nothing predicts the first token.
        labels[:1] = IGNORED
        return Encoded(ids, labels)


def _twin(tokenizer: Tokenizer, start: int) -> Twin:
    """Return a tokenizer that reads control tokens as text, and the marks that stand for them."""
    twin = Tokenizer.from_str(tokenizer.to_str())
    controls = [t for t in twin.get_added_tokens_decoder().values() if t.special]
    marks = {t.content: chr(start + i) * len(t.content) for i, t in enumerate(controls)}
    added = [
        AddedToken(
            marks[t.content],
            single_word=t.single_word,
            lstrip=t.lstrip,
            rstrip=t.rstrip,
            normalized=t.normalized,
            special=False,
        )
        for t in controls
    ]
    twin.add_tokens(added)
    twin.encode_special_tokens = True
    vocabulary = twin.get_vocab(with_added_tokens=True)
    return twin, marks, {vocabulary[mark]: vocabulary[text] for text, mark in marks.items()}


def _meets(span: Span, spans: Sequence[Span]) -> bool:
    """Whether `span` overlaps one of the sorted, disjoint `spans`."""
    at = bisect_right(spans, span[1] - 1, key=lambda s: s[0])
    return at > 0 and spans[at - 1][1] > span[0]
