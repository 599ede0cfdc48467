"""Environment variables: for the length of a block, and for children that run this package."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process, which its children inherit; restore them after the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def python_path() -> str:
    """Return the PYTHONPATH by which a child finds this package first, then what this one finds."""
    path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.pathsep.join(path)
