"""Building proofs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verify.toploc.field import canonical, interpolate
from verify.toploc.proof import Proof
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

_CHUNKS_AT_ONCE = 32


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


def build_proofs_of(selections: Sequence[Selection]) -> list[list[bytes]]:
    """Proofs of rollouts whose largest activations were selected elsewhere, as on a sampler's GPU.

    The bytes are those of `build_proofs` wherever the same positions were selected. The order of a
    selection does not matter; among equal magnitudes devices take what they like (`select` the
    earliest), so that agreement is judged by `verify_proofs`, not by bytes.

    Args:
        selections: of each rollout; C chunks each, and C may differ.

    Returns:
        Of each rollout C proofs of 258 bytes.

    Raises:
        ValueError: an activation is not finite; a position is outside its chunk or comes twice.
    """
    whole = Selection(
        *(
            np.concatenate([getattr(each, name) for each in selections] or [empty])
            for name, empty in (
                ("indices", np.empty((0, TOP_K), np.int64)),
                ("bits", np.empty((0, TOP_K), np.int64)),
                ("sizes", np.empty(0, np.int64)),
            )
        )
    )
    proofs = iter(
        [
            proof
            for start in range(0, len(whole.sizes), _CHUNKS_AT_ONCE)
            for proof in _encode(_checked(whole[start : start + _CHUNKS_AT_ONCE]))
        ]
    )
    return [[next(proofs) for _ in each.sizes] for each in selections]


def _build(chunks: list[np.ndarray]) -> list[bytes]:
    return _encode(select(chunks))


def _checked(selection: Selection) -> Selection:
    """The same with positions that are not used as `select` has them: those after the chunk."""
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
