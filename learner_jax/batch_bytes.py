"""A batch as bytes: how process 0 hands what it read and checked to the other processes.

    8 bytes    length of the header, little-endian
    header     canonical JSON: the manifest, problem ids, group sizes
    arrays     of NUMBERS, then of TOKENS, one after the other, little-endian; their lengths
               follow from the header and from the arrays before them

No pickle; whatever does not fit exactly is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from learner_jax.batch import Batch, TrainingRollout
from runspec.core.canonical import MalformedJson, canonical_json, parse_object
from verify.formats.batch import BatchGroup, BatchManifest

NO_TARGET = -1
NUMBERS = {
    "prompt_lengths": "<i4",
    "output_lengths": "<i4",
    "versions": "<i4",
    "targets": "<i4",
    "advantages": "<f8",
    "task_rewards": "<f8",
    "rewards": "<f8",
}
"""One a rollout."""
TOKENS = {"prompt_tokens": "<i4", "output_tokens": "<i4", "mu": "<f4"}
"""One a token, the rollouts joined."""
_LENGTH_BYTES = 8


class MalformedBatch(ValueError):
    """Bytes that `encode_batch` did not make."""


def encode_batch(batch: Batch) -> bytes:
    """The bytes of a batch; `decode_batch` gives it back bit for bit."""
    rollouts = batch.rollouts
    header = canonical_json(
        {
            "manifest": asdict(batch.manifest),
            "problem_ids": [rollout.problem_id for rollout in rollouts],
            "group_sizes": [len(group) for group in batch.groups],
        }
    )
    numbers: dict[str, Sequence[float]] = {
        "prompt_lengths": [len(r.prompt_tokens) for r in rollouts],
        "output_lengths": [len(r.output_tokens) for r in rollouts],
        "versions": [r.version for r in rollouts],
        "targets": [NO_TARGET if r.target is None else r.target for r in rollouts],
        "advantages": [r.advantage for r in rollouts],
        "task_rewards": [r.task_reward for r in rollouts],
        "rewards": [r.reward for r in rollouts],
    }
    parts = [len(header).to_bytes(_LENGTH_BYTES, "little"), header]
    parts += [np.asarray(numbers[name], dtype).tobytes() for name, dtype in NUMBERS.items()]
    for name, dtype in TOKENS.items():
        parts += [np.asarray(getattr(rollout, name), dtype).tobytes() for rollout in rollouts]
    return b"".join(parts)


def decode_batch(data: bytes) -> Batch:
    """Reads a batch.

    Raises:
        MalformedBatch: too short, too long, or a header that is not one.
    """
    size = int.from_bytes(data[:_LENGTH_BYTES], "little")
    header, rest = data[_LENGTH_BYTES : _LENGTH_BYTES + size], data[_LENGTH_BYTES + size :]
    try:
        fields = parse_object(header, max_bytes=len(data))
        groups = [BatchGroup(**group) for group in fields["manifest"].pop("groups")]
        manifest = BatchManifest(**fields["manifest"], groups=groups)
        problem_ids: list[str] = fields["problem_ids"]
        sizes = np.asarray(fields["group_sizes"], np.int64).reshape(-1)
        count = len(problem_ids)
    except (MalformedJson, KeyError, TypeError, AttributeError, ValueError) as error:
        raise MalformedBatch(f"header: {error}") from error
    if sizes.sum() != count or (sizes < 1).any() or len(sizes) != len(groups):
        raise MalformedBatch(f"{len(groups)} groups of {sizes.tolist()} are not {count} rollouts")
    cut = _Cutter(rest)
    numbers = {name: cut(dtype, count) for name, dtype in NUMBERS.items()}
    lengths = [numbers["prompt_lengths"], numbers["output_lengths"], numbers["output_lengths"]]
    if (np.concatenate(lengths) < 0).any():
        raise MalformedBatch("a length below zero")
    tokens = {
        name: _split(cut(dtype, int(length.sum(dtype=np.int64))), length)
        for (name, dtype), length in zip(TOKENS.items(), lengths, strict=True)
    }
    cut.end()
    rollouts = _rollouts(problem_ids, numbers, tokens)
    return Batch(manifest, [[next(rollouts) for _ in range(size)] for size in sizes])


class _Cutter:
    """Takes arrays off the front of bytes."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __call__(self, dtype: str, count: int) -> np.ndarray:
        start = self._at
        self._at += count * np.dtype(dtype).itemsize
        if self._at > len(self._data):
            raise MalformedBatch(f"{len(self._data)} bytes of arrays, {self._at} needed")
        return np.frombuffer(self._data, dtype, count, start)

    def end(self) -> None:
        if self._at != len(self._data):
            raise MalformedBatch(f"{len(self._data) - self._at} bytes too many")


def _split(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum(lengths, dtype=np.int64)[:-1])


def _rollouts(
    problem_ids: list[str], numbers: dict[str, np.ndarray], tokens: dict[str, list[Any]]
) -> Iterator[TrainingRollout]:
    for row, problem_id in enumerate(problem_ids):
        target = int(numbers["targets"][row])
        yield TrainingRollout(
            problem_id=problem_id,
            prompt_tokens=tokens["prompt_tokens"][row],
            output_tokens=tokens["output_tokens"][row],
            mu=tokens["mu"][row],
            advantage=float(numbers["advantages"][row]),
            task_reward=float(numbers["task_rewards"][row]),
            reward=float(numbers["rewards"][row]),
            target=None if target == NO_TARGET else target,
            version=int(numbers["versions"][row]),
        )
