"""Builds proofs, and reads their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verify.toploc.field import PRIME, canonical, interpolate
from verify.toploc.selection import (
    INFINITY,
    MAGNITUDE,
    TOP_K,
    Selection,
    blocks,
    injective_moduli,
    select,
    split,
)

PROOF_BYTES = 2 + 2 * TOP_K


class MalformedProof(ValueError):
    """Raised for bytes that no honest prover writes, or for a wrong number of proofs."""


@dataclass(frozen=True)
class Proof:
    """A polynomial over GF(65497), and the modulus under which its positions are distinct."""

    modulus: int
    coefficients: np.ndarray
    """i64 [128], ascending, each in [0, 65497); zero beyond the positions that the chunk has."""

    def to_bytes(self) -> bytes:
        """Return the modulus, then the coefficients, as big-endian uint16; 258 bytes."""
        return np.append(self.modulus, self.coefficients).astype(">u2").tobytes()


def parse_proof(data: bytes, *, k: int = TOP_K) -> Proof:
    """Read a proof from outside.

    Args:
        data: bytes of the proof.
        k: number of positions of the chunk: min(128, elements).

    Raises:
        MalformedProof: the length is wrong, the modulus is outside [128, 65497] (it is 65497 if a
            chunk has fewer than 128 positions), a coefficient is 65497 or more, or one after the
            kth is not 0.
    """
    if len(data) != PROOF_BYTES:
        raise MalformedProof(f"{len(data)} bytes instead of {PROOF_BYTES}")
    words = np.frombuffer(data, dtype=">u2").astype(np.int64)
    modulus, coefficients = int(words[0]), words[1:]
    if not TOP_K <= modulus <= PRIME:
        raise MalformedProof(f"modulus {modulus} outside [{TOP_K}, {PRIME}]")
    if (coefficients >= PRIME).any():
        raise MalformedProof(f"coefficient {coefficients.max()} is not below {PRIME}")
    if coefficients[k:].any():
        raise MalformedProof(f"a coefficient beyond the {k} that the chunk has")
    return Proof(modulus, coefficients)


_CHUNKS_AT_ONCE = 32


def build_proofs(hidden_bits: np.ndarray) -> list[bytes]:
    """Build the proofs of one rollout.

    Args:
        hidden_bits: u16 [n, D], bits of the bf16 final hidden states that produced the n output
            tokens.

    Returns:
        One proof of 258 bytes for each 32 rows begun.

    Raises:
        ValueError: an activation is not finite.
    """
    return build_proofs_batch([hidden_bits])[0]


def build_proofs_batch(rollouts: Sequence[np.ndarray]) -> list[list[bytes]]:
    """Build the proofs of many rollouts at once, which is faster than one by one."""
    chunks = [split(hidden) for hidden in rollouts]
    flat = [chunk for rollout in chunks for chunk in rollout]
    proofs = iter([proof for block in blocks(flat) for proof in _encode(select(block))])
    return [[next(proofs) for _ in rollout] for rollout in chunks]


def build_proofs_of(selections: Sequence[Selection]) -> list[list[bytes]]:
    """Build proofs from largest activations that were selected elsewhere, as on a sampler's GPU.

    If the same positions were selected, the bytes are those of `build_proofs`. The order of a
    selection does not matter. Among equal magnitudes `select` takes the earliest and a device any
    of them, so `verify_proofs` judges agreement, and not the bytes.

    Args:
        selections: selection of each rollout with C chunks; C may differ.

    Returns:
        For each rollout C proofs of 258 bytes.

    Raises:
        ValueError: an activation is not finite; a position is outside its chunk or occurs twice.
    """
    if not selections:
        return []
    parts = zip(*((each.indices, each.bits, each.sizes) for each in selections), strict=True)
    whole = Selection(*map(np.concatenate, parts))
    proofs = iter(
        [
            proof
            for start in range(0, len(whole.sizes), _CHUNKS_AT_ONCE)
            for proof in _encode(_checked(whole[start : start + _CHUNKS_AT_ONCE]))
        ]
    )
    return [[next(proofs) for _ in each.sizes] for each in selections]


def _checked(selection: Selection) -> Selection:
    """Return the selection with unused positions as `select` has them, after those of the chunk."""
    indices = np.where(selection.used, selection.indices, np.arange(TOP_K))
    if (selection.used & ((indices < 0) | (indices >= selection.sizes[:, None]))).any():
        raise ValueError("a selected position lies outside its chunk")
    ordered = np.sort(indices, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise ValueError("a position was selected twice")
    return Selection(indices, np.where(selection.used, selection.bits, 0), selection.sizes)


def _encode(selection: Selection) -> list[bytes]:
    if (selection.bits & MAGNITUDE >= INFINITY).any():
        raise ValueError("the activations are not finite")
    moduli = injective_moduli(selection.indices)
    points = selection.indices % moduli[:, None]
    coefficients = canonical(interpolate(points, selection.bits, selection.used))
    return [Proof(int(m), c).to_bytes() for m, c in zip(moduli, coefficients, strict=True)]
