"""Partial results of N rows: memory-mapped arrays that processes share and a kill survives.

Legend: N rows, B rows of a batch.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cluster_sft.artifacts import create_array

FLUSH_SECONDS = 2.0
COPY_ROWS = 4096
DONE = "done"


@dataclass(frozen=True, slots=True)
class Results:
    """Arrays of N rows in a scratch folder, one file each, shared by processes.

    Attributes:
        arrays: by name, in the order of a batch's outputs.
        done: (N,) uint8, 1 once a row's results are on disk.
    """

    folder: Path
    arrays: dict[str, np.memmap]
    done: np.memmap

    @classmethod
    def create(cls, folder: Path, arrays: Mapping[str, tuple[tuple[int, ...], type]]) -> Results:
        """Open the arrays of an earlier, interrupted run, or create them.

        Args:
            folder: where they are.
            arrays: shape, rows first, and dtype of each, in the order of a batch's outputs.
        """
        rows = next(iter(arrays.values()))[0][0]
        wanted = {**arrays, DONE: ((rows,), np.uint8)}
        if not all((folder / f"{name}.npy").is_file() for name in wanted):
            (folder / f"{DONE}.npy").unlink(missing_ok=True)
            for name, (shape, dtype) in wanted.items():
                target = folder / f"{name}.npy"
                partial = target.with_suffix(".partial")
                create_array(partial, shape, dtype)
                partial.rename(target)
        return cls.open(folder, list(arrays))

    @classmethod
    def open(cls, folder: Path, names: Sequence[str]) -> Results:
        """Open the arrays for writing."""
        arrays = {n: np.load(folder / f"{n}.npy", mmap_mode="r+") for n in (*names, DONE)}
        return cls(folder, {n: arrays[n] for n in names}, arrays[DONE])

    def __getitem__(self, name: str) -> np.memmap:
        return self.arrays[name]

    def flush(self, rows: Sequence[np.ndarray]) -> None:
        """Bring all that was written to disk, and only then mark `rows` done."""
        for array in self.arrays.values():
            array.flush()
        for some in rows:
            self.done[some] = 1
        self.done.flush()

    def move(self, name: str, kept: np.ndarray, target: Path) -> None:
        """Make `target` the array's rows at positions `kept`; moved if these are all."""
        source = self.arrays[name]
        if len(kept) == len(source):
            shutil.move(self.folder / f"{name}.npy", target)
            return
        array = create_array(target, (len(kept), *source.shape[1:]), source.dtype)
        for start in range(0, len(kept), COPY_ROWS):
            array[start : start + COPY_ROWS] = source[kept[start : start + COPY_ROWS]]
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
        for array, values in zip(self.results.arrays.values(), outputs, strict=True):
            array[rows] = values.numpy()
        self.unmarked.append(rows)
        if time.monotonic() - self.flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Mark what was written since the last flush."""
        self.results.flush(self.unmarked)
        self.unmarked = []
        self.flushed = time.monotonic()
        self.on_flush()
