"""TOPLOC proofs (arXiv 2501.16007) in numpy, byte-compatible with the `toploc` package 0.1.6.

A proof commits to the largest activations of a chunk of 32 output tokens in 258 bytes: a
polynomial over GF(65497) that gives, at each of their positions, their bf16 bits.
"""

from verify.toploc.codec import (
    PROOF_BYTES,
    MalformedProof,
    Proof,
    build_proofs,
    build_proofs_batch,
    build_proofs_of,
    parse_proof,
)
from verify.toploc.selection import CHUNK_ROWS, TOP_K, Selection
from verify.toploc.statistics import ChunkStatistics, verify_proofs, verify_proofs_batch

__all__ = [
    "CHUNK_ROWS",
    "PROOF_BYTES",
    "TOP_K",
    "ChunkStatistics",
    "MalformedProof",
    "Proof",
    "Selection",
    "build_proofs",
    "build_proofs_batch",
    "build_proofs_of",
    "parse_proof",
    "verify_proofs",
    "verify_proofs_batch",
]
