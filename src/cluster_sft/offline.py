"""Whether the network may be used: compute nodes of a cluster often have none.

`launch.offline: true`, or HF_HUB_OFFLINE=1 in the environment, lets a run read only what
`cluster-sft fetch` brought before. Whatever is missing then is one error, which names the remedy.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from cluster_sft.errors import UserError

# The Hub's client, datasets and transformers read these when they are imported.
VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
TRUE = ("1", "ON", "YES", "TRUE")


class NotFetchedError(UserError):
    """Report what an offline run lacks and how to bring it.

    Attributes:
        what: the missing thing, without the remedy.
    """

    def __init__(self, what: str, files: Sequence[Path] = ()) -> None:
        self.what = what
        super().__init__(
            f"{what}, and this run is offline (launch.offline or HF_HUB_OFFLINE); where there is a "
            f"network run: {command(files)}"
        )


def command(files: Sequence[Path] = ()) -> str:
    """Return the command that fetches what parameter files need."""
    given = f" --params {shlex.join(map(str, files))}" if files else ""
    return f"cluster-sft fetch{given}"


def is_offline() -> bool:
    """Return whether the environment forbids the network, as the Hub's client reads it."""
    told = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return told.upper() in TRUE


def go_offline() -> None:
    """Forbid the network to this process and those that it starts; before libraries are loaded."""
    os.environ.update(dict.fromkeys(VARIABLES, "1"))


def is_absence(error: BaseException) -> bool:
    """Return whether an error of the Hub's client or of datasets says that offline data lack."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) or str(seen).startswith("Couldn't find cache for"):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
