"""Step k-center of score: all rows in the order of greedy k-center on the embeddings.

First the row nearest the mean, then always the row farthest from those before it (Gonzalez, 1985),
ties to the lower row; the score is minus the place. Memory is O(N) beside the memory-mapped
embeddings, which are read in blocks.

One pass over the data serves several picks. Distances to the chosen rows only shrink, so of the
rows that are farthest at its start a pick is right as long as its distance, to the picks of this
pass too, exceeds that of every row outside: the order is that of one pick at a time.

Legend: N rows, H hidden size, C candidates of a pass, P picks of a pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from tqdm import tqdm

from cluster_sft import costs
from cluster_sft.artifacts import read_embeddings
from cluster_sft.clocks import Clock
from cluster_sft.errors import UserError
from cluster_sft.score_files import write_scored

if TYPE_CHECKING:
    from cluster_sft.params import Launch, Section

BLOCK_ROWS = 8192
CANDIDATES = 128  # looked at in a pass
SAVE_SECONDS = 60.0
STATE = "order.npz"


def run(params: Section, *, embeddings: Path, out: Path, scratch: Path, launch: Launch) -> None:
    """Order every embedded row; a killed run continues from the order it had saved.

    Raises:
        UserError: the embeddings are missing or damaged, or there are none.
    """
    meter = costs.start()
    rows_NH, samples = read_embeddings(embeddings)
    if not len(rows_NH):
        raise UserError(f"{embeddings}: embeddings.npy has no rows; there is nothing to order")
    clock = Clock(scratch / "seconds.json")
    order_N = greedy_order(rows_NH, scratch=scratch, on_save=clock.note)
    place_N = np.empty(len(order_N), np.int64)
    place_N[order_N] = np.arange(len(order_N))
    frame = pl.DataFrame({"id": samples["id"], "score": -place_N})
    write_scored(out, frame, meter=meter, earlier_seconds=clock.earlier)


def greedy_order(
    rows_NH: np.ndarray, *, scratch: Path, on_save: Callable[[], None] = lambda: None
) -> np.ndarray:
    """Return the rows' positions in greedy k-center order, int64 (N,).

    Args:
        rows_NH: float16 or float32, N at least 1.
        scratch: folder where the order so far is saved every minute.
        on_save: called then.
    """
    order, nearest_N = _resume(scratch, len(rows_NH))
    saved = time.monotonic()
    with tqdm(total=len(rows_NH), initial=len(order), desc="k-center", unit="row") as bar:
        while len(order) < len(rows_NH):
            picks = _picks(rows_NH, nearest_N) if order else [_nearest_mean(rows_NH)]
            _bring_near(rows_NH, nearest_N, picks)
            order += picks
            bar.update(len(picks))
            if time.monotonic() - saved >= SAVE_SECONDS:
                _save(scratch, order, nearest_N)
                on_save()
                saved = time.monotonic()
    return np.array(order, np.int64)


def _picks(rows_NH: np.ndarray, nearest_N: np.ndarray) -> list[int]:
    """Return the next picks, as many as one look at the farthest rows decides.

    `nearest_N` is each row's squared distance to the nearest row chosen, -1 for chosen ones.
    """
    count = min(CANDIDATES, len(nearest_N))
    rows_C = np.argpartition(-nearest_N, count - 1)[:count]
    least = nearest_N[rows_C].min()
    # Whoever ties with the last candidate may stand outside, at a lower row.
    rows_C = np.sort(rows_C[nearest_N[rows_C] > least])
    if not len(rows_C):
        return [int(nearest_N.argmax())]
    vectors_CH = np.asarray(rows_NH[rows_C], np.float32)
    distance_C = nearest_N[rows_C].copy()
    picks = []
    while distance_C.max() > least:
        best = int(distance_C.argmax())
        picks.append(int(rows_C[best]))
        distance_C = np.minimum(distance_C, _squared(vectors_CH, vectors_CH[best : best + 1])[:, 0])
        distance_C[best] = -1
    return picks


def _bring_near(rows_NH: np.ndarray, nearest_N: np.ndarray, picks: list[int]) -> None:
    """Lower every row's squared distance to the nearest chosen row by the new picks."""
    vectors_PH = np.asarray(rows_NH[picks], np.float32)
    for start, block in _blocks(rows_NH):
        distance = _squared(block, vectors_PH).min(axis=1)
        part = nearest_N[start : start + len(block)]
        np.minimum(part, distance, out=part)
    nearest_N[picks] = -1


def _squared(rows_BH: np.ndarray, others_PH: np.ndarray) -> np.ndarray:
    """Return squared Euclidean distances (B, P), float32, at least 0."""
    norms_B, norms_P = (np.einsum("bh,bh->b", x, x) for x in (rows_BH, others_PH))
    squared = norms_B[:, None] + norms_P - 2 * (rows_BH @ others_PH.T)
    return np.maximum(squared, 0)


def _nearest_mean(rows_NH: np.ndarray) -> int:
    total_H = np.zeros(rows_NH.shape[1])
    for _, block in _blocks(rows_NH):
        total_H += block.sum(axis=0, dtype=np.float64)
    mean_H = (total_H / len(rows_NH)).astype(np.float32)
    parts = [_squared(block, mean_H[None])[:, 0] for _, block in _blocks(rows_NH)]
    return int(np.concatenate(parts).argmin())


def _blocks(rows_NH: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, len(rows_NH), BLOCK_ROWS):
        yield start, np.asarray(rows_NH[start : start + BLOCK_ROWS], np.float32)


def _save(scratch: Path, order: list[int], nearest_N: np.ndarray) -> None:
    partial = scratch / "order.partial.npz"
    np.savez(partial, order=np.array(order, np.int64), nearest=nearest_N)
    partial.rename(scratch / STATE)


def _resume(scratch: Path, rows: int) -> tuple[list[int], np.ndarray]:
    """Return the order of an interrupted run and its distances, or an empty one."""
    if not (scratch / STATE).is_file():
        return [], np.full(rows, np.inf, np.float32)
    with np.load(scratch / STATE) as state:
        return state["order"].tolist(), state["nearest"]
