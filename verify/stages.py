"""What a validator is doing, to which submissions, and since when: a check without end is named.

Nothing ends a thread that hangs in C. So another thread looks here now and then (`overdue`), and
where a stage has taken longer than it may, it says so to the coordinator and ends the process.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

DEADLINES_S = {
    "decoding": 300.0,
    "rows": 300.0,
    "grading": 7200.0,
    "prefill": 7200.0,
    "prefill checks": 300.0,
    "duplicates": 300.0,
}
"""Far above what the largest legal submission takes (docs/verify.md): whatever takes longer hangs.
The sandbox has deadlines of its own, and a prefill compiles and may be long."""


@dataclass(frozen=True)
class Stage:
    name: str
    submissions: tuple[str, ...]
    """Digests of those that it is about: more than one where they share a prefill."""
    begun: float
    """`time.monotonic()`."""


class Stages:
    """One thread passes through them, any other may look."""

    def __init__(self) -> None:
        self._current: Stage | None = None
        self.spent_s: dict[str, float] = defaultdict(float)
        """By stage, in all."""

    @contextmanager
    def of(self, name: str, *submissions: str) -> Iterator[None]:
        """The stage that the block is."""
        begun = time.monotonic()
        self._current = Stage(name, submissions, begun)
        try:
            yield
        finally:
            self._current = None
            self.spent_s[name] += time.monotonic() - begun

    @property
    def current(self) -> Stage | None:
        """What is being done."""
        return self._current

    def overdue(self) -> Stage | None:
        """The current stage, if it should have ended long ago."""
        stage = self._current
        if stage is None or time.monotonic() < stage.begun + DEADLINES_S[stage.name]:
            return None
        return stage
