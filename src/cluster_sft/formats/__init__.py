"""Shapes of raw data, one file each: how a row of a file becomes a conversation.

A file `NAME.py` here defines `FORMAT` and nothing else need change: `data.format` accepts its name,
`auto` tries it, `data.fields` maps onto its columns, and the contract test covers it.

A row with a defect of the *file* (a missing key, a wrong type) is `Malformed`, an error. A row with
a defect of *content* (no response, turns out of order) is `Unusable`: dropped, counted and listed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_sft.errors import UserError, known_names, nearest
from cluster_sft.formats._turns import Malformed, Message, Unusable, check_turns, text, turns

__all__ = [
    "Format",
    "Malformed",
    "Message",
    "Reader",
    "Row",
    "Sample",
    "Unusable",
    "names",
    "reader",
]

SHARED = {"id": ("id",), "category": ("category",), "system": ("system", "system_prompt")}


@dataclass(frozen=True)
class Sample:
    """A row as a conversation: strings exactly as they stand in the source.

    Attributes:
        messages: `{"role", "content"}` each; roles system, user, assistant, tool.
        context: the separate input of an instruction, which also ends the user's content.
        source_id: the source's own id as text; None where it has none.
        category: the source's label of the row; None where it has none.
    """

    messages: list[Message]
    context: str
    source_id: str | None
    category: str | None


@dataclass(frozen=True)
class Row:
    """The values of one row under a format's own names; null fields are absent."""

    values: Mapping[str, Any]
    columns: Mapping[str, str]  # name -> the source's column, for error messages
    inner: Mapping[str, tuple[str, ...]]

    def text(self, name: str) -> str:
        """Return a text unchanged, "" if the row lacks it; Malformed if it is no string."""
        return text(self.values[name], self.columns[name]) if name in self.values else ""

    def turns(self, name: str) -> list[Message]:
        """Return a list of turns as messages; Malformed or Unusable if it cannot be one."""
        return turns(self.values[name], self.columns[name], self.inner)


@dataclass(frozen=True)
class Format:
    """A shape of rows.

    Attributes:
        required: name -> columns that may hold it, by which rows of this shape are known.
        convert: row -> (messages, context); the context is an instruction's separate input.
        example: a row of this shape in which the user says "q" and the assistant "a".
        optional: like `required`, for columns that may be absent or null.
        inner: `role` and `content` -> the keys that hold them in the turns of a conversation.
    """

    required: dict[str, tuple[str, ...]]
    convert: Callable[[Row], tuple[list[Message], str]]
    example: dict[str, Any]
    optional: dict[str, tuple[str, ...]] = field(default_factory=dict)
    inner: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def owner(self, name: str) -> str | None:
        """Return the name that `name` stands for: itself, or the name that it is a column of."""
        every = {**SHARED, **self.optional, **self.required, **self.inner}
        if name in every:
            return name
        return next((known for known, columns in every.items() if name in columns), None)


@dataclass(frozen=True)
class Reader:
    """A format bound to the columns of one source."""

    name: str
    format: Format
    columns: Mapping[str, tuple[str, ...]]  # of required and optional names
    inner: Mapping[str, tuple[str, ...]]

    def read(self, row: Mapping[str, Any]) -> Sample:
        """Return the row's conversation.

        Raises:
            Malformed: a missing key or a wrong type.
            Unusable: a defect of content, which drops the row.
        """
        values, held = {}, {}
        for name, columns in self.columns.items():
            found = [c for c in columns if _value(row, c) is not None]
            if len(found) > 1:
                raise Malformed(
                    f"holds both {found[0]!r} and {found[1]!r}, either could be its {name}; "
                    f"name one: data.fields: {{{name}: {found[0]}}}"
                )
            if found:
                values[name], held[name] = _value(row, found[0]), found[0]
            elif name in self.format.required:
                raise Malformed(
                    f"{' or '.join(map(repr, columns))} is missing or null, but rows of shape "
                    f"{self.name!r} need it; keys found: {_keys(row)}"
                )
        bound = Row(values, held, self.inner)
        messages, context = self.format.convert(bound)
        system = bound.text("system")
        if system and all(m["role"] != "system" for m in messages):
            messages = [{"role": "system", "content": system}, *messages]
        check_turns(messages)
        return Sample(messages, context, _label(values.get("id")), _label(values.get("category")))


