"""Tables of features to measure on: a mixture on the sphere, or real rows tiled with noise.

Rows are made in blocks from random numbers of their own, so that a table of any size is the same on
any machine and never held in memory whole.

Legend: N rows, H features.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks import measuring
from cluster_sft.artifacts import create_array

PARTS = 24
LARGEST = 0.6  # share of the first part; the others follow Zipf's law
SPREAD = 0.5  # length of a part's spread beside its unit mean, along its own few directions
DIRECTIONS = 64
DECAY = 1.4  # variance along the i-th falls as i^-DECAY, as measured on gradient proxies
NOISE = 0.3  # length of the noise in all dimensions on top
ROUND_NOISE = 0.6  # of a part without directions
TILE_NOISE = 0.1  # of a copied row, which has length 1
BLOCK = 4096

Block = NDArray[np.float32]


def mixture(path: Path, *, n_rows: int, width: int, is_round: bool = False) -> Path:
    """Write (N, H) float16 unit rows of a 24-part mixture to an .npy file, unless it is there.

    Parts spread along directions of their own, as embeddings do. `is_round` gives all directions
    the same spread instead: no way to split a part is then better than another.
    """
    tail = 1 / np.arange(1, PARTS)
    share = np.concatenate([[LARGEST], (1 - LARGEST) * tail / tail.sum()])
    means = _unit(np.random.default_rng([1]).standard_normal((PARTS, width), dtype=np.float32))

    length = np.arange(1, DIRECTIONS + 1) ** (-DECAY / 2)
    length *= SPREAD / np.linalg.norm(length)
    axes = _unit(
        np.random.default_rng([3]).standard_normal((PARTS, DIRECTIONS, width), dtype=np.float32)
    )
    axes *= 0 if is_round else length.astype(np.float32)[:, None]

    def block(rng: np.random.Generator, size: int) -> Block:
        rows = rng.standard_normal((size, width), dtype=np.float32)
        rows *= (ROUND_NOISE if is_round else NOISE) / np.sqrt(width)
        of_part = rng.choice(PARTS, size, p=share)
        along = rng.standard_normal((size, DIRECTIONS), dtype=np.float32)
        for part in np.unique(of_part):
            held = of_part == part
            rows[held] += means[part] + along[held] @ axes[part]
        return rows

    return _write(path, n_rows, width, block)


def tiled(path: Path, source: Path, *, n_rows: int) -> Path:
    """Write N unit rows, each a random row of the embeddings at `source` with noise on top."""
    rows = np.load(source).astype(np.float32)

    def block(rng: np.random.Generator, size: int) -> Block:
        noise = rng.standard_normal((size, rows.shape[1]), dtype=np.float32)
        noise *= TILE_NOISE / np.sqrt(rows.shape[1])
        noise += rows[rng.integers(0, len(rows), size)]
        return noise

    return _write(path, n_rows, rows.shape[1], block)


def check_room(folder: Path, size: int) -> None:
    """Raise SystemExit with one line unless `size` bytes and a tenth more fit into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < 1.1 * size:
        raise SystemExit(
            f"{folder}: {size / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free; "
            "give another folder with --scratch"
        )


def _write(
    path: Path, n_rows: int, width: int, make: Callable[[np.random.Generator, int], Block]
) -> Path:
    if path.is_file():
        return path
    check_room(path.parent, n_rows * width * 2)
    partial = path.with_suffix(".partial")
    array = create_array(partial, (n_rows, width), np.float16)

    def fill(low: int) -> int:
        size = min(BLOCK, n_rows - low)
        array[low : low + size] = _unit(make(np.random.default_rng([2, low]), size))
        return size

    with (
        ThreadPoolExecutor(measuring.processors()) as pool,
        tqdm(total=n_rows, desc=f"writing {path.name}", unit="row", unit_scale=True) as bar,
    ):
        for size in pool.map(fill, range(0, n_rows, BLOCK)):
            bar.update(size)
    array.flush()
    with partial.open("rb+") as file:
        os.fsync(file.fileno())
    return partial.rename(path)


def _unit(rows: Block) -> Block:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)
