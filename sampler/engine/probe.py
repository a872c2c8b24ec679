"""The probe: does the engine, after a load, say what the learner said of the same tokens?

It covers what cannot be read back: tensors in packed copies, stale caches, a wrong configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runspec.core.canonical import MalformedJson, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded

FILE_NAME = "probe.json"
MAX_BYTES = 4 * 1024 * 1024
LIMITS = {"float32": 1e-3, "bfloat16": 0.05, "fp8": 0.3}
"""Largest mean |difference| by the engine's quantisation or dtype. Honest loads measure 1e-6 and
.009; fp8 was not measured in vLLM: rounding matrices and their inputs to e4m3 in torch shows .1."""


@dataclass(frozen=True)
class ProbeSequence:
    """Tokens and what the learner, computing from the published bits, says of them."""

    tokens: list[int]
    logprobs: np.ndarray
    """f32 [len(tokens) - 1]: of token i + 1 given the tokens up to i, at temperature 1."""


def read_probe(weights_dir: Path) -> list[ProbeSequence]:
    """Reads `probe.json` of a weights directory.

    Raises:
        UserError: it is missing, malformed or empty.
    """
    path = weights_dir / FILE_NAME
    try:
        payload = parse_object(read_bounded(path, MAX_BYTES), max_bytes=MAX_BYTES)
        probe = [_sequence(entry) for entry in payload["sequences"]]
        if not probe:
            raise ValueError("no sequences")
    except (OSError, MalformedJson, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"cannot read the probe: {error}",
            place=str(path),
            remedy="publish the version with the learner's probe.json",
        ) from error
    return probe


def probe_difference(probe: Sequence[ProbeSequence], logprobs: Sequence[np.ndarray]) -> float:
    """Mean |engine's log-prob - learner's| over all tokens of the probe; NaN where one is NaN.

    Args:
        probe: of the version.
        logprobs: the engine's, shaped as the probe's.
    """
    learner = np.concatenate([sequence.logprobs for sequence in probe])
    return float(np.abs(learner - np.concatenate(list(logprobs))).mean())


def _sequence(entry: Any) -> ProbeSequence:
    tokens = [int(token) for token in entry["tokens"]]
    logprobs = np.asarray(entry["logprobs"], dtype=np.float32)
    if len(tokens) < 2 or logprobs.shape != (len(tokens) - 1,) or not np.isfinite(logprobs).all():
        raise ValueError(f"{len(tokens)} tokens with log-probs of shape {logprobs.shape}")
    return ProbeSequence(tokens, logprobs)
