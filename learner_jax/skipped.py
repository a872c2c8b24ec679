"""Which rollouts were in an update that was skipped, because it would not have been finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils

from learner_jax.packing import Packed

NAMED = 8
"""Rollouts that a message names; the rest are counted."""


@dataclass(frozen=True)
class RolloutName:
    """Where a person finds a rollout again."""

    submission: str
    """Digest of its submission."""
    group: int
    sample: int

    def __str__(self) -> str:
        return f"{self.submission[:16]} group {self.group} sample {self.sample}"


@dataclass(frozen=True)
class SkippedUpdate:
    """An update that was not made."""

    update: int
    """Of the step, from 0."""
    rollouts: tuple[RolloutName, ...]
    """Those with a number that is not finite; all of the update where no number tells."""
    told: bool
    """By their numbers."""

    def __str__(self) -> str:
        names = "; ".join(str(name) for name in self.rollouts[:NAMED])
        more = f" and {len(self.rollouts) - NAMED} more" if len(self.rollouts) > NAMED else ""
        which = "numbers that are not finite in" if self.told else "finite log-probs, in it were"
        return f"update {self.update} skipped, loss or gradient not finite: {which} {names}{more}"


def skipped_update(
    update: int, names: Sequence[RolloutName], packed: Packed, arrays: Sequence[jax.Array]
) -> SkippedUpdate:
    """Looks for the rollouts that made an update not finite.

    Attention does not cross samples, so a rollout spoils only its own log-probs.

    Args:
        update: its number in the step.
        names: of the rollouts, in the order of the samples in `packed`.
        packed: the update's rows.
        arrays: per-token values, float32 [M, rows, tokens]; where they may be sharded over
            processes, all of them call this.
    """
    finite = np.ones(packed.batch.tokens.shape, bool)
    for array in arrays:
        finite &= np.isfinite(multihost_utils.process_allgather(array, tiled=True))
    bad = [name for name, ok in zip(names, packed.gather(finite), strict=True) if not ok.all()]
    return SkippedUpdate(update, tuple(bad or names), told=bool(bad))
