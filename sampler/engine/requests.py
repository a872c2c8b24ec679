"""Plain data between the worker, the engine and vLLM's processes: requests, results, reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runspec.core.errors import UserError
from runspec.core.schema import SamplerPool
from verify.toploc.codec import CHUNK_ROWS, TOP_K, Selection


@dataclass(frozen=True)
class SampleRequest:
    """One sequence to sample. A group is several requests that differ in `noise_key` alone."""

    prompt_tokens: Sequence[int]
    max_new_tokens: int
    end_token: int
    """The only token that ends the sequence; it is part of the output."""
    temperature: float
    """T > 0."""
    noise_key: tuple[int, int] | None
    """Key of `verify.noise.noise_key`; None if sampling is not seeded (the engine draws a key)."""
    top_p: float = 1.0
    """In (0, 1]; 1 keeps every token."""
    top_k: int = -1
    """-1 keeps every token."""


def sample_requests(
    pool: SamplerPool,
    prompt: Sequence[int],
    end_token: int,
    noise_keys: Sequence[tuple[int, int] | None],
) -> list[SampleRequest]:
    """Return the requests for one prompt with a pool's settings, one for each noise key.

    Raises:
        UserError: the prompt leaves no room for an answer in the pool's context.
    """
    room = pool.max_model_len - len(prompt)
    if room < pool.max_new_tokens:
        raise UserError(
            f"a prompt of {len(prompt)} tokens leaves {room} of {pool.max_model_len} for the "
            f"{pool.max_new_tokens} new ones",
            place=f"samplers.{pool.name}",
            remedy="raise max_model_len, or lower max_new_tokens or data.max_prompt_tokens",
        )
    sampling = pool.sampling
    return [
        SampleRequest(
            prompt_tokens=prompt,
            max_new_tokens=pool.max_new_tokens,
            end_token=end_token,
            temperature=sampling.temperature,
            noise_key=key,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        for key in noise_keys
    ]


@dataclass(frozen=True)
class Sampled:
    """One sampled sequence, row t of each array belonging to output token t."""

    output_tokens: np.ndarray
    """i32 [n], the end token included where there is one."""
    logprobs: np.ndarray
    """f32 [n]: log_softmax(logits / T) at the output token, before any noise."""
    finish_reason: str
    """`stop` (the end token) or `length`."""
    versions: np.ndarray
    """i32 [n]: the policy version that each token was sampled from."""
    selection: Selection
    """Selection of the final hidden states behind the tokens, one chunk for each 32 or rest of
    them: `verify.toploc.codec.build_proofs_of` makes the proofs."""


@dataclass(frozen=True)
class LoadReport:
    """Result of a load on one rank, as names of tensors."""

    compared: list[str]
    repacked: list[str]
    """Tensors in a form that cannot be read back."""
    different: list[str]
    """Tensors that differ from the files or have no parameter: the load failed."""
    load_s: float = 0.0
    """Seconds that the load took, all checks included."""
    pause_s: float = 0.0
    """Seconds of these in which nothing could be sampled: fewer if weights change in flight."""
    patched: bool = False
    """The weights were changed in place by a delta, not reloaded."""


class NoVersion(RuntimeError):
    """Sequences were submitted while no version was loaded.

    Attributes:
        death: error of the engine that held a version; None if none was loaded or a load failed.
    """

    def __init__(self, death: Exception | None) -> None:
        super().__init__("no version is loaded")
        self.death = death


class GenerationAborted(Exception):
    """Generation ended early because the caller asked for it; nothing was sampled."""


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


def split_recorded(
    recorded: Recorded, lengths: Sequence[int], reasons: Sequence[str]
) -> list[Sampled]:
    """Split a record into its sequences.

    Args:
        recorded: result of `take_recorded(slots, lengths)`.
        lengths: output tokens of each sequence.
        reasons: why each ended.
    """
    tokens = np.frombuffer(recorded.tokens, np.int32)
    logprobs = np.frombuffer(recorded.logprobs, np.float32)
    versions = np.frombuffer(recorded.versions, np.int32)
    indices = np.frombuffer(recorded.indices, np.int32).reshape(-1, TOP_K).astype(np.int64)
    bits = np.frombuffer(recorded.bits, np.uint16).reshape(-1, TOP_K).astype(np.int64)
    sequences, row, chunk = [], 0, 0
    for length, reason in zip(lengths, reasons, strict=True):
        rows = slice(row, row + length)
        starts = np.arange(0, length, CHUNK_ROWS)  # a chunk has 32 rows, or the rest
        sizes = np.minimum(CHUNK_ROWS, length - starts) * recorded.hidden_size
        chunks = slice(chunk, chunk + len(sizes))
        selection = Selection(indices[chunks], bits[chunks], sizes)
        sequences.append(Sampled(tokens[rows], logprobs[rows], reason, versions[rows], selection))
        row, chunk = rows.stop, chunks.stop
    if (row, chunk) != (len(tokens), len(indices)):
        raise ValueError(f"a record of {len(tokens)} tokens for sequences of {row}")
    return sequences
