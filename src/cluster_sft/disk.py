"""What a disk refuses, and what a failed run would leave on it."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster_sft.claims import FILES
from cluster_sft.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
REFUSED = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EMFILE, errno.EIO),
)


@contextmanager
def user_errors(leaf: Path) -> Iterator[None]:
    """Turn what the disk refuses into the one line a user can act on."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise UserError(
                f"{leaf}: the disk is full, so nothing was written there; free space "
                "(`cluster-sft gc` lists what can go) and run it again"
            ) from error
        if error.errno in REFUSED:
            raise UserError(
                f"{error.filename or leaf}: cannot be used ({error.strerror}); choose another "
                "place, or mend its permissions"
            ) from error
        raise


@contextmanager
def no_new_folders(leaf: Path) -> Iterator[None]:
    """Remove the folders made above a leaf if nothing came of it."""
    above = [p for p in leaf.parents if not p.exists()]
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # the first that is not empty, or was never made
            for folder in above:
                folder.rmdir()
        raise


def empty(scratch: Path) -> None:
    """Remove what a claimed scratch folder holds; the claim removes the folder."""
    for path in scratch.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in FILES:
            path.unlink()
