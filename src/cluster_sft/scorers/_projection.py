"""A random projection that is the same on every machine: a Rademacher matrix from a counter.

The sign in row d and column j is a bit of a hash of (seed, d, j), so that any part of the matrix
can be made anywhere, in any order; it is never stored. The hash is the finaliser of SplitMix64
(Steele, Lea and Flood, 2014), in wrapping 64-bit integers, which torch has on every device.

Legend: D features, k columns, B vectors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

# Entries of the matrix that exist at once: on a CPU they stay in its cache.
BLOCK_ENTRIES = {"cpu": 1 << 20, "cuda": 1 << 27}
WORD_BITS = 64
_BITS = (1 << WORD_BITS) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))

Transform = Callable[[Tensor, slice], Tensor]


def project(
    vectors: Tensor,
    *,
    columns: int,
    seed: int,
    transform: Transform | None = None,
    block_rows: int | None = None,
) -> Tensor:
    """Return x R / sqrt(k) for every vector x, with R in {-1, +1}^(D x k).

    Inner products are kept up to a standard deviation of about |x| |y| / sqrt(k) (Johnson and
    Lindenstrauss, 1984; Achlioptas, 2003).

    Args:
        vectors: (B, D) float32.
        columns: k.
        seed: of R.
        transform: applied to `vectors[:, part]`, given with `part`, before it is projected.
        block_rows: rows of R that exist at once; changes rounding alone.

    Returns:
        (B, k) float64; block sums are float32, their total is float64.
    """
    size = vectors.shape[1]
    entries = BLOCK_ENTRIES.get(vectors.device.type, BLOCK_ENTRIES["cuda"])
    step = block_rows or max(1, entries // columns)
    total = vectors.new_zeros((len(vectors), columns), dtype=torch.float64)
    for start in range(0, size, step):
        part = slice(start, min(start + step, size))
        block = vectors[:, part]
        if transform is not None:
            block = transform(block, part)
        total += block @ signs(part, columns=columns, seed=seed, device=vectors.device)
    return total / columns**0.5


def signs(rows: slice, *, columns: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Return rows of R, (rows, k) float32 of -1 and +1.

    Columns j are the bits of words of 64, lowest first; word w of row d is the hash of
    hash(hash(seed) + d G) + (w + 1) G, with G the 64-bit golden ratio.
    """
    row = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=device)
    word = torch.arange(1, -(-columns // WORD_BITS) + 1, dtype=torch.int64, device=device)
    key = _mix(row * _signed(_GOLDEN) + _seed_key(seed))
    words = _mix(key[:, None] + word * _signed(_GOLDEN))
    # A table of the eight signs of a byte: eight times fewer operations than bit by bit.
    byte = torch.arange(256, dtype=torch.int64, device=device)[:, None]
    table = ((byte >> torch.arange(8, device=device)) & 1).float() * 2 - 1
    found = functional.embedding(words.view(torch.uint8).int(), table)
    return found.flatten(1)[:, :columns]


def _mix(x: Tensor) -> Tensor:
    """Return SplitMix64's finaliser of every element, as signed integers."""
    for shift, factor in _MIX:
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Return x shifted to the right, filled with zeros; torch's own shift repeats the sign."""
    return (x >> bits) & ((1 << (WORD_BITS - bits)) - 1)


def _seed_key(seed: int) -> int:
    return int(_mix(torch.tensor(_signed(seed + _GOLDEN))))


def _signed(value: int) -> int:
    """Return the signed integer with the same 64 lowest bits."""
    value &= _BITS
    return value - (1 << WORD_BITS) if value >> (WORD_BITS - 1) else value
