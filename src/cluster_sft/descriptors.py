"""Descriptors: small YAML files that say where rows come from, in place of the rows themselves.

`{corpus: python-stdlib}` is a corpus that the package makes; `{hub, revision, split, subset,
fields}` is a data set on the Hugging Face Hub. `fields` maps names of a format to its columns.
`{split: heldout}` alone stands for the held-out rows of the prepared data.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_sft import stdlib_corpus
from cluster_sft.errors import UserError, known_names
from cluster_sft.offline import NotFetchedError, is_absence, is_offline
from cluster_sft.yaml_files import read_mapping

if TYPE_CHECKING:
    from datasets import Dataset

CORPORA: dict[str, Callable[[], list[dict[str, Any]]]] = {"python-stdlib": stdlib_corpus.rows}
COMMIT = re.compile(r"[0-9a-f]{40}")
HELDOUT = {"split": "heldout"}
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
            UserError: the Hub did not deliver the data set, or an offline run lacks it.
        """
        return CORPORA[self.corpus]() if self.corpus else [dict(row) for row in self.hub_table()]

    def hub_table(self) -> Dataset:
        """Return the data set of the Hub, which the Hub's client keeps in its cache.

        Raises:
            UserError: as `rows`.
        """
        try:
            loaded = _load(self)
        # Beside OSError (network, no such repository) the library raises ValueError for an unknown
        # split or subset, and its own errors are of both kinds.
        except (OSError, ValueError, RuntimeError) as error:
            if is_offline() and is_absence(error):
                raise _not_fetched(self, "is not in the cache of data sets") from error
            reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error)
            raise UserError(
                f"{self.name}: the Hugging Face Hub did not deliver {self.hub} "
                f"(revision {self.revision or 'main'}, split {self.split}): {reason}; check name "
                "and network, or download it elsewhere and set data.source to the JSONL or Parquet "
                "file"
            ) from error
        _check_revision(self, loaded)
        return loaded


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


def names_heldout(path: Path) -> bool:
    """Whether a file stands for the held-out rows of the prepared data.

    Raises:
        UserError: it names another split of them.
    """
    if path.suffix.lower() not in (".yaml", ".yml"):
        return False
    value = read_mapping(path)
    if set(value) == set(HELDOUT) and value != HELDOUT:
        raise UserError(f"{path}: split must be heldout, got {value['split']!r}")
    return value == HELDOUT


def no_heldout_rows(path: Path) -> UserError:
    """Return the error for a file that stands for held-out rows where there are none."""
    return UserError(
        f"{path}: names the held-out rows, and there are none; set data.holdout above 0, or "
        "score.less.targets to a file of examples"
    )


def _check(path: Path, value: str, known: tuple[str, ...], what: str) -> None:
    if value not in known:
        raise UserError(f"{path}: unknown {what} {value!r}; {known_names(value, known)}")


def _load(source: Descriptor) -> Dataset:
    # Slow to import, and needed by no other kind of source.
    import datasets

    return datasets.load_dataset(
        source.hub,
        name=source.subset or None,
        revision=source.revision or None,
        split=source.split,
    )


def _check_revision(source: Descriptor, loaded: Dataset) -> None:
    """Refuse rows of another revision: without the Hub, datasets takes the newest that it has.

    Raises:
        UserError: they are of another one, or which one is not known.
    """
    files = [Path(file["filename"]) for file in loaded.cache_files]
    found = files[0].parent.name if files else ""
    if not COMMIT.fullmatch(found):  # no data set of the Hub's cache
        return
    wanted = source.revision if COMMIT.fullmatch(source.revision) else _known_commit(source)
    if found == wanted or (not wanted and source.revision in ("", "main")):
        return
    held = f"is in the cache of data sets at commit {found[:12]} alone, not at "
    held += f"{wanted[:12]}" if wanted else f"{source.revision!r}, whose commit is not known"
    if is_offline():
        raise _not_fetched(source, held)
    raise UserError(
        f"{source.name}: {source.hub} {held}, and the Hugging Face Hub did not deliver it; check "
        "revision and network"
    )


def _known_commit(source: Descriptor) -> str:
    """Return the commit that a branch or tag stood for when the Hub was last asked, "" if never."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = f"datasets--{source.hub.replace('/', '--')}"
    ref = Path(HF_HUB_CACHE, folder, "refs", source.revision or "main")
    return ref.read_text().strip() if ref.is_file() else ""


def _not_fetched(source: Descriptor, what: str) -> NotFetchedError:
    revision = source.revision or "main"
    return NotFetchedError(
        f"{source.name}: data set {source.hub} (revision {revision}, split {source.split}) {what}"
    )
