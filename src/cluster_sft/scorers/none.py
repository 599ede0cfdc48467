"""Step of score for a strategy that needs no scores: only a summary that says so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cluster_sft import costs
from cluster_sft.artifacts import SUMMARY, write_json

if TYPE_CHECKING:
    from cluster_sft.params import Launch, Section


def run(params: Section, *, out: Path, scratch: Path, launch: Launch) -> None:
    """Write that nothing was scored and that it cost nothing."""
    meter = costs.start()
    write_json(out / SUMMARY, {"scored": 0, "excluded": {}, "cost": meter.stop(out)})
