"""Digests of values, files and code: what cache keys are made of.

A code digest covers a module and every file of this package that it imports, parsed: comments,
layout and docstrings do not count. Registries whose members are chosen by name (strategies,
suites, scorers) count as their `__init__` alone; the caller names the member.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent
REGISTRIES = ("strategies", "suites", "scorers")
CHUNK = 1 << 22


def digest(value: Any) -> str:
    """Return the SHA-256 (hex) of a JSON value, independent of the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def bytes_digest(path: Path) -> str:
    """Return the SHA-256 (hex) of a file's bytes."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            sha.update(chunk)
    return sha.hexdigest()


def sampled_bytes_digest(path: Path) -> str:
    """Return the SHA-256 (hex) of a large file's size, its first and last MiB, and samples.

    16 KiB of every 4 MiB count, so that a changed matrix is seen wherever it lies.
    """
    size = path.stat().st_size
    sha = hashlib.sha256(str(size).encode())
    ends = [(0, 1 << 20), (max(0, size - (1 << 20)), 1 << 20)]
    with path.open("rb") as file:
        for start, length in [*ends, *((s, 1 << 14) for s in range(0, size, 4 << 20))]:
            file.seek(start)
            sha.update(file.read(length))
    return sha.hexdigest()


def file_digest(path: Path, cache: Path, of: Callable[[Path], str] = bytes_digest) -> str:
    """Return `of(path)`, remembered in the folder `cache` by path, size and times."""
    stat = path.stat()
    name = hashlib.sha256(f"{of.__name__} {path.resolve()}".encode()).hexdigest()[:32]
    mark = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
    entry = cache / name
    try:
        known, found = entry.read_text().split("\n")
        if known == mark:
            return found
    except (OSError, ValueError):
        pass
    found = of(path)
    if stat.st_size >= CHUNK and cache.parent.is_dir():  # small files are hashed faster
        cache.mkdir(parents=True, exist_ok=True)
        beside = cache / f"{name}.{socket.gethostname()}-{os.getpid()}"
        beside.write_text(f"{mark}\n{found}")
        beside.replace(entry)
    return found


def tree_digest(root: Path, cache: Path) -> str:
    """Return the digest of a folder's relative file names and bytes."""
    files = sorted(p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return digest({p.relative_to(root).as_posix(): file_digest(p, cache) for p in files})


def sampled_digest(root: Path, cache: Path) -> str:
    """Return a digest of a model directory: small files whole, those above 64 MiB by samples.

    A planning step must not read tens of gigabytes of weights.
    """
    found = {}
    for path in sorted(p for p in root.iterdir() if p.is_file()):
        large = path.stat().st_size > 64 << 20
        found[path.name] = file_digest(path, cache, sampled_bytes_digest if large else bytes_digest)
    return digest(found)


def code_digest(modules: Iterable[str]) -> str:
    """Return the digest of the parsed source of `modules` and of what they import here."""
    files = closure(modules)
    return digest({p.relative_to(PACKAGE).as_posix(): _source(p).digest for p in files})


def closure(modules: Iterable[str]) -> list[Path]:
    """Return the package's files that `modules` (dotted, below the package) import, sorted."""
    todo, seen = [p for m in modules if (p := _locate(m))], set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        folder = path.parent.relative_to(PACKAGE)
        if path.name == "__init__.py" and path.parent != PACKAGE and str(folder) not in REGISTRIES:
            todo += path.parent.glob("*.py")
        todo += [p for m in _source(path).imports if (p := _locate(m))]
    return sorted(seen)


def _locate(module: str) -> Path | None:
    """Return the file of a dotted module below the package; None for a mere name in a module."""
    base = PACKAGE.joinpath(*module.replace("-", "_").split("."))
    for path in (base.with_name(base.name + ".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


@dataclass(frozen=True)
class _Source:
    """What counts of a file of the package: the digest of its code, the names that it imports."""

    digest: str
    imports: tuple[str, ...]


def _source(path: Path) -> _Source:
    return _parsed(path, path.stat().st_mtime_ns)


@functools.cache
def _parsed(path: Path, mtime_ns: int) -> _Source:
    tree = ast.parse(path.read_bytes(), filename=str(path))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [s for s in body if not _inert(s)] or [ast.Pass()]  # type: ignore[attr-defined]
    return _Source(hashlib.sha256(ast.dump(tree).encode()).hexdigest(), tuple(_imports(tree)))


def _inert(statement: ast.stmt) -> bool:
    """Whether a statement cannot change a result: a docstring, an `if TYPE_CHECKING:` block."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names, below the package, that a file imports anywhere in it."""
    head = PACKAGE.name + "."
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
        else:
            continue
        yield from (n.removeprefix(head) for n in names if n.startswith(head))
