"""Building proofs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verify.toploc.field import canonical, interpolate
from verify.toploc.proof import Proof
from verify.toploc.selection import INFINITY, MAGNITUDE, blocks, injective_moduli, select, split


def build_proofs(hidden_bits: np.ndarray) -> list[bytes]:
    """The proofs of one rollout.

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
    """`build_proofs` of many rollouts at once, which is cheaper than one by one."""
    chunks = [split(hidden) for hidden in rollouts]
    flat = [chunk for rollout in chunks for chunk in rollout]
    proofs = iter([proof for block in blocks(flat) for proof in _build(block)])
    return [[next(proofs) for _ in rollout] for rollout in chunks]


def _build(chunks: list[np.ndarray]) -> list[bytes]:
    selection = select(chunks)
    if (selection.bits[:, 0] & MAGNITUDE >= INFINITY).any():
        raise ValueError("the activations are not finite")
    moduli = injective_moduli(selection.indices)
    points = selection.indices % moduli[:, None]
    coefficients = canonical(interpolate(points, selection.bits, selection.used))
    return [Proof(int(m), c).to_bytes() for m, c in zip(moduli, coefficients, strict=True)]
