"""Perturbed weights, and what limits reject under them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runspec.core.canonical import parse_object
from runspec.core.errors import UserError
from runspec.core.files import atomic_file
from verify.calibration.measure import PAIR
from verify.checks.prefill import (
    judge_all_gaps,
    judge_gaps,
    judge_proofs,
    logprob_diff,
    logprob_limit,
)
from verify.thresholds import Limits
from verify.toploc import round_to_bf16

CHECKS = ("log-probs", "seeded choice", "TOPLOC")
_MAX_HEADER_BYTES = 64 * 1024 * 1024
Change = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""Returns changed weights, f32 of the same shape."""


@dataclass
class Rejections:
    """Counts of the rollouts and submissions that some limits reject."""

    limits: Limits
    rollouts: int = 0
    submissions: int = 0
    rejected_rollouts: int = 0
    """Rollouts that one of their own numbers rejects."""
    rejected_submissions: int = 0
    """Submissions that any number rejects."""
    by: tuple[int, ...] = (0, 0, 0)
    """Submissions that each of `CHECKS` rejects by itself."""

    def named(self) -> dict[str, int]:
        """Return `by`, with the names of the checks."""
        return dict(zip(CHECKS, self.by, strict=True))

    def take(self, pairs: Sequence[PAIR]) -> None:
        """Judge a submission and count what is rejected."""
        each = [_failed(pair, self.limits) for pair in pairs]
        together = _failed_together(pairs, self.limits)
        failed = np.logical_or.reduce([*each, together])
        self.rollouts += len(pairs)
        self.submissions += 1
        self.rejected_rollouts += sum(map(any, each))
        self.rejected_submissions += bool(failed.any())
        self.by = tuple(int(n) for n in np.add(self.by, failed))


def _failed(pair: PAIR, limits: Limits) -> list[bool]:
    """Return which of `CHECKS` reject one rollout."""
    row, found = pair
    logprobs = logprob_diff(*pair) <= logprob_limit(limits.logprob_rollout, [row])
    gaps = found.seeded_gap is None or judge_gaps(found.seeded_gap, limits).passed
    assert isinstance(found.proof, list), "malformed proofs were refused before"
    proofs = all(result.passed for result in judge_proofs(found.proof, limits))
    return [not logprobs, not gaps, not proofs]


def _failed_together(pairs: Sequence[PAIR], limits: Limits) -> list[bool]:
    """Return which of `CHECKS` reject the submission as a whole."""
    lengths = [len(row.output_tokens) for row, _ in pairs]
    mean = float(np.average([logprob_diff(*pair) for pair in pairs], weights=lengths))
    logprobs = mean <= logprob_limit(limits.logprob_submission, [row for row, _ in pairs])
    gaps = [found.seeded_gap for _, found in pairs if found.seeded_gap is not None]
    choices = not gaps or judge_all_gaps(np.concatenate(gaps), limits).passed
    return [not logprobs, not choices, False]


def noise(share: float) -> Change:
    """Return a change that multiplies every weight by 1 + share z, z standard normal."""

    def change(weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        drawn = rng.standard_normal(weights.shape, np.float32)
        return weights * (1.0 + np.float32(share) * drawn)

    return change


def int8(weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Round matrices to 255 levels of each row's largest weight; leave vectors as they are."""
    if weights.ndim < 2:
        return weights
    scale = np.abs(weights).max(axis=-1, keepdims=True) / 127.0
    return np.round(weights / np.where(scale > 0, scale, 1.0)) * scale


def perturb(folder: Path, change: Change) -> None:
    """Change the weights of every safetensors file of a folder, and keep their types.

    Raises:
        UserError: there is no such file, or a file has another form.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError("no safetensors file is there", place=str(folder))
    for path in files:
        try:
            _rewrite(path, change)
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise UserError(f"cannot be perturbed: {error}", place=str(path)) from error


def _rewrite(path: Path, change: Change) -> None:
    data = np.memmap(path, np.uint8, mode="r")
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    head = data[: 8 + length].tobytes()
    header = parse_object(head[8:].rstrip(), max_bytes=_MAX_HEADER_BYTES)
    tensors = {k: v for k, v in header.items() if k != "__metadata__"}
    # A new file replaces the link, so the file that it pointed to keeps its bytes.
    with atomic_file(path) as file:
        file.write(head)
        for name, info in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = info["data_offsets"]
            raw = data[8 + length + begin : 8 + length + end]
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            file.write(_changed(raw, info, change, rng))


def _changed(raw: np.ndarray, info: dict, change: Change, rng: np.random.Generator) -> bytes:
    if info["dtype"] == "F32":
        weights = raw.view("<f4").reshape(info["shape"])
        return change(weights, rng).astype("<f4").tobytes()
    if info["dtype"] != "BF16":
        raise ValueError(f"tensors of {info['dtype']}: versions are published in F32 or BF16")
    weights = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(info["shape"])
    return round_to_bf16(change(weights, rng)).astype("<u2").tobytes()
