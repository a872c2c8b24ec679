"""Learner islands, whatever happens: the invariants that every sequence of events keeps."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.verify.coordinator.filled import digest
from tests.verify.coordinator.island_run import NAMES, offer, outer
from tests.verify.coordinator.machine.island_rules import Run, named, policy_of
from verify.coordinator.machine.events import (
    CoordinatorStarted,
    Event,
    IllegalTransition,
    OfferReceived,
    OuterResult,
    RolledBack,
    ShareLost,
)
from verify.coordinator.machine.transitions import replay
from verify.formats.islands import CommitRecord, ShareOffered


class Islands(RuleBasedStateMachine):
    """Offers, restarts, rollbacks and time in any order."""

    @initialize(quorum=st.integers(1, 3), bound=st.sampled_from([None, 5.0]))
    def begin(self, quorum: int, bound: float | None) -> None:
        self.run = Run(policy_of(quorum=quorum, max_norm=bound, grace="10s", deadline="50s"))
        self.committed: dict[int, CommitRecord] = {}

    def tick(self) -> None:
        """What the coordinator does after each event and when a time has passed."""
        decision = self.run.decide()
        if decision is None:
            return
        before, now = self.run.islands, self.run.now
        record = self.run.record_commit(decision)
        assert record.step not in self.committed
        self.committed[record.step] = record
        # it has the quorum, and the others had their time
        policy = self.run.of_islands
        assert len(record.contributors) >= policy.quorum
        assert before.quorum_since is not None
        late = [drop for drop in record.dropped if drop.island not in before.offers]
        assert not set(before.lost) & set(named(record.contributors))
        assert not late or now >= before.quorum_since + policy.grace_s
        # each island is named once, and each share is one that was offered and counts
        assert sorted(named(record.contributors) + named(record.dropped)) == sorted(NAMES)
        offers = [before.offers[name].offer for name in named(record.contributors)]
        assert all(not policy.refused(made) for made in offers)
        assert {made.base for made in offers} == {record.base}

    def attempt(self, event: Event) -> None:
        """Records an event that the rules may refuse; then nothing changes."""
        before = self.run.state
        try:
            self.run.record(event)
        except IllegalTransition:
            assert self.run.state is before
        self.tick()

    @rule(
        island=st.sampled_from(NAMES),
        ahead=st.sampled_from([0, 0, 0, -1, 1]),
        norm=st.sampled_from([1.0, 6.0]),
        weight=st.sampled_from([0.0, 1.0]),
        base=st.sampled_from(["", "", "", "other"]),
    )
    def offer(self, island: str, ahead: int, norm: float, weight: float, base: str) -> None:
        step = max(0, self.run.islands.step + ahead)
        changes = {"base": digest(base)} if base else {}
        made: ShareOffered = offer(island, step, norm=norm, weight=weight, **changes)
        self.attempt(OfferReceived(self.run.now, made, "signed"))

    @rule(island=st.sampled_from(NAMES), back=st.integers(0, 2))
    def report(self, island: str, back: int) -> None:
        step = max(0, self.run.islands.step - back)
        self.attempt(OuterResult(self.run.now, step, island, outer(step)))

    @rule(island=st.sampled_from(NAMES), by=st.sampled_from(NAMES), back=st.integers(0, 2))
    def lose(self, island: str, by: str, back: int) -> None:
        newest = self.run.islands.step - 1
        event = ShareLost(self.run.now, max(0, newest + 1 - back), island, by)
        reporters = self.run.islands.reporters
        try:
            self.run.record(event)
        except IllegalTransition:
            return
        # nobody went on from the record that is replaced, and the shares that are left suffice
        assert event.step == newest
        taken_back = self.committed.pop(newest)
        assert island in named(taken_back.contributors)
        reported = reporters & set(named(taken_back.contributors))
        assert len(reported) < max(2, self.run.of_islands.quorum)
        self.tick()
        assert self.run.islands.step == newest + 1 or self.run.islands.quorum_since is not None

    @rule(seconds=st.sampled_from([1.0, 10.0, 60.0]))
    def wait(self, seconds: float) -> None:
        due = self.run.due()
        decided, overdue = self.run.decide(), self.run.overdue()
        self.run.now += seconds
        if due is None or self.run.now < due:  # then nothing was to do in between
            assert (self.run.decide(), self.run.overdue()) == (decided, overdue)
        self.tick()

    @rule()
    def publish(self) -> None:
        newest = self.run.state.newest
        if newest is None or newest.version < self.run.islands.step:
            self.run.publish(self.run.islands.step)
            self.run.advance()

    @rule()
    def restart(self) -> None:
        self.run.record(CoordinatorStarted(self.run.now))
        self.tick()

    @rule(back=st.integers(0, 2))
    def roll_back(self, back: int) -> None:
        version = max(0, self.run.islands.step - back)
        self.run.record(RolledBack(self.run.now, version))
        self.committed = {s: r for s, r in self.committed.items() if s < version}

    @invariant()
    def every_step_is_committed_once_and_in_order(self) -> None:
        assert sorted(self.committed) == list(range(self.run.islands.step))
        assert sorted(self.run.islands.digests) == sorted(self.committed)
        assert self.run.islands.step <= self.run.state.next_close
        assert all(step < self.run.islands.step for step in self.run.islands.results)

    @invariant()
    def the_ledger_gives_the_same_state(self) -> None:
        assert replay(self.run.state.policy, self.run.events) == self.run.state


TestIslands = Islands.TestCase
TestIslands.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
