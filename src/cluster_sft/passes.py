"""Passes over a table of features that may be larger than memory, shared by threads.

The table is read in place, from memory or from the mapped file; no pass copies it. Threads divide
the rows (distances) or the columns (sums) of a pass, and neither division can change a bit of the
result, see `kernels`.

Legend: N rows, H features, K clusters, P = K rounded up to a multiple of kernels.TILE.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from cluster_sft import kernels
from cluster_sft.threads import available_threads

BLOCK_BYTES = 8 << 20  # of a block whose rows are used twice: it stays in the last-level cache
AHEAD_BYTES = 32 << 20  # read from a mapped file ahead of use
PIECE_ROWS = 256  # rows that are worth handing to a thread


class Table:
    """A table of features (N, H) and the threads that read it. Use as a context manager.

    Args:
        x: (N, H) float16, float32 or float64, in memory or memory-mapped.
        threads: how many; by default the processors that this process may use.
        block_rows: rows of a block in `blocks`; by default 8 MiB of them.
    """

    def __init__(
        self, x: NDArray[np.floating], *, threads: int | None = None, block_rows: int | None = None
    ) -> None:
        plain = np.asarray(x)
        view = plain.view(np.uint16) if plain.dtype == np.float16 else plain.view()
        view.flags.writeable = False  # one compiled variant for arrays and read-only maps
        self.x = view
        self.n_rows, self.width = view.shape
        self.threads = threads or available_threads()
        self._block_rows = block_rows or max(1, BLOCK_BYTES // max(1, view.itemsize * self.width))
        self._dtype = plain.dtype
        on_disk = getattr(x, "_mmap", None) is not None  # a copy of a np.memmap is one in name only
        self._mapped = on_disk and hasattr(mmap, "MADV_WILLNEED")
        self._ahead_rows = max(1, AHEAD_BYTES // max(1, view.itemsize * self.width))
        self._pool = ThreadPoolExecutor(self.threads)

    def __enter__(self) -> Table:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown()

    def blocks(self) -> Iterator[NDArray[np.int64]]:
        """Yield all rows in order, a block at a time."""
        return self._ahead(np.arange(self.n_rows), self._block_rows)

    def subset(self, rows: NDArray[np.int64]) -> Table:
        """Return a table of a copy of `rows` (ascending), with the same threads and blocks."""
        return Table(self.gather(rows), threads=self.threads, block_rows=self._block_rows)

    def gather(self, rows: NDArray[np.int64]) -> NDArray[np.floating]:
        """Return a copy of `rows` (ascending), in the table's own dtype."""
        if self._mapped:
            kernels.prefetch(self.x, rows, mmap.PAGESIZE)
        return self.x[rows].view(self._dtype)

    def square_norms(self, rows: NDArray[np.int64], out: NDArray[np.float64]) -> None:
        """Write the squared norms of `rows` into out (N,)."""
        self._share(
            rows.size, PIECE_ROWS, lambda a, b: kernels.square_norms(self.x, rows[a:b], out)
        )

    def square_distances(
        self,
        rows: NDArray[np.int64],
        norms: NDArray[np.float64],
        centers: NDArray[np.float64],
        out: NDArray[np.float64],
    ) -> None:
        """Write the squared distances of `rows` to centers (K, H) into out (N, K)."""
        n_clusters = len(centers)
        padded = np.zeros((-(-n_clusters // kernels.TILE) * kernels.TILE, self.width))
        padded[:n_clusters] = centers
        center_norms = np.einsum("kh,kh->k", centers, centers)
        for part in self._ahead(rows, self._ahead_rows if self._mapped else rows.size):
            self._share(
                part.size,
                PIECE_ROWS,
                lambda a, b, part=part: kernels.square_distances(
                    self.x, part[a:b], norms, padded, center_norms, out
                ),
            )

    def uncertain(
        self,
        cost: NDArray[np.float64],
        read_at: NDArray[np.int32],
        travel: NDArray[np.float64],
        prices: NDArray[np.float64],
        slack: float,
        labels: NDArray[np.int32],
    ) -> NDArray[np.int64]:
        """Return the rows whose label may be wrong, see `kernels.uncertain`; reads no features."""
        out = np.empty(self.n_rows, np.bool_)
        self._share(
            self.n_rows,
            4096,
            lambda a, b: kernels.uncertain(cost, read_at, travel, prices, slack, labels, a, b, out),
        )
        return np.flatnonzero(out)

    def move_rows(
        self,
        rows: NDArray[np.int64],
        source: NDArray[np.int32],
        target: NDArray[np.int32],
        sums: NDArray[np.float64],
    ) -> None:
        """Move each row's values from the sum of its source (-1: none) to that of its target."""
        piece = 64 * -(-self.width // (64 * self.threads))  # a cache line belongs to one thread
        self._share(
            self.width,
            piece,
            lambda a, b: kernels.move_rows(self.x, rows, source, target, a, b, sums),
        )

    def _ahead(self, rows: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
        """Yield parts of `rows`; the rows that follow are on their way from the disk meanwhile."""
        size = max(1, size)
        asked = 0
        for low in range(0, rows.size, size):
            if self._mapped and low + size >= asked:
                reach = max(low + size, asked) + self._ahead_rows
                self._pool.submit(kernels.prefetch, self.x, rows[asked:reach], mmap.PAGESIZE)
                asked = reach
            yield rows[low : low + size]

    def _share(self, size: int, piece: int, work: Callable[[int, int], None]) -> None:
        """Run work(low, high) over a division of 0 .. size, at most 4 pieces a thread."""
        piece = max(piece, -(-size // (4 * self.threads)))
        if size <= piece or self.threads == 1:
            work(0, size)
            return
        bounds = [(low, min(low + piece, size)) for low in range(0, size, piece)]
        for done in [self._pool.submit(work, low, high) for low, high in bounds]:
            done.result()
