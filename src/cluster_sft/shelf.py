"""The shelf `work/kept`: a second name for every result, by its key.

Whatever empties or replaces a leaf, the result stays: DVC removes leaves that the lock file at hand
does not name, and a new value takes an old one's place. The names are hard links, which take no
space, since a result's files are never written in place.
"""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from cluster_sft.digests import digest, file_digest

KEPT = Path("work/kept")


def keep(leaf: Path, key: str, *, instead: bool = False) -> None:
    """Give a finished leaf its second name, unless the key has a result there.

    With `instead` the leaf takes the place of that result, which is set aside under another name.

    Where links cannot be made (`work` and `results` on two file systems) there is none: a copy
    would take the space of every result twice.
    """
    place = KEPT / key
    if place.exists() and not instead:
        return
    beside = KEPT / f"{key}.{socket.gethostname()}-{os.getpid()}"
    KEPT.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(leaf, beside, copy_function=os.link)
        if place.exists():
            place.rename(_free_name(place))
        beside.rename(place)
    except OSError:
        shutil.rmtree(beside, ignore_errors=True)


def take(key: str, target: Path) -> None:
    """Put the result of a key into the folder `target`, which is replaced."""
    copy(KEPT / key, target)


def copy(source: Path, target: Path) -> None:
    """Make `target` another name of the folder `source`, or a copy where links cannot be made."""
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, target, copy_function=_link_or_copy)


def set_aside(leaf: Path, key: str | None, *, digests: Path) -> None:
    """Free a leaf's place: what it holds is on the shelf afterwards, whatever it is.

    Args:
        leaf: a folder, or a file that a user put in its place.
        key: the key in the leaf's manifest, None if it has none.
        digests: folder of remembered file digests.
    """
    place = KEPT / (key or f"unknown-{digest(str(leaf))[:8]}")
    while place.exists():
        if leaf.is_dir() and _holds(place, leaf, digests):
            shutil.rmtree(leaf)
            return
        place = place.with_name(place.name + "+")
    KEPT.mkdir(parents=True, exist_ok=True)
    shutil.move(leaf, place)


def _free_name(place: Path) -> Path:
    while place.exists():
        place = place.with_name(place.name + "+")
    return place


def _holds(place: Path, leaf: Path, digests: Path) -> bool:
    """Whether every file of `leaf`, stamps apart, is in `place` too."""
    for path in leaf.rglob("*"):
        if not path.is_file() or (path.name.startswith("key-") and not path.stat().st_size):
            continue
        twin = place / path.relative_to(leaf)
        if not twin.is_file():
            return False
        if not path.samefile(twin) and file_digest(path, digests) != file_digest(twin, digests):
            return False
    return True


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
