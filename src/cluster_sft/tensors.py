"""Passes over a table of features that lies in a torch tensor, on a GPU that holds it.

The same passes as `passes.Table`, so that the same iteration runs on either; products and sums are
float64, and labels equal those of the CPU up to rounding. Costs, labels and prices stay on the
host, where the assignment is solved.

Legend: N rows, H features, K clusters, R rows of a part.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from cluster_sft.passes import Table

PART_BYTES = 256 << 20  # of the float64 copy of a part


class TensorTable(Table):
    """A table of features (N, H) in a torch tensor of any floating dtype. A context manager.

    Args:
        x: (N, H), on any device; read in place.
        threads: of the work on the host, see `Table`.
        block_rows: rows of a part; by default 256 MiB of them in float64.
    """

    def __init__(
        self, x: torch.Tensor, *, threads: int | None = None, block_rows: int | None = None
    ) -> None:
        width = x.shape[1]
        rows = block_rows or max(1, PART_BYTES // (8 * width))
        # The shape, on no memory: what the passes inherited from Table need to know of x.
        shape = np.broadcast_to(np.zeros((), np.float32), (x.shape[0], width))
        super().__init__(shape, threads=threads, block_rows=rows)
        self.tensor = x.detach()

    def subset(self, rows: NDArray[np.int64]) -> TensorTable:
        """Return a table of a copy of `rows`, on the same device."""
        index = torch.from_numpy(rows).to(self.tensor.device)
        return TensorTable(self.tensor[index], threads=self.threads, block_rows=self._block_rows)

    def gather(self, rows: NDArray[np.int64]) -> NDArray[np.floating]:
        """Return a copy of `rows` on the host, float64."""
        return self._values(rows).cpu().numpy()

    def square_norms(self, rows: NDArray[np.int64], out: NDArray[np.float64]) -> None:
        """Write the squared norms of `rows` into out (N,)."""
        for part in self._ahead(rows, self._block_rows):
            out[part] = self._values(part).square().sum(dim=1).cpu().numpy()

    def square_distances(
        self,
        rows: NDArray[np.int64],
        norms: NDArray[np.float64],
        centers: NDArray[np.float64],
        out: NDArray[np.float64],
    ) -> None:
        """Write the squared distances of `rows` to centers (K, H) into out (N, K)."""
        center_norms = np.einsum("kh,kh->k", centers, centers)
        columns = torch.from_numpy(np.ascontiguousarray(centers)).to(self.tensor.device).T
        for part in self._ahead(rows, self._block_rows):
            products = (self._values(part) @ columns).cpu().numpy()
            out[part] = np.maximum(norms[part, None] + center_norms - 2 * products, 0)

    def move_rows(
        self,
        rows: NDArray[np.int64],
        source: NDArray[np.int32],
        target: NDArray[np.int32],
        sums: NDArray[np.float64],
    ) -> None:
        """Move each row's values from the sum of its source (-1: none) to that of its target."""
        clusters = np.arange(len(sums))
        for low in range(0, rows.size, self._block_rows):
            part = slice(low, low + self._block_rows)
            change = (target[part] == clusters[:, None]).astype(np.float64)
            change -= source[part] == clusters[:, None]
            share = torch.from_numpy(change).to(self.tensor.device)
            sums += (share @ self._values(rows[part])).cpu().numpy()

    def _values(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """Return rows as float64; rows in one piece are read without a gather."""
        if rows.size and rows[-1] - rows[0] == rows.size - 1 and (np.diff(rows) == 1).all():
            return self.tensor[int(rows[0]) : int(rows[-1]) + 1].to(torch.float64)
        index = torch.from_numpy(np.ascontiguousarray(rows)).to(self.tensor.device)
        return self.tensor[index].to(torch.float64)
