"""Strangers that look at their leases and answer the best ones alone.

The coordinator's own decisions, without its IO. The reward of each group is a uniform draw that its
key knows at once. A key answers a lease whose draw is among the best tenth, and its verdict comes
at once. Else it keeps silent, or gives the lease back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random

import pytest

from tests.verify.coordinator.filled import Filled, policy
from verify.coordinator.machine.state import LeaseRecord, Rank

GROUPS, NEWCOMER_GROUPS, LEASE_S = 16, 8, 30.0
BEST = 0.9
STEPS, KEYS = 30, 100


@dataclass
class Step:
    """One step: what strangers saw of it, and what it trains."""

    seconds: float = 0.0
    unanswered: dict[Rank, int] = field(default_factory=lambda: dict.fromkeys(Rank, 0))
    """Groups that strangers were leased and did not answer, by the rank of the lease."""
    answered: int = 0
    """Groups of strangers."""
    chosen: float = 0.0
    """Share of what it trains that strangers chose."""
    reward: float = 0.0
    """Mean of what it trains; that of all draws is 0.5."""


class Crowd:
    """One known worker, and strangers that choose.

    Args:
        step_s: in which the known worker alone fills a step.
        give_back: whether strangers give back what they do not answer; else they keep silent.
    """

    def __init__(self, step_s: float, *, give_back: bool) -> None:
        self.run = Filled(
            policy(
                steps=STEPS + 1,
                groups=GROUPS,
                min_groups=GROUPS,
                max_groups=100_000,
                async_level=0,
                deadline_s=1e9,
                lease_timeout_s=LEASE_S,
                newcomer_groups=NEWCOMER_GROUPS,
                groups_per_submission={"a": 1},
            )
        )
        self._tick, self._give_back, self._dice = step_s / GROUPS, give_back, Random(1)
        self._draws: dict[str, float] = {}
        self._strangers: list[str] = []
        self.run.register("known", own=True)
        self.run.publish(0)
        self.step()  # by the known worker alone
        self._strangers = [f"s{number}" for number in range(KEYS)]
        for name in self._strangers:
            self.run.register(name, own=False)

    def step(self) -> Step:
        """Fills a step: strangers ask first whenever the known worker asks."""
        step, begun, theirs = Step(), self.run.now, set[str]()
        while True:
            for name in self._strangers:
                while (record := self._lease(name)) is not None:
                    theirs.add(record.digest)
                    self._choose(record, step)
            working = self._lease("known")
            self.run.now += self._tick
            if working is not None:
                self.run.answer(working)
            if closed := self.run.advance():
                break
        trained = [group.lease for group in closed[0].groups]
        step.seconds = self.run.now - begun
        step.chosen = sum(lease in theirs for lease in trained) / GROUPS
        step.reward = sum(self._draws[lease] for lease in trained) / GROUPS
        self.run.publish(closed[0].step + 1)
        return step

    def _lease(self, name: str) -> LeaseRecord | None:
        """A lease that nobody has seen."""
        record = self.run.lease(name, holding=self._draws)
        if record is None or record.digest in self._draws:
            return None
        self._draws[record.digest] = self._dice.random()
        return record

    def _choose(self, record: LeaseRecord, step: Step) -> None:
        if self._draws[record.digest] >= BEST:
            self.run.answer(record)
            step.answered += record.lease.groups
            return
        step.unanswered[record.rank] += record.lease.groups
        if self._give_back:
            self.run.release(record)


def steps_of(step_s: float, *, give_back: bool) -> list[Step]:
    """What a hundred strangers made of thirty steps."""
    crowd = Crowd(step_s, give_back=give_back)
    return [crowd.step() for _ in range(STEPS)]


class TestChoosingAmongLeases:
    """A hundred keys answer the best tenth of what they are leased."""

    @pytest.mark.parametrize("give_back", [False, True], ids=["silent", "gives back"])
    @pytest.mark.parametrize("step_s", [LEASE_S / 10, 3 * LEASE_S], ids=["short", "long"])
    def test_leases_seen_and_not_answered_are_bounded_a_step(
        self, step_s: float, give_back: bool
    ) -> None:
        delivered = wasted = 0
        for step in steps_of(step_s, give_back=give_back):
            # then new keys see so many of a step, however many they are
            looks = NEWCOMER_GROUPS * (1 + math.ceil(step_s / LEASE_S))
            assert step.unanswered[Rank.NEW] <= looks
            # and those with a record no more than was accepted of them
            delivered += step.answered
            wasted += step.unanswered[Rank.RECORDED]
            assert wasted <= delivered
            # and the known worker closes it
            assert step.seconds <= 1.5 * step_s
