"""What a stage costs, measured by its own run: passes, tokens, seconds, memory and bytes stored."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Meter:
    """A clock that was started with the work."""

    started: float

    def stop(
        self,
        out: Path,
        *,
        forward_passes: int = 0,
        backward_passes: int = 0,
        tokens: int = 0,
        peak_memory_bytes: int | None = None,
        still_to_store: int = 0,
        earlier_seconds: float = 0.0,
    ) -> dict[str, float]:
        """Return the cost of the work, for the `cost` of its summary.json.

        Args:
            out: folder of the payload, whose files count as stored.
            forward_passes: rows that went through a model, counted once a pass.
            backward_passes: rows that a gradient was taken of, counted once a pass.
            tokens: of all forward passes, without padding.
            peak_memory_bytes: of the largest process; None for this one's.
            still_to_store: bytes that will join the payload after its summary.
            earlier_seconds: of work that is not this clock's: of interrupted runs.
        """
        peak = peak_resident_bytes() if peak_memory_bytes is None else peak_memory_bytes
        return {
            "forward_passes": forward_passes,
            "backward_passes": backward_passes,
            "tokens": tokens,
            "seconds": earlier_seconds + time.perf_counter() - self.started,
            "peak_memory_bytes": peak,
            "bytes_stored": still_to_store
            + sum(p.stat().st_size for p in out.rglob("*") if p.is_file()),
        }


def start() -> Meter:
    """Start measuring."""
    return Meter(time.perf_counter())


def peak_resident_bytes() -> int:
    """Return the most memory that this process has held resident, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
