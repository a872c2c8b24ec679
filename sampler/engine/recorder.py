"""Keeps, for every token sampled, its log-prob and the hidden state that produced it.

vLLM computes rows that never become tokens: each chunk of a chunked prefill but the last samples
one that is thrown away, and a preempted request is prefilled again. So rows are keyed by (slot,
position), position being the number of output tokens that the request has, and the last row of a
key is the one that counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sampler.engine.requests import Recorded


@dataclass(frozen=True)
class _Step:
    slots: np.ndarray
    positions: np.ndarray
    tokens: torch.Tensor
    logprobs: torch.Tensor
    hidden: torch.Tensor


class TokenRecorder:
    """Rows of the generation under way; they stay on the device until `take`."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []

    def record(
        self,
        slots: np.ndarray,
        positions: np.ndarray,
        tokens: torch.Tensor,
        logprobs: torch.Tensor,
        hidden: torch.Tensor,
    ) -> None:
        """Adds the rows of one engine step.

        Args:
            slots, positions: i64 [R].
            tokens: i64 [R], the tokens sampled.
            logprobs: f32 [R].
            hidden: [R, D], of the engine's dtype; rounded to bf16 here.
        """
        bits = hidden.to(torch.bfloat16, copy=True)
        self._steps.append(_Step(slots, positions, tokens, logprobs, bits))

    def take(self, lengths: Sequence[int]) -> Recorded:
        """Returns the rows of slots 0 .. len(lengths) - 1 and forgets everything.

        Args:
            lengths: output tokens of each slot.

        Raises:
            RuntimeError: a token has no row.
        """
        steps, self._steps = self._steps, []
        wanted = np.asarray(lengths, dtype=np.int64)
        row_of = np.full((len(wanted), int(wanted.max(initial=0)) + 1), -1, dtype=np.int64)
        slots = np.concatenate([s.slots for s in steps] or [wanted[:0]])
        positions = np.concatenate([s.positions for s in steps] or [wanted[:0]])
        # A row past a request's end is one that an asynchronous scheduler ran ahead for.
        (kept,) = np.nonzero(positions < wanted[slots])
        row_of[slots[kept], positions[kept]] = kept  # of equal keys the last one stays
        rows = row_of[np.arange(row_of.shape[1])[None, :] < wanted[:, None]]
        if (rows < 0).any():
            raise RuntimeError(f"{int((rows < 0).sum())} sampled tokens were not recorded")
        if not len(rows):
            return Recorded(b"", b"", b"")
        index = torch.from_numpy(rows)

        def gather(parts: list[torch.Tensor]) -> np.ndarray:
            return torch.cat(parts).cpu()[index].numpy()

        return Recorded(
            tokens=gather([s.tokens for s in steps]).astype(np.int32).tobytes(),
            logprobs=gather([s.logprobs for s in steps]).tobytes(),
            hidden=gather([s.hidden.view(torch.int16) for s in steps]).tobytes(),
        )

    def clear(self) -> None:
        self._steps = []
