"""Chunks of activations, and the positions that a proof covers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from verify.toploc.field import PRIME

CHUNK_ROWS = 32
"""Output tokens in a chunk; the last chunk of a rollout may have fewer."""
TOP_K = 128
MAGNITUDE = 0x7FFF
"""Mask of all bits of a bf16 except the sign."""
INFINITY = 0x7F80
_BLOCK_ELEMENTS = 1 << 20  # activations worked on at once: bounds memory, fills the caches
_BLOCK_CHUNKS = 32


@dataclass(frozen=True)
class Selection:
    """The largest activations of C chunks.

    `select` gives them in order of decreasing magnitude, then position; a sampler's device gives
    them in any order. In chunks with fewer than 128 elements only the first k count.
    """

    indices: np.ndarray
    """i64 [C, 128]: positions in the flattened chunk."""
    bits: np.ndarray
    """i64 [C, 128]: bf16 bits at those positions."""
    sizes: np.ndarray
    """i64 [C]: elements of each chunk."""

    @property
    def k(self) -> np.ndarray:
        """i64 [C]: number of positions that count, min(128, elements of the chunk)."""
        return np.minimum(self.sizes, TOP_K)

    @property
    def used(self) -> np.ndarray:
        """bool [C, 128]."""
        return np.arange(TOP_K) < self.k[:, None]

    def __getitem__(self, chunks: slice) -> Selection:
        return Selection(self.indices[chunks], self.bits[chunks], self.sizes[chunks])


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """Return the bits, u16, of the nearest bf16, ties to even; of a NaN the bits of a NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    even = (bits >> 16) & 1
    rounded = (bits + (np.uint32(0x7FFF) + even)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def split(hidden: np.ndarray) -> list[np.ndarray]:
    """Return the chunks of u16 [n, D], flattened: views of at most 32 x D elements."""
    if hidden.dtype != np.uint16 or hidden.ndim != 2:
        raise TypeError(f"bf16 bits were expected as uint16 [n, D], not {hidden.dtype}")
    return [hidden[i : i + CHUNK_ROWS].reshape(-1) for i in range(0, len(hidden), CHUNK_ROWS)]


def blocks(chunks: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Yield chunks in portions that fit the caches."""
    if not chunks:
        return
    largest = max(chunk.size for chunk in chunks)
    count = max(1, min(_BLOCK_CHUNKS, _BLOCK_ELEMENTS // max(1, largest)))
    for start in range(0, len(chunks), count):
        yield list(chunks[start : start + count])


def select(chunks: Sequence[np.ndarray]) -> Selection:
    """Return the top k by magnitude of each chunk; of equal ones, the earlier position is first.

    Args:
        chunks: u16 bits, flat; lengths may differ.
    """
    sizes = np.array([chunk.size for chunk in chunks])
    width = max(TOP_K, int(sizes.max()))
    bits = np.zeros((len(chunks), width), dtype=np.uint16)  # padding never outranks an element
    for row, chunk in zip(bits, chunks, strict=True):
        row[: chunk.size] = chunk
    indices = _largest(bits & MAGNITUDE)
    chosen = np.take_along_axis(bits, indices, axis=1).astype(np.int64)
    return Selection(indices, chosen, sizes)


def injective_moduli(indices: np.ndarray) -> np.ndarray:
    """Return the largest modulus up to 65497 under which a row's positions are distinct: i64
    [C]."""
    moduli = np.full(len(indices), PRIME)
    pending = np.flatnonzero(indices.max(axis=1) >= PRIME)
    while pending.size:
        residues = np.sort(indices[pending] % moduli[pending, None], axis=1)
        pending = pending[(residues[:, 1:] == residues[:, :-1]).any(axis=1)]
        moduli[pending] -= 1
        if (moduli < TOP_K).any():
            raise ValueError("no modulus keeps the positions distinct")
    return moduli


def _largest(magnitudes: np.ndarray) -> np.ndarray:
    """Return the positions of each row's 128 largest, by decreasing magnitude, then position.

    A row is divided into about 512 strands. The 128th largest of the strands' maxima is a lower
    bound of the 128th largest element, so few candidates are left to sort. The result is [C, 128].
    """
    rows, width = magnitudes.shape
    depth = max(1, width // (4 * TOP_K))
    strands = magnitudes[:, : width // depth * depth].reshape(rows, depth, -1).max(axis=1)
    cut = strands.shape[1] - TOP_K
    bounds = np.partition(strands, cut, axis=1)[:, cut]
    found = np.flatnonzero(magnitudes >= bounds[:, None])
    row, column = np.divmod(found, width)
    order = (MAGNITUDE - magnitudes.reshape(-1)[found]).astype(np.int64)
    keys = np.sort(row << 48 | order << 32 | column)
    starts = np.searchsorted(keys, np.arange(rows, dtype=np.int64) << 48)
    return keys[starts[:, None] + np.arange(TOP_K)] & 0xFFFFFFFF
