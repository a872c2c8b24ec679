"""Proofs made of what is known of a model, without the activations that they claim."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from verify.toploc import TOP_K, Proof, build_proofs
from verify.toploc.field import PRIME, canonical, interpolate
from verify.toploc.selection import CHUNK_ROWS, MAGNITUDE, Selection, blocks, select

_NEGATIVE = 0x8000


@dataclass(frozen=True)
class Library:
    """Chunks of the same model that a forger has computed before, of other text."""

    hidden: np.ndarray
    """u16 [N, 32, D]."""
    tokens: np.ndarray
    """i32 [N, 32 + 2]: the two tokens before the chunk's rows, and those of the rows."""

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
    """Mean final hidden states by the last three tokens, or two, or one, or none.

    What a forger can look up who knows the output's tokens and does not run the model.
    """

    def __init__(self, library: Library) -> None:
        states = library.hidden.view(ml_dtypes.bfloat16).astype(np.float32)
        flat = states.reshape(-1, library.width)
        self._means = [_means(keys, flat) for keys in _contexts(library.tokens)]

    def proof(self, tokens: np.ndarray) -> bytes:
        """For i32 [34], the tokens as in `Library`."""
        keys = [k.tolist() for k in _contexts(tokens[None])]
        rows = []
        for row in range(CHUNK_ROWS):
            tables = zip(self._means, keys, strict=True)
            rows.append(next(m[k[row]] for m, k in tables if k[row] in m))
        return build_proofs(np.stack(rows).astype(ml_dtypes.bfloat16).view(np.uint16))[0]


def _contexts(tokens: np.ndarray) -> list[np.ndarray]:
    """Keys of the last three tokens, two, one and none, at each row of i32 [N, 34], flat."""
    wide = tokens.astype(np.int64)
    last, before, first = wide[:, 2:], wide[:, 1:-1], wide[:, :-2]
    three = first << 16 | before << 8 | last
    return [k.reshape(-1) for k in (three, before << 8 | last, last, np.zeros_like(last))]


def _means(keys: np.ndarray, states: np.ndarray) -> dict[int, np.ndarray]:
    order = np.argsort(keys, kind="stable")
    kinds, starts = np.unique(keys[order], return_index=True)
    counts = np.diff(np.append(starts, len(keys)))
    sums = np.add.reduceat(states[order], starts, axis=0)
    return dict(zip(kinds.tolist(), sums / counts[:, None], strict=True))
