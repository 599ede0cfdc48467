"""Make a leaf hold the result of its node: reuse, restore, or compute beside and swap in.

No result is ever overwritten: each has a second name on the shelf (see shelf.py), from where going
back to an old value restores it. A leaf is complete if and only if its manifest exists, which is
written after the payload; a leaf is *whole* if its payload has the digests of the manifest.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cluster_sft import disk, shelf
from cluster_sft.artifacts import MANIFEST, read_json, write_json
from cluster_sft.claims import claimed
from cluster_sft.digests import digest, file_digest
from cluster_sft.errors import UserError
from cluster_sft.nodes import CACHE, Node, content_digest, stamp_name
from cluster_sft.params import Section
from cluster_sft.stages import ROOT

WORK = Path("work")
SCHEMA = 1

Compute = Callable[[Node, Path, Path], None]  # (node, out, scratch)


def make(node: Node, compute: Compute, *, workspace: bool = True, fresh: bool = False) -> str:
    """Make `node.leaf` hold the node's result; return reused, restored or computed.

    Args:
        node: what to make.
        compute: writes the payload into the empty folder `out`; `scratch` survives a kill.
        workspace: whether kept results and leaves of equal key elsewhere are looked for; False for
            a stage that runs on its own with an `--out` of any kind.
        fresh: compute even if the result exists; that one is set aside.

    Raises:
        UserError: an upstream leaf is missing or damaged, the disk is full, or the stage's own.
    """
    leaf = Path(node.leaf)
    inputs = {role: input_digest(parent) for role, parent in node.inputs.items()}
    with disk.user_errors(leaf):
        if not fresh and is_whole(leaf, node.key, inputs):
            _renew_stamp(leaf, node.key)
            if workspace:
                shelf.keep(leaf, node.key)
            return "reused"
        if not workspace:
            _check_free(leaf)
    partial = _partial(leaf, node.key)
    home = WORK / node.key if workspace else partial.with_suffix(".scratch")
    with disk.user_errors(leaf), disk.no_new_folders(leaf), claimed(home) as scratch:
        if not fresh and is_whole(leaf, node.key, inputs):  # made by another process meanwhile
            outcome = "reused"
        elif not fresh and _restore(node, leaf, partial, inputs, workspace):
            outcome = "restored"
            _swap_in(partial, leaf)
        else:
            outcome = "computed"
            try:
                _compute(node, compute, partial, scratch, inputs)
            except (UserError, OSError):
                if not workspace:  # what a kill leaves is resumed from; an error would recur
                    disk.empty(scratch)
                raise
            _swap_in(partial, leaf)
        if workspace:
            shelf.keep(leaf, node.key, instead=fresh)
        with contextlib.suppress(OSError):  # the result is there; a file server may keep open files
            disk.empty(scratch)
    return outcome


def _check_free(leaf: Path) -> None:
    if leaf.exists() and (not leaf.is_dir() or any(leaf.iterdir())):
        raise UserError(
            f"--out {leaf}: holds another result or other files, and nothing is ever overwritten; "
            "choose another folder or remove it"
        )


def _compute(
    node: Node, compute: Compute, partial: Path, scratch: Path, inputs: dict[str, str]
) -> None:
    """Compute the payload into `partial` and seal it; nothing is left of it if that fails."""
    shutil.rmtree(partial, ignore_errors=True)
    _make_folder(partial)
    try:
        before = {role: content_digest(path) for role, path in node.files.items()}
        compute(node, partial, scratch)
        _check_unchanged(node, before)
        _seal(node, partial, inputs, before)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_unchanged(node: Node, files: dict[str, str]) -> None:
    """Check that nothing was replaced while it was read: the result would have the wrong key.

    Raises:
        UserError: an upstream leaf or a file is another one than before.
    """
    changed = [n.leaf for n in node.inputs.values() if _key_of(Path(n.leaf)) != n.key]
    changed += [str(p) for role, p in node.files.items() if content_digest(p) != files[role]]
    if changed:
        raise UserError(
            f"{node.leaf}: {changed[0]} changed while it was read, so the result may be of both; "
            "nothing was written: run it again"
        )


def input_digest(node: Node) -> str:
    """Return the digest of an upstream leaf's payload, after checking that it is whole.

    Raises:
        UserError: it is missing, of another key, or its payload was truncated or altered.
    """
    leaf = Path(node.leaf)
    if not (leaf / MANIFEST).is_file():
        raise UserError(
            f"{leaf}: not there, but needed; make it first: cluster-sft run {leaf}, with the same "
            "--params"
        )
    manifest = read_json(leaf / MANIFEST)
    if (found := _key_of(leaf)) != node.key:
        raise UserError(
            f"{leaf}: made with other parameters, data or code (key "
            f"{found[:12]}, wanted {node.key[:12]}); make it anew: cluster-sft run {leaf}"
        )
    if fault := damage(leaf, manifest):
        raise UserError(f"{leaf}: {fault}; remove the folder and run it again: it is made anew")
    return digest(_payload(leaf, manifest))


def _key_of(leaf: Path) -> str:
    """Return the key of a complete leaf; of one made by hand, without a key, one from its files."""
    manifest = read_json(leaf / MANIFEST)
    return str(manifest.get("key") or digest(_payload(leaf, manifest)))


def _payload(leaf: Path, manifest: dict[str, Any]) -> dict[str, str]:
    """Return the digests of a leaf's files: as listed, or as they are where nothing is listed."""
    if "payload" in manifest:
        return manifest["payload"]
    files = (p for p in sorted(leaf.rglob("*")) if p.is_file() and p.name != MANIFEST)
    return {p.relative_to(leaf).as_posix(): file_digest(p, CACHE) for p in files}


