"""Tokenised rows on disk, and the batches in which they are computed.

Rows are sorted by length and cut where a token budget is full or padding would reach 3 %. The plan
is a pure function of the lengths and the budget, so that neither the number of processes nor an
interruption changes what a batch holds.

Legend: N rows, B rows of a batch, T its longest row, M its supervised positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from cluster_sft.errors import UserError
from cluster_sft.heads import IGNORED

MAX_PADDING = 0.03
READ_ROWS = 1024
OFFSETS = "offsets.npy"  # written last: the store is whole if and only if it exists
COLUMNS = ("input_ids", "labels")
FLAT = ("input_ids.i32", "labels.i32")


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Rows by descending length, cut into batches.

    Attributes:
        order: (N,) int64, row positions, longest row first, ties by position.
        bounds: (n + 1,) int64; batch i holds `order[bounds[i]:bounds[i + 1]]`.
        padding: share of the computed positions that is padding.
    """

    order: np.ndarray
    bounds: np.ndarray
    padding: float

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def rows(self, batch: int) -> np.ndarray:
        """Return the row positions of a batch, int64 (B,)."""
        return self.order[self.bounds[batch] : self.bounds[batch + 1]]


def plan_batches(lengths: np.ndarray, batch_tokens: int) -> BatchPlan:
    """Cut rows, longest first, into batches of at most `batch_tokens` padded tokens.

    A batch ends where the budget is full or padding would reach `MAX_PADDING` of it. A row longer
    than the budget is a batch of its own.

    Args:
        lengths: int (N,), tokens of each row.
        batch_tokens: budget of rows times the longest row's tokens.
    """
    lengths = np.maximum(lengths, 1)
    order = np.argsort(-lengths, kind="stable")
    ends = np.concatenate([[0], np.cumsum(lengths[order])])
    bounds, area = [0], 0
    while (start := bounds[-1]) < len(order):
        width = int(lengths[order[start]])
        most = min(len(order) - start, max(1, batch_tokens // width))
        # Rows shrink along the order, so the share of padding only grows with the batch.
        full = np.arange(1, most + 1) * width
        padding = full - (ends[start + 1 : start + most + 1] - ends[start])
        count = max(1, int(np.searchsorted(padding / full, MAX_PADDING)))
        area += count * width
        bounds.append(start + count)
    return BatchPlan(
        order=order,
        bounds=np.asarray(bounds),
        padding=1 - int(ends[-1]) / area if area else 0.0,
    )


@dataclass(frozen=True, slots=True)
class TokenStore:
    """Token ids and labels of N rows as flat, memory-mapped arrays.

    Attributes:
        input_ids: int32 (all tokens,).
        labels: int32 (all tokens,), -100 where not supervised.
        offsets: int64 (N + 1,); row i holds `[offsets[i]:offsets[i + 1]]`.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    offsets: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 (N,)."""
        return np.diff(self.offsets)


def pack_tokens(dataset: Path, folder: Path) -> None:
    """Copy columns input_ids and labels of a Parquet file to flat files in `folder`, in blocks.

    A length-sorted batch needs rows from anywhere in the data, which Parquet does not give without
    reading it whole. A folder that an earlier call has filled is left as it is.

    Raises:
        UserError: the file is damaged, lacks a column, or a row's labels and tokens differ in
            number.
    """
    if _is_whole(folder):
        return
    lengths: list[np.ndarray] = []
    try:
        with (folder / FLAT[0]).open("wb") as ids, (folder / FLAT[1]).open("wb") as labels:
            for block in pq.ParquetFile(dataset).iter_batches(READ_ROWS, columns=list(COLUMNS)):
                counts = [block.column(name).value_lengths().to_numpy() for name in COLUMNS]
                if (wrong := counts[0] != counts[1]).any():
                    row = sum(map(len, lengths)) + int(wrong.argmax())
                    raise UserError(
                        f"{dataset}: row {row} must have as many labels as input_ids, got "
                        f"{counts[1][wrong][0]} and {counts[0][wrong][0]}; run prepare again"
                    )
                for file, name in ((ids, COLUMNS[0]), (labels, COLUMNS[1])):
                    file.write(block.column(name).flatten().cast(pa.int32()).to_numpy().tobytes())
                lengths.append(counts[0])
    except (pa.ArrowException, KeyError) as error:
        raise UserError(
            f"{dataset}: {' and '.join(COLUMNS)} cannot be read ({error}); run prepare again"
        ) from error
    _save_offsets(folder, np.concatenate([[0], *lengths]))


def write_tokens(rows: Iterable[tuple[np.ndarray, np.ndarray]], folder: Path) -> None:
    """Write rows that no Parquet file holds, as `pack_tokens` does.

    Args:
        rows: input_ids and labels of each, int (T,); not asked for if the folder is filled.
        folder: where to write.
    """
    if _is_whole(folder):
        return
    lengths = [0]
    with (folder / FLAT[0]).open("wb") as ids, (folder / FLAT[1]).open("wb") as labels:
        for row in rows:
            for file, values in zip((ids, labels), row, strict=True):
                file.write(np.asarray(values, np.int32).tobytes())
            lengths.append(len(row[0]))
    _save_offsets(folder, np.array(lengths))


def _is_whole(folder: Path) -> bool:
    """Say whether the folder, made here if it is missing, holds a token store."""
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / OFFSETS).is_file()


def _save_offsets(folder: Path, lengths: np.ndarray) -> None:
    np.save(folder / "offsets.partial.npy", np.cumsum(lengths, dtype=np.int64))
    (folder / "offsets.partial.npy").rename(folder / OFFSETS)


def open_tokens(folder: Path) -> TokenStore:
    """Open what `pack_tokens` wrote, memory-mapped."""
    offsets = np.load(folder / OFFSETS)
    input_ids, labels = (
        np.memmap(folder / name, dtype=np.int32, mode="r", shape=(offsets[-1],))
        if offsets[-1]
        else np.empty(0, np.int32)
        for name in FLAT
    )
    return TokenStore(input_ids, labels, offsets)


@dataclass(frozen=True, slots=True)
class Batch:
    """One right-padded batch and where it is supervised.

    Attributes:
        rows: int64 (B,) NumPy, row positions in the data.
        input_ids: int64 (B, T).
        attention_mask: int64 (B, T).
        positions: int64 (M,), flattened positions whose head input predicts a target, ascending.
        targets: int64 (M,).
        n_tokens: int64 (B,), positions of each row.
    """

    rows: np.ndarray
    input_ids: Tensor
    attention_mask: Tensor
    positions: Tensor
    targets: Tensor
    n_tokens: Tensor

    def to(self, device: torch.device) -> Batch:
        """Copy to `device`; from page-locked memory a copy to a GPU does not block."""
        return Batch(self.rows, *(x.to(device, non_blocking=True) for x in self._tensors()))

    def pin(self) -> Batch:
        """Move to page-locked memory."""
        return Batch(self.rows, *(x.pin_memory() for x in self._tensors()))

    def _tensors(self) -> tuple[Tensor, ...]:
        return (
            self.input_ids,
            self.attention_mask,
            self.positions,
            self.targets,
            self.n_tokens,
        )


def build_batch(store: TokenStore, rows: np.ndarray) -> Batch:
    """Read `rows` from the store and pad them on the right to the longest."""
    spans = [slice(store.offsets[i], store.offsets[i + 1]) for i in rows]
    width = max(1, *(span.stop - span.start for span in spans))
    input_ids = np.zeros((len(rows), width), np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    positions, targets, counts = [], [], []
    for i, span in enumerate(spans):
        length = span.stop - span.start
        input_ids[i, :length] = store.input_ids[span]
        mask[i, :length] = 1
        shifted = store.labels[span][1:]
        columns = np.flatnonzero(shifted != IGNORED)
        positions.append(columns + i * width)
        targets.append(shifted[columns])
        counts.append(len(columns))
    return Batch(
        rows,
        torch.from_numpy(input_ids),
        torch.from_numpy(mask),
        torch.from_numpy(np.concatenate(positions).astype(np.int64)),
        torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        torch.tensor(counts, dtype=torch.int64),
    )
