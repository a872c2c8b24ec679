"""Proofs made of what is known of a model, without the activations that they claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from verify.toploc import (
    CHUNK_ROWS,
    MAGNITUDE,
    PRIME,
    TOP_K,
    Proof,
    Selection,
    blocks,
    build_proofs_batch,
    canonical,
    interpolate,
    select,
)

_NEGATIVE = 0x8000
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Library:
    """Chunks of the same model that a forger has computed before, of other text."""

    hidden: np.ndarray
    """u16 [N, 32, D]."""
    tokens: np.ndarray
    """i32 [N, before + 32]: some tokens before the chunk's rows, and those of the rows."""

    @property
    def width(self) -> int:
        return self.hidden.shape[2]


@dataclass(frozen=True)
class Guess:
    """The signed values that are likeliest at the residues that are hit most often."""

    residues: np.ndarray
    """i64 [n], most promising first."""
    values: np.ndarray
    """i64 [n], bf16 as integers in the order of the numbers."""


def ordered(bits: np.ndarray) -> np.ndarray:
    """bf16 bits as integers in the order of the numbers."""
    bits = bits.astype(np.int64)
    return np.where(bits & _NEGATIVE, -(bits & MAGNITUDE), bits & MAGNITUDE)


def selected(hidden: np.ndarray) -> Selection:
    """The largest of u16 [N, 32, D]."""
    parts = [select(block) for block in blocks([chunk.reshape(-1) for chunk in hidden])]
    return Selection(
        *(
            np.concatenate([getattr(p, name) for p in parts])
            for name in ("indices", "bits", "sizes")
        )
    )


def likeliest(found: Selection, modulus: int, count: int, radius: int) -> Guess:
    """Where, modulo `modulus`, most of the largest lie within `radius` of one value.

    Args:
        found: the largest of a library.
        modulus: classes of positions that must share a value; `PRIME` or more parts all cells.
        count: residues to name.
        radius: units in the last place.
    """
    keys = (found.indices % modulus << 18 | ordered(found.bits) + (1 << 16)).reshape(-1)
    keys.sort()
    inside = np.searchsorted(keys, keys + 2 * radius, side="right") - np.arange(len(keys))
    starts = np.flatnonzero(np.diff(keys >> 18, prepend=-1))
    most = np.maximum.reduceat(inside, starts)
    best = np.argsort(-most, kind="stable")[:count]
    ends = np.append(starts, len(keys))
    residues, values = [], []
    for group in best:
        window = slice(ends[group], ends[group + 1])
        first = ends[group] + int(np.argmax(inside[window]))
        middle = keys[first : first + inside[first]]
        residues.append(keys[first] >> 18)
        values.append((middle[0] + middle[-1]) // 2 % (1 << 18) - (1 << 16))
    return Guess(np.array(residues), np.array(values))


def proof_of_guess(guess: Guess, modulus: int) -> bytes:
    """The polynomial through the first 128 residues; the rest of 128 is filled with zeros' bits."""
    residues = guess.residues[:TOP_K]
    spare = np.setdiff1d(np.arange(4 * TOP_K) % modulus, residues)[: TOP_K - len(residues)]
    points = np.concatenate([residues, spare])
    values = np.concatenate([guess.values[:TOP_K], np.zeros(len(spare), np.int64)])
    bits = np.where(values < 0, _NEGATIVE | -values, values)
    used = np.arange(TOP_K) < len(points)
    padded = np.resize(points, TOP_K)
    coefficients = canonical(interpolate(padded[None], np.resize(bits, TOP_K)[None], used[None]))
    return Proof(modulus, coefficients[0]).to_bytes()


def constant(found: Selection, radius: int) -> bytes:
    """One value for all positions."""
    guess = likeliest(found, 1, 1, radius)
    value = int(guess.values[0])
    bits = _NEGATIVE | -value if value < 0 else value
    return Proof(PRIME, np.append(bits, np.zeros(TOP_K - 1, np.int64))).to_bytes()


def channels(found: Selection, width: int, radius: int) -> bytes:
    """A value for each channel in all rows: the modulus is a multiple of the hidden size."""
    modulus = width * -(-TOP_K // width)
    return proof_of_guess(likeliest(found, modulus, TOP_K, radius), modulus)


def cells(found: Selection, radius: int) -> bytes:
    """A value for each of the 128 likeliest positions, under the modulus of an honest proof."""
    return proof_of_guess(likeliest(found, PRIME, TOP_K, radius), PRIME)


class TokenTable:
    """Mean final hidden states by the last tokens: by as many of them as the library has met.

    What a forger can look up who knows the output's tokens and does not run the model.
    """

    def __init__(self, library: Library, lengths: Sequence[int] = (3, 2, 1)) -> None:
        """`lengths`: of the contexts to look up, longest first; where none was met, the mean."""
        self._lengths = [*lengths, 0]
        states = library.hidden.view(ml_dtypes.bfloat16).reshape(-1, library.width)
        self._tables = [_means(_contexts(library.tokens, n), states) for n in self._lengths]

    def states(self, tokens: np.ndarray) -> np.ndarray:
        """u16 [N, 32, D], for tokens as in `Library`."""
        found = np.empty((len(tokens) * CHUNK_ROWS, self._tables[0][1].shape[1]), np.float32)
        missing = np.ones(len(found), bool)
        for length, (kinds, means) in zip(self._lengths, self._tables, strict=True):
            keys = _contexts(tokens, length)
            at = np.minimum(np.searchsorted(kinds, keys), len(kinds) - 1)
            met = missing & (kinds[at] == keys)
            found[met] = means[at[met]]
            missing &= ~met
        bits = found.astype(ml_dtypes.bfloat16).view(np.uint16)
        return bits.reshape(len(tokens), CHUNK_ROWS, -1)

    def proofs(self, tokens: np.ndarray) -> list[bytes]:
        return [proof for [proof] in build_proofs_batch(list(self.states(tokens)))]


def _contexts(tokens: np.ndarray, length: int) -> np.ndarray:
    """A key of the last `length` tokens at each row of i32 [N, before + 32]: u64, flat."""
    wide = tokens.astype(np.uint64)
    start = wide.shape[1] - CHUNK_ROWS
    if length > start + 1:
        raise ValueError(f"contexts of {length} tokens, {start} tokens before the first row")
    keys = np.zeros((len(wide), CHUNK_ROWS), np.uint64)
    for back in range(length):  # a polynomial modulo 2**64: keys clash once in some 2**64 pairs
        keys *= _MULTIPLIER
        keys += wide[:, start - back : start - back + CHUNK_ROWS] + np.uint64(1)
    return keys.reshape(-1)


def _means(keys: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The kinds of keys, ascending, and the mean state of each, f32."""
    order = np.argsort(keys, kind="stable")
    kinds, starts = np.unique(keys[order], return_index=True)
    counts = np.diff(np.append(starts, len(keys)))
    sums = np.add.reduceat(states[order].astype(np.float32), starts, axis=0)
    return kinds, sums / counts[:, None]
