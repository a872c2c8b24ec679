"""When a step of learner islands is committed, and what cannot be committed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.verify.coordinator.documents import documents_spec
from tests.verify.coordinator.filled import Filled, digest
from tests.verify.coordinator.island_run import NAMES, offer, outer, sampled_spec
from tests.verify.coordinator.machine.island_rules import Run, named, policy_of
from verify.coordinator.machine import islands
from verify.coordinator.machine.events import (
    CoordinatorStarted,
    IllegalTransition,
    OfferReceived,
    OuterResult,
    RolledBack,
    ShareLost,
)
from verify.coordinator.machine.stalls import uncommitted, waited_for
from verify.coordinator.machine.state import Policy
from verify.formats.islands import CommitRecord, Dropped, record_digest

GRACE_S, DEADLINE_S = 60.0, 1800.0


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


def test_steps_go_on_while_nobody_publishes_versions() -> None:
    # given a run whose first island is away, after version 0
    run = Run(policy_of(quorum=2))
    for step in range(4):
        # then each step is signed once those before are committed, and no more ahead than usual
        assert step < run.state.next_close <= step + 1 + run.state.policy.async_level
        for island in ("b", "c"):
            run.offer(island)
        run.now += GRACE_S
        run.commit()
        run.advance()


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
        run.record(OuterResult(run.now, 0, "b", digest("other")))
    with pytest.raises(IllegalTransition, match="a report that is not needed"):
        run.record(OuterResult(run.now, 0, "b", outer(0)))


def test_a_share_that_is_lost_gives_the_step_another_record() -> None:
    # given a step of three islands
    run = Run(policy_of(quorum=2))
    for name in NAMES:
        run.offer(name)
    first = run.commit()
    tallies = run.islands.tallies
    # when one of them cannot fetch another's share
    run.record(ShareLost(run.now, 0, "b", "c"))
    # then the step is open, and is committed at once without it
    assert (run.islands.step, run.islands.previous, run.overdue()) == (0, None, False)
    second = run.commit()
    assert named(second.contributors) == ["a", "c"]
    assert second.dropped == [Dropped("b", "island c could not fetch its share")]
    assert (second.step, second.base, second.previous) == (0, first.base, None)
    assert tallies["b"].committed == 1
    assert (run.islands.tallies["b"].committed, run.islands.tallies["a"].committed) == (0, 1)
    # and of the next step every share counts again
    run.publish(1)
    run.advance()
    for name in NAMES:
        run.offer(name)
    assert len(run.commit().contributors) == 3


@pytest.mark.parametrize(
    ("step", "island", "words"),
    [
        (0, "z", "does not name island z"),
        (0, "d", "does not name island d"),
        (1, "a", "step 1 is open"),
    ],
)
def test_a_share_that_must_stay_is_not_lost(step: int, island: str, words: str) -> None:
    run = Run(policy_of(quorum=2))
    for name in NAMES:
        run.offer(name)
    run.commit()
    assert words in islands.kept(run.of_islands, run.islands, step, island, run.now)
    with pytest.raises(IllegalTransition, match=words):
        run.record(ShareLost(run.now, step, island, "b"))


def test_a_record_is_final_once_the_quorum_has_reported() -> None:
    run = Run(policy_of(quorum=2))
    for name in NAMES:
        run.offer(name)
    run.commit()
    assert islands.final_at(run.of_islands, run.islands, 0) is None
    for name in NAMES[:2]:
        assert islands.is_awaited(run.islands, 0, name)
        run.record(OuterResult(run.now, 0, name, outer(0)))
    assert islands.final_at(run.of_islands, run.islands, 0) == 0.0
    with pytest.raises(IllegalTransition, match="its record is final"):
        run.record(ShareLost(run.now, 0, "b", "c"))


def test_a_record_is_final_some_time_after_the_first_report() -> None:
    run = Run(policy_of(quorum=2))
    for name in NAMES:
        run.offer(name)
    run.commit()
    run.record(OuterResult(run.now, 0, "b", outer(0)))
    # given that the first to report cannot be reached by another one
    run.now += run.of_islands.settle_s - 1.0
    assert not islands.kept(run.of_islands, run.islands, 0, "b", run.now)
    run.now += 1.0
    assert islands.final_at(run.of_islands, run.islands, 0) == run.now
    with pytest.raises(IllegalTransition, match="its record is final"):
        run.record(ShareLost(run.now, 0, "b", "c"))


def test_a_record_whose_shares_are_all_needed_is_final_at_once() -> None:
    run = Run(policy_of(quorum=2))
    run.offer("a")
    run.offer("b")
    run.now += GRACE_S
    run.commit()
    assert islands.final_at(run.of_islands, run.islands, 0) == 0.0
    with pytest.raises(IllegalTransition, match="its record is final"):
        run.record(ShareLost(run.now, 0, "a", "b"))


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