def damage(leaf: Path, manifest: dict[str, Any]) -> str | None:
    """Return what is wrong with a leaf's payload against its manifest, None if nothing is."""
    payload = _payload(leaf, manifest)
    if not isinstance(payload, dict):
        return f"{MANIFEST} lists no payload"
    for name, wanted in payload.items():
        path = leaf / name
        if not path.is_file():
            return f"{name} is missing"
        if file_digest(path, CACHE) != wanted:
            return f"{name} was truncated or altered after it was written"
    return None


def is_whole(leaf: Path, key: str, inputs: dict[str, str]) -> bool:
    """Whether a leaf holds the result with this key, made of these inputs, undamaged."""
    try:
        manifest = json.loads((leaf / MANIFEST).read_text())
        same = manifest["key"] == key and manifest["inputs"] == inputs
        return same and damage(leaf, manifest) is None
    except (OSError, ValueError, KeyError, TypeError):
        return False


def leaf_key(leaf: Path) -> str | None:
    """Return the key in a leaf's manifest, None if it has none."""
    try:
        return str(json.loads((leaf / MANIFEST).read_text())["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def load_node(leaf: Path, stage: str) -> Node:
    """Return the node of an existing leaf from its manifest, for a stage that runs on its own.

    A leaf that another program made may have a manifest that says less, or just `{}`.

    Raises:
        UserError: the folder is no complete leaf of that stage.
    """
    if not (leaf / MANIFEST).is_file():
        raise UserError(f"{leaf}: no complete {stage} leaf there (it has no {MANIFEST})")
    manifest = read_json(leaf / MANIFEST)
    if (found := manifest.get("stage", stage)) != stage:
        raise UserError(f"{leaf}: must be a leaf of {stage}, got one of {found}")
    return Node(stage, str(leaf), _key_of(leaf), Section(), identity=manifest.get("params") or {})


def size_of(folder: Path) -> int:
    """Return the bytes below a folder."""
    return sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file())


def leaves(root: Path) -> Iterator[Path]:
    """Yield every complete leaf below `root`."""
    for path in sorted(root.rglob(MANIFEST)):
        if not any(part.startswith(".") for part in path.parts):
            yield path.parent


def _seal(node: Node, out: Path, inputs: dict[str, str], read: dict[str, str]) -> None:
    """Write the manifest, then the stamp: their presence says that all before them is there."""
    files = sorted(p for p in out.rglob("*") if p.is_file())
    write_json(
        out / MANIFEST,
        {
            "schema": SCHEMA,
            "stage": node.stage,
            "key": node.key,
            "params": node.identity,
            "inputs": inputs,
            "files": read,
            "code": node.code,
            "payload": {p.relative_to(out).as_posix(): file_digest(p, CACHE) for p in files},
        },
    )
    (out / stamp_name(node.key)).touch()


def _renew_stamp(leaf: Path, key: str) -> None:
    for old in leaf.glob("key-*"):
        if old.name != stamp_name(key):
            old.unlink()
    (leaf / stamp_name(key)).touch()


def _partial(leaf: Path, key: str) -> Path:
    """Return where a leaf is built: on its own file system, outside every tracked folder."""
    parts = leaf.parts
    if len(parts) > 2 and parts[0] == ROOT:
        return Path(ROOT, parts[1], ".partial", key)
    return leaf.with_name(f".{leaf.name}.{key[:12]}.partial")


def _restore(
    node: Node, leaf: Path, partial: Path, inputs: dict[str, str], workspace: bool
) -> bool:
    """Put an existing result of this key into `partial`, whole; False if there is none."""
    if is_whole(partial, node.key, inputs):
        return True
    if not workspace:
        return False
    if is_whole(shelf.KEPT / node.key, node.key, inputs):
        shelf.take(node.key, partial)
        return True
    for stamp in Path(*leaf.parts[:3]).rglob(stamp_name(node.key)):
        if stamp.parent != leaf and is_whole(stamp.parent, node.key, inputs):
            shelf.copy(stamp.parent, partial)
            return True
    return False


def _make_folder(partial: Path) -> None:
    """Make a folder beside those of other jobs, who remove the one above when theirs is done."""
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            return partial.mkdir(parents=True)
    partial.mkdir(parents=True)


def _swap_in(partial: Path, leaf: Path) -> None:
    """Rename the finished result to its leaf; what is there is set aside."""
    if leaf.is_dir() and not any(leaf.iterdir()):
        leaf.rmdir()
    if leaf.exists():
        shelf.set_aside(leaf, leaf_key(leaf), digests=CACHE)
    leaf.parent.mkdir(parents=True, exist_ok=True)
    partial.rename(leaf)
    if partial.parent.name == ".partial":
        with contextlib.suppress(OSError):  # another job's result is in it, or it went with that
            partial.parent.rmdir()


def say(message: str) -> None:
    """Tell the user on stderr."""
    print(message, file=sys.stderr, flush=True)
