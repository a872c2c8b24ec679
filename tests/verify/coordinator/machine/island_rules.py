"""A run with islands without IO: the decisions become events, as in the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.verify.coordinator.filled import Filled, digest
from tests.verify.coordinator.island_run import islands_spec, offer
from verify.coordinator.machine import islands
from verify.coordinator.machine.events import IslandsCommitted, OfferReceived
from verify.coordinator.machine.islands import Commit, IslandPolicy, IslandState
from verify.coordinator.machine.state import Policy
from verify.formats.islands import CommitRecord


def policy_of(**settings: Any) -> Policy:
    return Policy.of(islands_spec(**settings))


class Run(Filled):
    """A run with islands; each step is closed as soon as a version allows it."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        assert policy.islands is not None
        self.of_islands: IslandPolicy = policy.islands
        self.publish(0)
        self.advance()

    @property
    def islands(self) -> IslandState:
        return self.state.islands

    def offer(self, island: str, **changes: Any) -> None:
        made = offer(island, **{"step": self.islands.step, **changes})
        self.record(OfferReceived(self.now, made, "signed"))

    def decide(self) -> Commit | None:
        return islands.decide_commit(self.of_islands, self.islands, self.now)

    def commit(self) -> CommitRecord:
        """Records what is decided, as the coordinator does."""
        decision = self.decide()
        assert decision is not None
        return self.record_commit(decision)

    def record_commit(self, decision: Commit, **changes: Any) -> CommitRecord:
        record = CommitRecord(
            *(self.state.policy.run, decision.step, decision.base, self.of_islands.codec),
            *(decision.contributors, decision.dropped, self.islands.previous),
            *(len(self.events), digest("chain")),
        )
        record = replace(record, **changes)
        self.record(IslandsCommitted(self.now, record, f"signed {len(self.events)}"))
        return record

    def overdue(self) -> bool:
        return islands.overdue(self.of_islands, self.islands, self.now)

    def due(self) -> float | None:
        return islands.next_due(self.of_islands, self.islands, self.now)


def named(found: Sequence[Any]) -> list[str]:
    return [each.island for each in found]
