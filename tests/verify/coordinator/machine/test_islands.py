"""When a step of learner islands is committed, and what cannot be committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.verify.coordinator.filled import Filled, digest
from tests.verify.coordinator.island_run import NAMES, islands_spec, offer, outer, sampled_spec
from tests.verify.coordinator.test_documents import documents_spec
from verify.coordinator.machine import islands
from verify.coordinator.machine.events import (
    CoordinatorStarted,
    Event,
    IllegalTransition,
    IslandsCommitted,
    OfferReceived,
    OuterResult,
    RolledBack,
)
from verify.coordinator.machine.islands import Commit, IslandPolicy, IslandState
from verify.coordinator.machine.stalls import uncommitted, waited_for
from verify.coordinator.machine.state import Policy
from verify.coordinator.machine.transitions import replay
from verify.formats.islands import CommitRecord, ShareOffered, record_digest

GRACE_S, DEADLINE_S = 60.0, 1800.0


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


# -- When a step is committed ----------------------------------------------------------------------


def test_without_a_quorum_in_the_spec_a_step_waits_for_all() -> None:
    run = Run(policy_of())
    assert (run.of_islands.names, run.of_islands.quorum) == (NAMES, 3)
    for island in ("c", "a"):
        run.offer(island)
        run.now += 100.0
        assert run.decide() is None
    assert waited_for(run.state) == "the share of step 0 of island b (no share offered)"
    assert run.islands.missing(run.of_islands) == {"b": "no share offered"}
    # when the last has offered, then the step is committed at once, in the order of the spec
    run.offer("b")
    record = run.commit()
    assert (named(record.contributors), record.dropped, record.previous) == (list(NAMES), [], None)
    assert record.base == digest("outer", 0)
    assert (run.islands.step, run.islands.offers) == (1, {})


def test_after_the_quorum_others_have_the_grace_time_and_are_named() -> None:
    run = Run(policy_of(quorum=2))
    run.offer("c")
    run.now += 500.0
    assert (run.decide(), run.due()) == (None, run.now - 500.0 + DEADLINE_S)
    run.offer("b")
    reached = run.now
    assert (run.decide(), run.due()) == (None, reached + GRACE_S)
    run.now = reached + GRACE_S - 1.0
    assert run.decide() is None
    run.now = reached + GRACE_S
    record = run.commit()
    assert named(record.contributors) == ["b", "c"]
    assert [(drop.island, drop.reason) for drop in record.dropped] == [
        ("a", "no share offered, 60 s after the quorum of 2")
    ]
    tally = run.islands.tallies["a"]
    assert (tally.dropped, tally.last_dropped[:7]) == (1, "step 0:")
    assert run.islands.tallies["b"].bytes == 400


def test_the_next_record_names_the_one_before() -> None:
    run = Run(policy_of(quorum=1, grace="1s"))
    previous = None
    for step in range(3):
        run.offer("a")
        run.now += 1.0
        record = run.commit()
        assert (record.step, record.previous) == (step, previous)
        previous = record_digest(run.islands.records[step].encode())
        run.publish(step + 1)
        run.advance()


def test_a_share_above_the_bound_on_the_norm_does_not_count() -> None:
    run = Run(policy_of(quorum=2, max_norm=5.0))
    run.offer("a", norm=5.5)
    run.offer("b")
    run.now += 100.0
    assert run.decide() is None
    # when all have offered, then nobody waits for the grace time
    run.offer("c")
    record = run.commit()
    assert named(record.contributors) == ["b", "c"]
    (drop,) = record.dropped
    assert drop.reason == "its share has norm 5.5, learner.islands.max_norm is 5"


def test_a_later_offer_of_an_island_replaces_its_earlier_one() -> None:
    run = Run(policy_of(quorum=2, max_norm=5.0))
    run.offer("a")
    run.offer("b")
    reached = run.now
    run.now += 50.0
    run.offer("a", share=digest("again"), base=digest("outer", 0))
    # then the grace time counts from the first quorum
    assert run.islands.quorum_since == reached
    run.offer("b", norm=9.0)
    assert run.islands.quorum_since is None
    run.now += 1.0
    run.offer("b")
    assert run.islands.quorum_since == run.now
    run.now += GRACE_S
    record = run.commit()
    assert record.contributors[0].share == digest("again")


def test_weights_of_nothing_but_zero_are_not_committed() -> None:
    run = Run(policy_of(quorum=2))
    run.offer("a", weight=0.0)
    run.offer("b", weight=0.0)
    run.now += GRACE_S
    assert run.decide() is None
    run.offer("c")
    assert named(run.commit().contributors) == list(NAMES)


# -- Deadline and restarts -------------------------------------------------------------------------


def test_a_missing_quorum_stalls_the_run_and_names_who_is_missing() -> None:
    run = Run(policy_of(quorum=2, max_norm=5.0))
    # given islands that train for long: nobody waits for anybody yet
    run.now += 100 * DEADLINE_S
    assert (run.overdue(), run.due()) == (False, None)
    run.offer("b", norm=6.0)
    run.now += DEADLINE_S - 1.0
    assert not run.overdue()
    run.now += 1.0
    assert run.overdue()
    stalled = uncommitted(run.state, run.now)
    assert stalled.reason == (
        "step 0 stalled: not committed 1800 s after the first share; waited for island a (no share "
        "offered), island b (its share has norm 6, learner.islands.max_norm is 5), island c (no "
        "share offered)"
    )
    assert "learner.islands.deadline" in stalled.remedy


def test_a_quorum_is_no_stall_however_long_the_grace() -> None:
    run = Run(policy_of(quorum=1, grace="2h"))
    run.offer("a")
    run.now += 2 * DEADLINE_S
    assert not run.overdue() and run.decide() is None
    run.now += 7200.0
    assert run.decide() is not None


def test_a_restart_of_the_coordinator_restarts_grace_and_deadline() -> None:
    run = Run(policy_of(quorum=2))
    run.record(CoordinatorStarted(run.now))
    assert run.due() is None
    run.offer("a")
    run.now += DEADLINE_S - 1.0
    run.record(CoordinatorStarted(run.now))
    run.now += 1.0
    assert not run.overdue()
    run.offer("b")
    run.now += GRACE_S - 1.0
    run.record(CoordinatorStarted(run.now))
    run.now += GRACE_S - 1.0
    assert run.decide() is None
    run.now += 1.0
    assert run.decide() is not None


def test_the_status_names_the_islands_when_every_step_is_closed() -> None:
    run = Run(policy_of(steps=1))
    run.offer("a")
    run.offer("b")
    assert run.state.finished
    assert waited_for(run.state) == "the share of step 0 of island c (no share offered)"
    run.offer("c")
    run.commit()
    assert waited_for(run.state) == "nobody: every step is closed"


def test_a_run_that_samples_has_islands_too() -> None:
    policy = Policy.of(sampled_spec(quorum=2))
    assert policy.islands is not None and policy.islands.quorum == 2
    assert Policy.of(documents_spec()).islands is None


# -- What cannot stand -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base": digest("other")}, "islands b and a differ at step 0: outer state"),
        ({"data": digest("other")}, "islands b and a differ at step 0: data"),
        ({"data": ""}, "against"),
        ({"bytes": 401}, "size of the share 401 bytes, against 400 bytes"),
    ],
)
def test_an_offer_that_contradicts_another_names_both(changes: dict[str, Any], words: str) -> None:
    run = Run(policy_of())
    run.offer("a")
    made = offer("b", **changes)
    assert words in islands.conflict(run.islands, made)
    with pytest.raises(IllegalTransition, match=words):
        run.offer("b", **changes)
    # an island may contradict what it offered itself
    run.offer("a", **changes)


def test_an_offer_starts_where_the_step_before_ended() -> None:
    run = Run(policy_of(quorum=1, grace="1s"))
    run.offer("a")
    run.now += 1.0
    run.commit()
    run.record(OuterResult(run.now, 0, "c", outer(0)))
    fault = islands.conflict(run.islands, offer("a", 1, base=digest("other")))
    assert "island a starts step 1" in fault and "island c reported" in fault
    run.offer("a")


@pytest.mark.parametrize("step", [1, 7])
def test_offers_are_taken_for_the_next_step_only(step: int) -> None:
    run = Run(policy_of())
    with pytest.raises(IllegalTransition, match=f"an offer for step {step}"):
        run.offer("a", step=step)


def test_offers_need_a_signed_manifest_and_an_island_of_the_spec() -> None:
    run = Run(policy_of())
    with pytest.raises(IllegalTransition, match="no island z"):
        run.offer("z")
    early = Filled(policy_of())
    with pytest.raises(IllegalTransition, match="an offer for step 0"):
        early.record(OfferReceived(early.now, offer("a"), "signed"))


def test_a_run_with_one_learner_has_no_islands() -> None:
    run = Filled(Policy.of(documents_spec()))
    with pytest.raises(IllegalTransition, match="one learner"):
        run.record(OfferReceived(run.now, offer("a"), "signed"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": 1}, "out of order"),
        ({"previous": digest("other")}, "another record"),
        ({"contributors": []}, "each island once"),
        ({"dropped": []}, "each island once"),
        ({"base": digest("other")}, "another base"),
    ],
)
def test_other_commits_are_refused(changes: dict[str, Any], words: str) -> None:
    run = Run(policy_of(quorum=2))
    run.offer("a")
    run.offer("b")
    run.now += GRACE_S
    decision = run.decide()
    assert decision is not None
    with pytest.raises(IllegalTransition, match=words):
        run.record_commit(decision, **changes)
    swapped = list(reversed(decision.contributors))
    with pytest.raises(IllegalTransition, match="in order"):
        run.record_commit(decision, contributors=swapped)
    other = [replace(decision.contributors[0], weight=1e6), decision.contributors[1]]
    with pytest.raises(IllegalTransition, match="island a did not offer this share"):
        run.record_commit(decision, contributors=other)
    run.record_commit(decision)
    with pytest.raises(IllegalTransition, match="out of order"):
        run.record_commit(decision)


def test_an_outer_state_is_recorded_once_and_after_its_commit() -> None:
    run = Run(policy_of(quorum=1, grace="1s"))
    with pytest.raises(IllegalTransition, match="not committed"):
        run.record(OuterResult(run.now, 0, "a", outer(0)))
    run.offer("a")
    run.now += 1.0
    run.commit()
    run.record(OuterResult(run.now, 0, "a", outer(0)))
    with pytest.raises(IllegalTransition, match="a second outer state"):
        run.record(OuterResult(run.now, 0, "b", outer(0)))


def test_a_rollback_takes_the_islands_back_with_the_run() -> None:
    run = Run(policy_of(quorum=1, grace="1s"))

    def step() -> CommitRecord:
        run.publish(run.islands.step) if run.islands.step else None
        run.advance()
        run.offer("a")
        run.now += 1.0
        made = run.commit()
        run.record(OuterResult(run.now, made.step, "a", outer(made.step)))
        return made

    for _ in range(4):
        step()
    kept = dict(run.islands.digests)
    for _ in range(2):
        # when the run goes back to version 2, then steps 0 and 1 stay committed
        run.record(RolledBack(run.now, 2))
        assert (run.islands.step, run.islands.offers, len(run.islands.records)) == (2, {}, 0)
        assert sorted(run.islands.results) == [0, 1]
        assert run.islands.previous == kept[1]
        assert step().previous == kept[1]
        assert sorted(run.islands.results) == [0, 1, 2]


# -- Whatever happens ------------------------------------------------------------------------------


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
