"""Partial results of stage embed: memory-mapped arrays that processes share and a kill survives.

Legend: N rows, H hidden size, B rows of a batch.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cluster_sft.artifacts import create_array

FLUSH_SECONDS = 2.0
COPY_ROWS = 4096
ARRAYS: dict[str, tuple[int, type]] = {  # dimensions and dtype, in the order of a batch's outputs
    "embeddings": (2, np.float16),
    "n_tokens": (1, np.int32),
    "nll": (1, np.float32),
    "norm": (1, np.float32),
    "done": (1, np.uint8),
}


@dataclass(frozen=True, slots=True)
class Results:
    """Partial results of N rows: memory-mapped arrays in the scratch folder, shared by processes.

    Attributes:
        embeddings: (N, H) float16, unit rows.
        n_tokens: (N,) int32.
        nll: (N,) float32, nats per supervised token.
        norm: (N,) float32, ||g(x)||.
        done: (N,) uint8, 1 once a row's results are on disk.
    """

    folder: Path
    embeddings: np.memmap
    n_tokens: np.memmap
    nll: np.memmap
    norm: np.memmap
    done: np.memmap

    @classmethod
    def create(cls, folder: Path, *, rows: int, width: int) -> Results:
        """Open the arrays of an earlier, interrupted run, or create them."""
        if not all((folder / f"{name}.npy").is_file() for name in ARRAYS):
            (folder / "done.npy").unlink(missing_ok=True)
            for name, (ndim, dtype) in ARRAYS.items():
                target = folder / f"{name}.npy"
                partial = target.with_suffix(".partial")
                create_array(partial, (rows, width)[:ndim], dtype)
                partial.rename(target)
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> Results:
        """Open the arrays for writing."""
        return cls(folder, *(np.load(folder / f"{name}.npy", mmap_mode="r+") for name in ARRAYS))

    def flush(self, rows: Sequence[np.ndarray]) -> None:
        """Bring all that was written to disk, and only then mark `rows` done."""
        for array in (self.embeddings, self.n_tokens, self.nll, self.norm):
            array.flush()
        for some in rows:
            self.done[some] = 1
        self.done.flush()

    def move_embeddings(self, kept: np.ndarray, target: Path) -> None:
        """Make `target` the array of the rows at positions `kept`; moved if these are all."""
        if len(kept) == len(self.embeddings):
            shutil.move(self.folder / "embeddings.npy", target)
            return
        array = create_array(target, (len(kept), self.embeddings.shape[1]), np.float16)
        for start in range(0, len(kept), COPY_ROWS):
            array[start : start + COPY_ROWS] = self.embeddings[kept[start : start + COPY_ROWS]]
        array.flush()


class Writer:
    """Writes finished batches, in a thread beside the one that runs the model."""

    def __init__(self, results: Results, on_flush: Callable[[], None]) -> None:
        self.results = results
        self.on_flush = on_flush
        self.unmarked: list[np.ndarray] = []
        self.flushed = time.monotonic()

    def write(
        self, rows: np.ndarray, outputs: tuple[Tensor, ...], copied: torch.cuda.Event | None
    ) -> None:
        """Store one batch; `copied` is the CUDA event after which `outputs` are on the host."""
        if copied is not None:
            copied.synchronize()
        for name, values in zip(ARRAYS, outputs, strict=False):
            getattr(self.results, name)[rows] = values.numpy()
        self.unmarked.append(rows)
        if time.monotonic() - self.flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Mark what was written since the last flush."""
        self.results.flush(self.unmarked)
        self.unmarked = []
        self.flushed = time.monotonic()
        self.on_flush()