def names() -> list[str]:
    """Return the names of all formats, sorted."""
    return sorted(p.stem for p in Path(__file__).parent.glob("[!_]*.py"))


def get(name: str) -> Format:
    """Return the format called `name`.

    Raises:
        UserError: there is none; the nearest name is given.
    """
    if name not in names():
        raise UserError(
            f"data.format: unknown format {name!r}; {known_names(name, ['auto', *names()])}"
        )
    return importlib.import_module(f"{__name__}.{name}").FORMAT


def reader(
    rows: Sequence[Mapping[str, Any]], *, name: str, fields: Mapping[str, str], where: str
) -> Reader:
    """Return the reader of a source.

    Args:
        rows: the source's rows; the first one decides the shape.
        name: a format, or "auto": the one whose columns the first row has.
        fields: name of the format -> column of the source, where they differ.
        where: the first row's place, for error messages.

    Raises:
        UserError: an unknown format or field, or a row that is of no known shape or of several.
    """
    row = rows[0]
    formats = {n: get(n) for n in ([name] if name != "auto" else names())}
    _check_fields(rows, fields, formats, where)
    if name != "auto":
        return _bind(name, formats[name], fields, row)
    fitting = {n: f for n, f in formats.items() if all(f.owner(k) for k in fields)}
    matches: list[str] = []
    for present in (lambda c: _value(row, c) is not None, lambda c: c in row):
        matches = matches or [n for n, f in fitting.items() if _matches(f, fields, present)]
    if len(matches) > 1:
        raise UserError(
            f"{where}: the row fits the shapes {' and '.join(matches)}; "
            f"set data.format to one of them (keys found: {_keys(row)})"
        )
    if not matches:
        raise UserError(
            f"{where}: the row is of no known shape (keys found: {_keys(row)}); known: "
            f"{'; '.join(f'{n} ({_describe(f)})' for n, f in formats.items())}; map the columns, "
            "for example data.fields: {instruction: COLUMN, response: COLUMN}"
        )
    return _bind(matches[0], formats[matches[0]], fields, row)


def _matches(form: Format, fields: Mapping[str, str], present: Callable[[str], bool]) -> bool:
    mapped = {form.owner(k): column for k, column in fields.items()}
    return all(
        any(present(c) for c in ((mapped[n],) if n in mapped else columns))
        for n, columns in form.required.items()
    )


def _bind(name: str, form: Format, fields: Mapping[str, str], row: Mapping[str, Any]) -> Reader:
    mapped = {form.owner(k): (column,) for k, column in fields.items()}
    columns: dict[str, tuple[str, ...]] = {**SHARED, **form.optional}
    for required, choices in form.required.items():
        # The first row fixes the column, so that a later row of another shape is an error.
        held = tuple(c for c in choices if _value(row, c) is not None)
        columns[required] = held or tuple(c for c in choices if c in row) or choices
    columns |= {n: c for n, c in mapped.items() if n in columns}
    inner = {n: mapped.get(n, keys) for n, keys in form.inner.items()}
    return Reader(name, form, columns, inner)


def _check_fields(
    rows: Sequence[Mapping[str, Any]],
    fields: Mapping[str, str],
    formats: Mapping[str, Format],
    where: str,
) -> None:
    for key, column in fields.items():
        owners = [f for f in formats.values() if f.owner(key)]
        if not owners:
            known = {n for f in formats.values() for n in (*SHARED, *f.optional, *f.required)}
            raise UserError(f"data.fields: unknown name {key!r}; {known_names(key, sorted(known))}")
        inner = all(f.owner(key) in f.inner for f in owners)
        if not inner and not any(column in row for row in rows):
            raise UserError(
                f"{where}: data.fields maps {key!r} to the column {column!r}, which no row has; "
                f"{nearest(column, list(rows[0]))}keys found: {_keys(rows[0])}"
            )


def _value(row: Mapping[str, Any], column: str) -> Any:
    """Return the row's value; null, and pandas' NaN for null, count as absent."""
    value = row.get(column)
    return None if isinstance(value, float) and value != value else value


def _label(value: Any) -> str | None:
    if value is None:
        return None
    return value if isinstance(value, str) else str(value)


def _keys(row: Mapping[str, Any]) -> str:
    shown = [str(k) for k in row][:12]
    return ", ".join(shown) + (", ..." if len(row) > len(shown) else "") if shown else "none"


def _describe(form: Format) -> str:
    return " + ".join("|".join(columns) for columns in form.required.values())
