"""The bytes of a proof."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verify.toploc.field import PRIME
from verify.toploc.selection import TOP_K

PROOF_BYTES = 2 + 2 * TOP_K


class MalformedProof(ValueError):
    """Bytes that no honest prover writes, or a number of proofs that is not the chunks'."""


@dataclass(frozen=True)
class Proof:
    """A polynomial over GF(65497) and the modulus that keeps its positions distinct."""

    modulus: int
    coefficients: np.ndarray
    """i64 [128], ascending, each in [0, 65497); zero beyond the positions that the chunk has."""

    def to_bytes(self) -> bytes:
        """Big-endian uint16: the modulus, then the coefficients; 258 bytes."""
        return np.append(self.modulus, self.coefficients).astype(">u2").tobytes()


def parse_proof(data: bytes, *, k: int = TOP_K) -> Proof:
    """Reads a proof from outside.

    Args:
        data: the bytes.
        k: positions that the chunk has: min(128, elements).

    Raises:
        MalformedProof: wrong length, modulus outside [128, 65497] (65497 it is wherever a chunk
            has fewer than 128 positions), a coefficient of 65497 or more, or one beyond the kth.
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
