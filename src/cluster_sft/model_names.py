"""What a model's name stands for: a directory, a Hub id or `pypi:PACKAGE`. Free of torch."""

from __future__ import annotations

import os
from pathlib import Path

from cluster_sft.errors import UserError

PYPI = "pypi:"


def model_folder(name: str, *, key: str = "model") -> Path | None:
    """Return the directory that a model's name stands for; None for a Hub id or a package.

    Args:
        name: of the model.
        key: of params.yaml that gives it, for messages.

    Raises:
        UserError: it can only be a directory, and there is none.
    """
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return path
    # A Hub id is "model" or "owner/model"; anything longer or rooted can only be a path.
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(
            f"{key} {name!r}: no such directory; give a model directory, a Hub id (owner/model) "
            "or pypi:PACKAGE"
        )
    return None
