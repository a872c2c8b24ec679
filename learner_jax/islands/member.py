"""Interface between the learner's loop and an island, and its answers for a run without them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from learner_jax.step import TrainState


class Member(Protocol):
    """An island as the learner's loop sees it; methods are collective over its processes."""

    @property
    def version(self) -> int:
        """Newest committed version."""

    @property
    def joined(self) -> bool:
        """Whether it began at an outer state of another island."""

    @property
    def last(self) -> dict[str, Any] | None:
        """Figures of the last commit for a step's line of metrics; None for a run with one
        learner."""

    def begin(
        self, state: TrainState, step: int, stored: Mapping[str, np.ndarray]
    ) -> tuple[TrainState, int]:
        """Return the state and the step in which the loop begins.

        Args:
            state: of the newest full state, or of version 0.
            step: its number.
            stored: arrays beside the full state; empty at version 0.

        Raises:
            Stopped: this process was told to end while it waited.
        """

    def join(self, state: TrainState) -> tuple[TrainState, int]:
        """Return the state and the step of an island that begins at another one's outer state.

        Args:
            state: of any step; its parameters and moments are replaced.

        Raises:
            Stopped: this process was told to end while it waited.
        """

    def sits_out(self, step: int) -> bool:
        """Return whether a step is committed without this island: it need not train it."""

    def end_step(self, step: int, state: TrainState, weight: float | None) -> TrainState:
        """Give this island's share of a step, and follow the commits that are due.

        Args:
            step: the step that ends.
            state: the training state after it; of a step that the island sat out, before it.
            weight: loss denominator of what was trained, 0 for nothing; None where the island sat
                the step out.

        Returns:
            The state in which the next step begins.

        Raises:
            Behind: this island can only `join` anew.
            Stopped: this process was told to end while it waited.
        """

    def sent(self, step: int) -> bool:
        """Return whether the share of a step is sent and its record has not come.

        A full state may be written then: the next start waits for the record.
        """

    def weights(self, state: TrainState) -> Any:
        """Return the masters of the newest committed version."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what a full state stores beside the training state."""


class Alone:
    """The learner of a run without islands: each step is committed as it ends."""

    joined = False
    last = None

    def __init__(self) -> None:
        self.version = 0

    def begin(
        self, state: TrainState, step: int, stored: Mapping[str, np.ndarray]
    ) -> tuple[TrainState, int]:
        self.version = step
        return state, step

    def join(self, state: TrainState) -> tuple[TrainState, int]:
        return state, self.version  # there is nobody to join

    def sits_out(self, step: int) -> bool:
        return False

    def end_step(self, step: int, state: TrainState, weight: float | None) -> TrainState:
        self.version = step + 1
        return state

    def sent(self, step: int) -> bool:
        return False

    def weights(self, state: TrainState) -> Any:
        return state.params

    def arrays(self) -> dict[str, np.ndarray]:
        return {}
