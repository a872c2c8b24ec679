"""Learner islands: what every sequence of events keeps, and when a step is committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.verify.coordinator.documents import documents_spec
from tests.verify.coordinator.filled import STEADY, Filled, digest
from tests.verify.coordinator.island_run import NAMES, islands_spec, offer, outer, sampled_spec
from verify.coordinator.machine import events, islands
from verify.coordinator.machine.events import IllegalTransition
from verify.coordinator.machine.islands import Commit, IslandPolicy, IslandState, IslandTally
from verify.coordinator.machine.stalls import uncommitted, waited_for
from verify.coordinator.machine.state import Policy
from verify.coordinator.machine.transitions import replay
from verify.formats.batch import CommitRecord, Dropped, ShareOffered

GRACE_S, DEADLINE_S = 60.0, 1800.0


def policy_of(**settings: Any) -> Policy:
    return Policy.of(islands_spec(**settings))


class Run(Filled):
    """A run with islands, without IO; each step is closed as soon as a version allows it."""

    def __init__(self, **settings: Any) -> None:
        policy = policy_of(**settings)
        super().__init__(policy)
        assert policy.islands is not None
        self.of_islands: IslandPolicy = policy.islands
        self.publish(0)
        self.advance()

    @property
    def islands(self) -> IslandState:
        return self.state.islands

    def offer(self, *names: str, **changes: Any) -> None:
        for name in names:
            made = offer(name, **{"step": self.islands.step, **changes})
            self.record(events.OfferReceived(self.now, made, "signed"))

    def report(self, *names: str, step: int = 0) -> None:
        for name in names:
            self.record(events.OuterResult(self.now, step, name, outer(step)))

    def lose(self, island: str, by: str, step: int = 0) -> None:
        self.record(events.ShareLost(self.now, step, island, by))

    def decide(self) -> Commit | None:
        return islands.decide_commit(self.of_islands, self.islands, self.now)

    def commit(self, **changes: Any) -> CommitRecord:
        """Records what is decided, as the coordinator does."""
        decision = self.decide()
        assert decision is not None
        record = CommitRecord(
            *(self.state.policy.run, decision.step, decision.base, self.of_islands.codec),
            *(decision.contributors, decision.dropped, self.islands.previous),
            *(len(self.events), digest("chain")),
        )
        record = replace(record, **changes)
        self.record(events.IslandsCommitted(self.now, record, f"signed {len(self.events)}"))
        return record

    def overdue(self) -> bool:
        return islands.overdue(self.of_islands, self.islands, self.now)

    def due(self) -> float | None:
        return islands.next_due(self.of_islands, self.islands, self.now)


def named(found: Sequence[Any]) -> list[str]:
    return [each.island for each in found]


class Islands(RuleBasedStateMachine):
    """Offers, restarts, rollbacks and time in any order."""

    @initialize(quorum=st.integers(1, 3), bound=st.sampled_from([None, 5.0]))
    def begin(self, quorum: int, bound: float | None) -> None:
        self.run = Run(quorum=quorum, max_norm=bound, grace="10s", deadline="50s")
        self.committed: dict[int, CommitRecord] = {}

    def tick(self) -> None:
        """What the coordinator does after each event and when a time has passed."""
        before, now, policy = self.run.islands, self.run.now, self.run.of_islands
        if self.run.decide() is None:
            # nobody waits for the grace time when all have offered, unless too little counts
            counted = before.counted(policy)
            few = len(counted) < policy.quorum or not any(made.weight for made in counted)
            assert few or len(before.offers) < len(NAMES)
            return
        record = self.run.commit()
        assert record.step == before.step and record.step not in self.committed
        earlier = self.run.islands.digests.get(record.step - 1)
        assert record.previous == before.previous == earlier
        self.committed[record.step] = record
        assert self.run.islands.lost == {}  # of the next step every share counts again
        # it has the quorum, and the others had their time
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
        assert sum(made.weight for made in offers) > 0.0
        self.run.advance()

    def attempt(self, event: events.Event) -> None:
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
        self.attempt(events.OfferReceived(self.run.now, made, "signed"))

    @rule(island=st.sampled_from(NAMES), back=st.integers(0, 2))
    def report(self, island: str, back: int) -> None:
        step = max(0, self.run.islands.step - back)
        self.attempt(events.OuterResult(self.run.now, step, island, outer(step)))

    @rule(island=st.sampled_from(NAMES), by=st.sampled_from(NAMES), back=st.integers(0, 2))
    def lose(self, island: str, by: str, back: int) -> None:
        newest = self.run.islands.step - 1
        event = events.ShareLost(self.run.now, max(0, newest + 1 - back), island, by)
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
        self.run.record(events.CoordinatorStarted(self.run.now))
        self.tick()

    @rule(back=st.integers(0, 2))
    def roll_back(self, back: int) -> None:
        before = self.run.islands
        version = max(0, before.step - back)
        self.run.record(events.RolledBack(self.run.now, version))
        after = self.run.islands
        assert (after.step, after.offers, len(after.records)) == (version, {}, 0)
        assert (after.tallies, after.previous) == (before.tallies, before.digests.get(version - 1))
        self.committed = {s: r for s, r in self.committed.items() if s < version}

    @invariant()
    def every_step_is_committed_once_and_in_order(self) -> None:
        assert sorted(self.committed) == list(range(self.run.islands.step))
        assert sorted(self.run.islands.digests) == sorted(self.committed)
        state, committed = self.run.state, self.run.islands.step
        assert committed <= state.next_close
        # steps are signed although nobody publishes, and no more ahead than usual
        if state.newest is not None:
            last = max(state.newest.version, committed) + 1 + state.policy.async_level
            assert min(committed + 1, state.policy.steps) <= state.next_close <= last
        assert all(step < self.run.islands.step for step in self.run.islands.results)

    def teardown(self) -> None:
        if hasattr(self, "run"):
            assert replay(self.run.state.policy, self.run.events) == self.run.state


TestIslands = Islands.TestCase
TestIslands.settings = settings(STEADY, max_examples=60)


# -- When a step is committed --------------------------------------------------------------------


def test_without_a_quorum_in_the_spec_a_step_waits_for_all() -> None:
    run = Run(steps=1)
    assert (run.of_islands.names, run.of_islands.quorum) == (NAMES, 3)
    for island in ("c", "a"):
        run.offer(island)
        run.now += 100.0
        assert run.decide() is None
    assert run.state.finished
    assert waited_for(run.state) == "the share of step 0 of island b (no share offered)"
    # when the last has offered, then the step is committed at once, in the order of the spec
    run.offer("b")
    record = run.commit()
    assert (named(record.contributors), record.dropped, record.previous) == (list(NAMES), [], None)
    assert (record.base, record.codec) == (digest("outer", 0), "float16")
    assert (run.islands.step, run.islands.offers) == (1, {})
    assert waited_for(run.state) == "nobody: every step is closed"


def test_after_the_quorum_others_have_the_grace_time_and_are_named() -> None:
    run = Run(quorum=2)
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
    reason = "no share offered, 60 s after the quorum of 2"
    assert named(record.contributors) == ["b", "c"]
    assert record.dropped == [Dropped("a", reason)]
    assert run.islands.tallies == {
        "a": IslandTally(dropped=1, last_dropped=f"step 0: {reason}"),
        "b": IslandTally(committed=1, bytes=400),
        "c": IslandTally(committed=1, bytes=400),
    }


def test_a_later_offer_of_an_island_replaces_its_earlier_one() -> None:
    run = Run(quorum=2, max_norm=5.0)
    run.offer("a", "b")
    reached = run.now
    run.now += 50.0
    run.offer("a", share=digest("again"))
    # then the grace time counts from the first quorum
    assert run.islands.quorum_since == reached
    run.offer("b", norm=9.0)
    assert run.islands.quorum_since is None
    run.now += 1.0
    run.offer("b")
    assert run.islands.quorum_since == run.now
    run.now += GRACE_S
    assert run.commit().contributors[0].share == digest("again")


# -- Deadline and restarts -----------------------------------------------------------------------


def test_a_missing_quorum_stalls_the_run_and_names_who_is_missing() -> None:
    run = Run(quorum=2, max_norm=5.0)
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
    # and a quorum is no stall, however long the grace
    run = Run(quorum=1, grace="2h")
    run.offer("a")
    run.now += 2 * DEADLINE_S
    assert not run.overdue() and run.decide() is None


def test_a_restart_of_the_coordinator_restarts_grace_and_deadline() -> None:
    run = Run(quorum=2)
    run.record(events.CoordinatorStarted(run.now))
    assert run.due() is None
    run.offer("a")
    run.now += DEADLINE_S - 1.0
    run.record(events.CoordinatorStarted(run.now))
    run.now += 1.0
    assert not run.overdue()
    run.offer("b")
    run.now += GRACE_S - 1.0
    run.record(events.CoordinatorStarted(run.now))
    run.now += GRACE_S - 1.0
    assert run.decide() is None
    run.now += 1.0
    assert run.decide() is not None


def test_the_policy_is_the_specs_whatever_the_run_trains_on() -> None:
    policy = Policy.of(sampled_spec(quorum=2)).islands
    assert policy == IslandPolicy(*(NAMES, 2, GRACE_S, DEADLINE_S, "float16", None, 2.0 * GRACE_S))
    assert Policy.of(documents_spec()).islands is None


# -- What cannot stand ---------------------------------------------------------------------------


def offered() -> Run:
    """A quorum whose grace is over."""
    run = Run(quorum=2)
    run.offer("a", "b")
    run.now += GRACE_S
    return run


def committed(**settings: Any) -> Run:
    """A step to which all islands contributed."""
    run = Run(**{"quorum": 2, **settings})
    run.offer(*NAMES)
    run.commit()
    return run


def reported() -> Run:
    """A step that one island has made."""
    run = committed(quorum=1)
    run.report("c")
    return run


def weightless() -> Run:
    """A step to which one share with a weight contributed, and two without."""
    run = Run(quorum=2)
    run.offer("a")
    run.offer("b", "c", weight=0.0)
    run.commit()
    return run


OTHER = digest("other")
DECIDED = offered().decide()
assert DECIDED is not None
A, B = DECIDED.contributors


@pytest.mark.parametrize(
    ("run_of", "act", "words"),
    [
        (Run, lambda run: run.offer("a", step=1), "an offer for step 1"),
        (Run, lambda run: run.offer("z"), "no island z"),
        (Run, lambda run: run.report("a"), "not committed"),
        (offered, lambda run: run.offer("c", base=OTHER), "c and a differ at step 0: outer state"),
        (offered, lambda run: run.offer("c", data=OTHER), "c and a differ at step 0: data"),
        (offered, lambda run: run.offer("c", data=""), "data none, against"),
        (offered, lambda run: run.offer("c", bytes=401), "share 401 bytes, against 400 bytes"),
        (offered, lambda run: run.commit(step=1), "step 1 is committed out of order"),
        (offered, lambda run: run.commit(previous=OTHER), "another record"),
        (offered, lambda run: run.commit(contributors=[]), "each island once"),
        (offered, lambda run: run.commit(dropped=[]), "each island once"),
        (offered, lambda run: run.commit(contributors=[B, A]), "in order"),
        (offered, lambda run: run.commit(contributors=[replace(A, weight=2), B]), "a did not"),
        (offered, lambda run: run.commit(contributors=[replace(A, island="c"), B]), "c did not"),
        (offered, lambda run: run.commit(base=OTHER), "island a has another base"),
        (committed, lambda run: run.lose("z", by="b"), "of step 0 does not name island z"),
        (committed, lambda run: run.lose("a", by="b", step=1), "step 1 is open"),
        (weightless, lambda run: run.lose("a", by="b"), "shares of step 0 do not suffice"),
        (reported, lambda run: run.offer("a", base=OTHER), "a starts step 1 .* island c reported"),
        (
            reported,
            lambda run: run.record(events.OuterResult(0.0, 0, "b", OTHER)),
            "a second outer state",
        ),
        (reported, lambda run: run.report("c"), "a report that is not needed"),
    ],
)
def test_what_cannot_follow_is_refused_by_name(run_of: Any, act: Any, words: str) -> None:
    run = run_of()
    with pytest.raises(IllegalTransition, match=words):
        act(run)


def test_an_island_may_contradict_its_own_offer_and_none_is_taken_without_islands() -> None:
    run = Run()
    run.offer("a")
    run.offer("a", base=OTHER, data=OTHER, bytes=1)
    for policy, words in (
        (policy_of(), "an offer for step 0"),  # no manifest is signed
        (Policy.of(documents_spec()), "one learner"),
    ):
        with pytest.raises(IllegalTransition, match=words):
            Filled(policy).record(events.OfferReceived(0.0, offer("a"), "signed"))


# -- Lost shares, and when a record is final -----------------------------------------------------


@pytest.mark.parametrize(
    ("quorum", "reporters", "waited_s", "final_after_s"),
    [
        (2, "", 1e9, None),  # nobody goes on before somebody has reported
        (2, "a", 2.0 * GRACE_S - 1.0, 2.0 * GRACE_S),
        (2, "a", 2.0 * GRACE_S, 2.0 * GRACE_S),
        (2, "ab", 0.0, 0.0),
        (1, "b", 2.0 * GRACE_S - 1.0, 2.0 * GRACE_S),  # one alone is no quorum
        (3, "", 0.0, 0.0),  # all its shares are needed
    ],
)
def test_a_record_is_final_once_the_quorum_or_some_time_after_the_first_has_reported(
    quorum: int, reporters: str, waited_s: float, final_after_s: float | None
) -> None:
    run = committed(quorum=quorum)
    begun = run.now
    for name in reporters:
        assert islands.is_awaited(run.islands, 0, name)
        run.report(name)
        assert not islands.is_awaited(run.islands, 0, name)
    final = islands.final_at(run.of_islands, run.islands, 0)
    assert final == (begun + final_after_s if final_after_s else final_after_s)
    run.now += waited_s
    if final is not None and run.now >= final:
        with pytest.raises(IllegalTransition, match="its record is final"):
            run.lose("b", by="c")
    else:
        run.lose("b", by="c")
