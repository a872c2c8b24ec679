"""What the recorder inside vLLM hands out, as it crosses to the front: free of torch and vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verify.toploc import CHUNK_ROWS, TOP_K, Selection


@dataclass(frozen=True)
class Recorded:
    """N tokens and C chunks of several sequences, one after the other; bytes cross any transport.

    Between processes msgpack makes a dict of it: `Recorded(**reply)`.
    """

    tokens: bytes
    """i32 [N]."""
    logprobs: bytes
    """f32 [N]: of log_softmax(logits / T) after top-k / top-p, before noise."""
    versions: bytes
    """i32 [N]: the policy version that sampled each token."""
    indices: bytes
    """i32 [C, 128]: positions of the largest activations in the flattened chunk."""
    bits: bytes
    """u16 [C, 128]: bf16 bits there."""
    hidden_size: int


@dataclass(frozen=True)
class RecordedSequence:
    """The record of one sequence of n tokens."""

    tokens: np.ndarray
    """i32 [n]."""
    logprobs: np.ndarray
    """f32 [n]."""
    versions: np.ndarray
    """i32 [n]."""
    selection: Selection
    """A chunk for each 32 tokens begun: what `verify.toploc.build_proofs_of` makes proofs of."""


def split_recorded(recorded: Recorded, lengths: Sequence[int]) -> list[RecordedSequence]:
    """Cuts a record into its sequences.

    Args:
        recorded: of `take_recorded(slots, lengths)`.
        lengths: output tokens of each sequence.
    """
    tokens = np.frombuffer(recorded.tokens, np.int32)
    logprobs = np.frombuffer(recorded.logprobs, np.float32)
    versions = np.frombuffer(recorded.versions, np.int32)
    indices = np.frombuffer(recorded.indices, np.int32).reshape(-1, TOP_K).astype(np.int64)
    bits = np.frombuffer(recorded.bits, np.uint16).reshape(-1, TOP_K).astype(np.int64)
    sequences, row, chunk = [], 0, 0
    for length in lengths:
        rows = slice(row, row + length)
        sizes = chunk_rows(length) * recorded.hidden_size
        chunks = slice(chunk, chunk + len(sizes))
        selection = Selection(indices[chunks], bits[chunks], sizes)
        sequences.append(RecordedSequence(tokens[rows], logprobs[rows], versions[rows], selection))
        row, chunk = rows.stop, chunks.stop
    if (row, chunk) != (len(tokens), len(indices)):
        raise ValueError(f"a record of {len(tokens)} tokens for sequences of {row}")
    return sequences


def chunk_rows(length: int) -> np.ndarray:
    """Rows of each chunk of a sequence: i64 [ceil(length / 32)], 32 and what is left."""
    starts = np.arange(0, length, CHUNK_ROWS)
    return np.minimum(CHUNK_ROWS, length - starts)
