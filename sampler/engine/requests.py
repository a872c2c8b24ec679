"""What the engine is asked and what it answers: plain data, free of torch and vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SampleRequest:
    """One sequence to sample. A group is several requests that differ in `noise_key` alone."""

    prompt_tokens: Sequence[int]
    max_new_tokens: int
    end_token: int
    """The one token that ends the sequence; it is part of the output."""
    temperature: float
    """T > 0."""
    noise_key: tuple[int, int] | None
    """Of `verify.noise.noise_key`; None where sampling is not seeded (the engine draws a key)."""


@dataclass(frozen=True)
class Sampled:
    """One sampled sequence, row t of each array belonging to output token t."""

    output_tokens: np.ndarray
    """i32 [n], the end token included where there is one."""
    logprobs: np.ndarray
    """f32 [n]: log_softmax(logits / T) at the output token, before any noise."""
    finish_reason: str
    """`stop` (the end token) or `length`."""
    hidden: np.ndarray
    """u16 [n, D]: bits of the bf16 final hidden state, after the last norm, that produced it."""


@dataclass(frozen=True)
class Recorded:
    """Rows of several slots, slot by slot, position by position; bytes cross any transport."""

    tokens: bytes
    """i32 [N]."""
    logprobs: bytes
    """f32 [N]."""
    hidden: bytes
    """u16 [N, D], bits of bf16."""


@dataclass(frozen=True)
class LoadReport:
    """What one rank found after a load, by the files' tensor names."""

    compared: list[str]
    repacked: list[str]
    """Held in a form that cannot be read back."""
    different: list[str]
    """The engine holds other bytes than the files, or has no place for them: the load failed."""


class GenerationAborted(Exception):
    """Generation ended early because the caller asked for it; nothing was sampled."""
