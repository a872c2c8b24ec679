"""The probe: does the engine, after a load, say what the learner said of the same tokens?

It covers what cannot be read back: tensors in packed copies, stale caches, a wrong configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runspec.common.canonical import MalformedJson, parse_object
from runspec.common.errors import UserError
from runspec.common.files import read_bounded

FILE_NAME = "probe.json"
MAX_BYTES = 4 * 1024 * 1024
LIMITS = {"float32": 1e-3, "bfloat16": 0.05}
"""Largest mean |difference| by the engine's dtype: a thousand times, and five times, what honest
loads measure (fp32 1e-6, bf16 against fp32 .009)."""


@dataclass(frozen=True)
class ProbeSequence:
    tokens: list[int]
    logprobs: np.ndarray
    """f32 [len(tokens) - 1]: of token i + 1 given the tokens up to i, at temperature 1."""


@dataclass(frozen=True)
class Probe:
    sequences: list[ProbeSequence]


def read_probe(weights_dir: Path) -> Probe:
    """Reads `probe.json` of a weights directory.

    Raises:
        UserError: it is missing or malformed.
    """
    path = weights_dir / FILE_NAME
    try:
        payload = parse_object(read_bounded(path, MAX_BYTES), max_bytes=MAX_BYTES)
        sequences = [_sequence(entry) for entry in payload["sequences"]]
    except (OSError, MalformedJson, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"cannot read the probe: {error}",
            place=str(path),
            remedy="publish the version with the learner's probe.json",
        ) from error
    if not sequences:
        raise UserError("a probe without sequences proves nothing", place=str(path))
    return Probe(sequences)


def check_probe(
    probe: Probe,
    logprobs: Sequence[np.ndarray],
    *,
    dtype: str,
    version: int,
    suspects: Sequence[str],
) -> float:
    """Compares the engine's log-probs with the learner's.

    Args:
        probe: of the version.
        logprobs: the engine's, shaped as the probe's.
        dtype: the engine's.
        version: its number, for the message.
        suspects: tensors that could not be read back.

    Returns:
        The mean absolute difference.

    Raises:
        UserError: it is above the limit, or not a number.
    """
    difference = float(
        np.abs(
            np.concatenate([s.logprobs for s in probe.sequences]) - np.concatenate(list(logprobs))
        ).mean()
    )
    if not difference < LIMITS[dtype]:
        raise UserError(
            f"version {version}: the probe's log-probs differ from the learner's by "
            f"{difference:.2e} on average, more than {LIMITS[dtype]:.0e}; these tensors may be stale: "
            f"{', '.join(suspects[:8]) or 'none is repacked'}",
            place="engine",
            remedy="restart the worker; if it happens again, report the vLLM version",
        )
    return difference


def _sequence(entry: Any) -> ProbeSequence:
    tokens = [int(token) for token in entry["tokens"]]
    logprobs = np.asarray(entry["logprobs"], dtype=np.float32)
    if len(tokens) < 2 or logprobs.shape != (len(tokens) - 1,) or not np.isfinite(logprobs).all():
        raise ValueError(f"{len(tokens)} tokens with log-probs of shape {logprobs.shape}")
    return ProbeSequence(tokens, logprobs)
