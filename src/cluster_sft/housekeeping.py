"""`ls` and `gc`: what lies in results/ and work/, what it belongs to, what it weighs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster_sft import plan
from cluster_sft.claims import is_claimed
from cluster_sft.params_files import typed
from cluster_sft.shelf import KEPT
from cluster_sft.stages import ROOT
from cluster_sft.store import WORK, leaf_key, leaves, say, size_of


def show(raw: Mapping[str, Any]) -> None:
    """Print every leaf: those of params.yaml, then orphans, then kept results."""
    wanted = {n.leaf: n for n in plan.ancestry(plan.target(raw)).values()}
    rows = [("state", "key", "size", "leaf")]
    for leaf, node in wanted.items():
        found = leaf_key(Path(leaf))
        state = {node.key: "ready", None: "missing"}.get(found, "stale")
        rows.append((state, node.key[:12], human_size(size_of(Path(leaf))), leaf))
    for state, folder in _surplus(raw, set(wanted)):
        rows.append(
            (state, (leaf_key(folder) or "-")[:12], human_size(size_of(folder)), str(folder))
        )
    widths = [max(len(r[i]) for r in rows) for i in range(3)]
    for state, key, size, leaf in rows:
        print(f"{state:<{widths[0]}}  {key:<{widths[1]}}  {size:>{widths[2]}}  {leaf}")


def collect(raw: Mapping[str, Any], *, ask: bool) -> None:
    """Delete orphans, kept results and scratch, after listing them and asking."""
    wanted = {n.leaf for n in plan.ancestry(plan.target(raw)).values()}
    surplus = _surplus(raw, wanted)
    if not surplus:
        print("nothing to delete: no kept results, orphans or scratch")
        return
    for state, folder in surplus:
        print(f"{state:<8}  {human_size(size_of(folder)):>9}  {folder}")
    total = human_size(sum(size_of(folder) for _, folder in surplus))
    if ask and not _agreed(f"delete these {len(surplus)} folders ({total})? [y/N] "):
        print("nothing was deleted")
        return
    for _, folder in surplus:
        shutil.rmtree(folder)
    say(f"deleted {len(surplus)} folders, {total}")


def _agreed(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _surplus(raw: Mapping[str, Any], wanted: set[str]) -> list[tuple[str, Path]]:
    """Return what params.yaml does not ask for: (orphan, kept or scratch; folder)."""
    results = Path(ROOT, typed(raw).name)
    found = [("orphan", leaf) for leaf in leaves(results) if str(leaf) not in wanted]
    current = {leaf_key(Path(leaf)) for leaf in wanted}  # on the shelf these are but second names
    found += [("kept", p) for p in sorted(KEPT.glob("*")) if p.name not in current]
    scratch = [*(results / ".partial").glob("*"), *(p for p in WORK.glob("*") if len(p.name) == 64)]
    return found + [("scratch", p) for p in sorted(scratch) if not is_claimed(WORK / p.name)]


def human_size(size: int) -> str:
    """Return a size in bytes as people read it, e.g. 269 MB."""
    value = float(size)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
