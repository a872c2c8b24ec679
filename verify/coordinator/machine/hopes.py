"""Which of the workers that wait may have work now: usually few, and cheaper than to decide."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf

from verify.coordinator.machine import overdue
from verify.coordinator.machine.filling import served_ranks
from verify.coordinator.machine.leases import Rank
from verify.coordinator.machine.state import State


@dataclass(frozen=True)
class Hopes:
    """Whether there may be work for a worker, by its key."""

    state: State
    now: float

    @cached_property
    def served(self) -> set[Rank]:
        """Ranks of workers for which a step has groups."""
        return served_ranks(self.state, self.now)

    @cached_property
    def _oldest(self) -> float:
        return min((record.since for record in self.state.leases.silent), default=inf)

    def __call__(self, key: str) -> bool:
        state, worker = self.state, self.state.workers[key]
        if worker.rank in self.served:
            return True
        pace = worker.pace
        late = pace and self.now >= self._oldest + overdue.OVERDUE_AFTER * pace.lease_s
        if late and any(at <= self.now for at, _ in overdue.overdue_at(state, key)):
            return True
        return any(record.status == "open" for record in state.leases.unsettled.get(key, ()))
