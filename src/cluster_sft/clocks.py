"""Seconds of a job's work that a kill survives: a resumed job then states what all of it took."""

from __future__ import annotations

import time
from pathlib import Path

from cluster_sft.artifacts import read_json, replace_json


class Clock:
    """Goes on from what an interrupted run had noted.

    Args:
        path: of the note, in a folder that survives a kill.

    Attributes:
        earlier: seconds of interrupted runs, up to the last results that they kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.earlier: float = read_json(path)["seconds"] if path.is_file() else 0.0
        self._started = time.perf_counter()

    def note(self) -> None:
        """Write down the seconds so far; called when results have been kept."""
        seconds = self.earlier + time.perf_counter() - self._started
        replace_json(self.path, {"seconds": seconds})
