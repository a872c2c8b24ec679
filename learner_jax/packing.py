"""Samples packed into rows of a fixed length, and per-token values carried there and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from learner_jax.arrays import TokenBatch
from runspec.common.errors import UserError


@dataclass(frozen=True)
class Sample:
    """One prompt, at least a token, and its output, at least a token. int32 [P] and [n]."""

    prompt: np.ndarray
    output: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)


@dataclass(frozen=True)
class Placement:
    """Where one sample's output is predicted: [start, stop) of a row, n positions."""

    microbatch: int
    row: int
    start: int
    stop: int

    @property
    def index(self) -> tuple[int, int, slice]:
        return self.microbatch, self.row, slice(self.start, self.stop)


@dataclass(frozen=True)
class Packed:
    """M microbatches of the same shape, [M, rows, tokens], and where every sample went."""

    batch: TokenBatch
    """numpy int32 [M, rows, tokens] each."""
    placements: tuple[Placement, ...]
    """In the order of the samples."""

    @property
    def microbatches(self) -> int:
        return int(self.batch.tokens.shape[0])

    def token_batch(self, index: int) -> TokenBatch:
        """Microbatch `index`, numpy int32 [rows, tokens] each."""
        batch = self.batch
        return TokenBatch(
            tokens=batch.tokens[index],
            targets=batch.targets[index],
            segment_ids=batch.segment_ids[index],
            positions=batch.positions[index],
        )

    def scatter(self, values: Sequence[np.ndarray | float]) -> np.ndarray:
        """Lays per-sample values on the positions that predict the output tokens.

        Args:
            values: for each sample an array [n], one value an output token, or one number for all.

        Returns:
            float32 [M, rows, tokens], 0 elsewhere (float64 if the values are).
        """
        dtype = np.float64 if any(_is_float64(value) for value in values) else np.float32
        out = np.zeros(self.batch.tokens.shape, dtype)
        for place, value in zip(self.placements, values, strict=True):
            out[place.index] = value
        return out

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        """The inverse of `scatter`: for each sample the [n] values of its output tokens.

        Args:
            array: [M, rows, tokens].
        """
        return [array[place.index] for place in self.placements]


def pack(samples: Sequence[Sample], *, tokens: int, rows: int) -> Packed:
    """Packs samples by first-fit decreasing: the longest first, each into the first row with room.

    No sample is split, dropped or repeated. The same samples in the same order give the same rows.

    Args:
        samples: at least one.
        tokens: length of a row.
        rows: of a microbatch; the last one is filled with rows of padding.

    Raises:
        UserError: a sample is longer than a row.
    """
    if not samples:
        raise ValueError("no samples to pack")
    longest = max(len(sample) for sample in samples)
    if longest > tokens:
        raise UserError(
            f"a sample has {longest} tokens, a packed row {tokens}",
            place="learner.packing.tokens",
            remedy=f"raise it to at least {longest}; samples are never cut",
        )
    if any(len(sample.prompt) == 0 or len(sample.output) == 0 for sample in samples):
        raise ValueError("a sample needs a prompt token and an output token")
    bins = _first_fit_decreasing([len(sample) for sample in samples], tokens)
    shape = (-(-len(bins) // rows), rows, tokens)
    batch = TokenBatch(*(np.zeros(shape, np.int32) for _ in range(4)))
    placements: dict[int, Placement] = {}
    for number, members in enumerate(bins):
        microbatch, row = divmod(number, rows)
        begin = 0
        for segment, member in enumerate(members, start=1):
            sample = samples[member]
            end, prompt = begin + len(sample), len(sample.prompt)
            text = np.concatenate([sample.prompt, sample.output])
            batch.tokens[microbatch, row, begin:end] = text
            batch.targets[microbatch, row, begin : end - 1] = text[1:]
            batch.segment_ids[microbatch, row, begin:end] = segment
            batch.positions[microbatch, row, begin:end] = np.arange(len(sample))
            placements[member] = Placement(microbatch, row, begin + prompt - 1, end - 1)
            begin = end
    return Packed(batch, tuple(placements[member] for member in range(len(samples))))


def _first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices into `lengths`, none above capacity."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fit = next((b for b, free in enumerate(room) if free >= lengths[index]), None)
        if fit is None:
            fit = len(bins)
            bins.append([])
            room.append(capacity)
        bins[fit].append(index)
        room[fit] -= lengths[index]
    return bins


def _is_float64(value: np.ndarray | float) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.float64
