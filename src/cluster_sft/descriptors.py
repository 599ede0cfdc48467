"""Descriptors: small YAML files that say where rows come from, in place of the rows themselves.

`{corpus: python-stdlib}` is a corpus that the package makes; `{hub, revision, split, subset,
fields}` is a data set on the Hugging Face Hub. `fields` maps names of a format to its columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_sft import stdlib_corpus
from cluster_sft.errors import UserError, known_names
from cluster_sft.yaml_files import read_mapping

CORPORA: dict[str, Callable[[], list[dict[str, Any]]]] = {"python-stdlib": stdlib_corpus.rows}
KEYS = ("corpus", "hub", "subset", "revision", "split", "fields")


@dataclass(frozen=True)
class Descriptor:
    """A descriptor's content; exactly one of `corpus` and `hub` is set."""

    name: str
    corpus: str
    hub: str
    subset: str
    revision: str
    split: str
    fields: dict[str, str]

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows, from the package or from the Hub (its cache, where it is offline).

        Raises:
            UserError: the Hub did not deliver the data set.
        """
        return CORPORA[self.corpus]() if self.corpus else _hub_rows(self)


def read(path: Path) -> Descriptor:
    """Read a descriptor.

    Raises:
        UserError: no such file, not YAML, an unknown key or corpus, or a value that is no string.
    """
    value = read_mapping(path)
    if ("corpus" in value) == ("hub" in value):
        raise UserError(
            f"{path}: a descriptor must hold either `corpus: NAME` or `hub: OWNER/NAME`, "
            f"got {', '.join(map(str, value))!r}"
        )
    for key in value:
        _check(path, str(key), KEYS, "key")
    fields = value.get("fields") or {}
    texts = {k: value.get(k) or "" for k in KEYS if k != "fields"}
    for key, text in {
        **texts,
        **(fields if isinstance(fields, dict) else {"fields": None}),
    }.items():
        if not isinstance(text, str):
            raise UserError(
                f"{path}: {key!r} must be text (`fields` a mapping of texts), got {text!r}"
            )
    if texts["corpus"]:
        _check(path, texts["corpus"], tuple(CORPORA), "corpus")
    return Descriptor(str(path), **{**texts, "split": texts["split"] or "train"}, fields=fields)


def _check(path: Path, value: str, known: tuple[str, ...], what: str) -> None:
    if value not in known:
        raise UserError(f"{path}: unknown {what} {value!r}; {known_names(value, known)}")


def _hub_rows(source: Descriptor) -> list[dict[str, Any]]:
    # Slow to import, and needed by no other kind of source.
    import datasets

    try:
        loaded = datasets.load_dataset(
            source.hub,
            name=source.subset or None,
            revision=source.revision or None,
            split=source.split,
        )
    # Beside OSError (network, no such repository) the library raises ValueError for an unknown
    # split or subset, and its own errors are of both kinds.
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error)
        raise UserError(
            f"{source.name}: the Hugging Face Hub did not deliver {source.hub} "
            f"(revision {source.revision or 'main'}, split {source.split}): {reason}; check name "
            "and network, or download it elsewhere and set data.source to the JSONL or Parquet file"
        ) from error
    return [dict(row) for row in loaded]
