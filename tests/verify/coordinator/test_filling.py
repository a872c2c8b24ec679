"""Filling a step, case by case: what is leased to whom, in which order it trains."""

import pytest

from tests.verify.coordinator.filled import Filled, key, started
from verify.coordinator import filling
from verify.coordinator.events import (
    TrainedGroup,
)


def test_a_step_is_leased_in_parts_and_closes_when_they_are_decided():
    run = started()

    first, second = run.work("x"), run.work("y")

    assert [(r.lease.step, r.lease.index, r.lease.groups) for r in (first, second)] == [
        (0, 0, 2),
        (0, 0, 2),
    ]
    (closed,) = run.advance()
    assert closed.complete and closed.step == 0
    assert closed.groups == tuple(
        TrainedGroup(r.digest, g) for r in (first, second) for g in (0, 1)
    )


def test_a_lease_is_no_larger_than_what_is_needed():
    run = started(groups=3)

    assert [run.work("x").lease.groups, run.work("x").lease.groups] == [2, 1]
    assert len(run.advance()) == 1


def test_groups_train_in_lease_order_though_the_later_lease_is_decided_first():
    run = started()
    first, second = run.lease("x"), run.lease("y")

    run.answer(second)

    assert run.advance() == []  # the earlier lease holds the step
    run.answer(first)
    (closed,) = run.advance()
    assert [g.lease for g in closed.groups] == [first.digest] * 2 + [second.digest] * 2


def test_steps_are_leased_ahead_as_far_as_the_lag_allows_and_no_further():
    run = started(async_level=2)

    steps = [run.work("x").lease.step for _ in range(6)]

    assert steps == [0, 0, 1, 1, 2, 2]
    assert run.lease("x") is None
    assert [c.step for c in run.advance()] == [0, 1, 2]
    run.publish(1)
    lease = run.lease("x").lease
    assert (lease.step, lease.version) == (3, 1)


def test_without_asynchrony_a_step_waits_for_its_own_version():
    run = started(async_level=0)
    run.work("x"), run.work("x")
    assert run.lease("x") is None

    run.advance()

    assert run.lease("x") is None
    run.publish(1)
    lease = run.lease("x").lease
    assert (lease.step, lease.version) == (1, 1)


def test_nothing_is_leased_before_a_version_is_published():
    run = Filled()
    run.register("x")

    assert run.lease("x") is None
    assert run.state.steps == {}


def test_a_lease_names_the_newest_version_and_a_granted_one_keeps_its_own():
    run = started()
    held = run.lease("x")

    for _ in range(2):
        run.work("y")
    run.answer(held)
    run.advance()
    late = run.lease("x")
    run.publish(1)

    assert late.lease.version == 0
    assert run.lease("x").document == late.document
    assert run.lease("y").lease.version == 1


def test_an_open_lease_comes_again_until_the_worker_says_that_it_holds_it():
    run = started()
    first = run.lease("x")

    assert run.lease("x") == first
    second = run.lease("x", holding=[first.digest])
    assert (second.lease.step, second.lease.index) == (0, 1)
    third = run.lease("x", holding=[first.digest, second.digest])
    assert (third.lease.step, third.lease.index) == (1, 0)
    all_three = [first.digest, second.digest, third.digest]
    assert run.lease("x", holding=all_three) is None  # they are all that it may hold
    assert run.lease("x", holding=[second.digest]) == first


def test_a_rejected_submission_is_replaced_by_a_further_lease_under_the_next_index():
    run = started()
    run.work("x", "rejected")
    run.work("y")
    assert run.advance() == []

    replacement = run.work("x")

    assert (replacement.lease.step, replacement.lease.index) == (0, 1)
    (closed,) = run.advance()
    assert closed.complete
    assert run.state.workers[key("x")].standing.rejected == 1


def test_an_expired_lease_counts_as_withheld_and_is_replaced():
    run = started()
    withheld = run.lease("x")
    run.work("y")

    run.now += 31.0
    run.advance()

    assert run.state.leases[withheld.digest].status == "expired"
    assert run.state.workers[key("x")].standing.withheld == 1
    replacement = run.lease("x")
    assert replacement.lease.index == 1
    assert replacement.lease.seed != withheld.lease.seed
    run.answer(replacement)
    assert len(run.advance()) == 1


@pytest.mark.parametrize("outcome", ["filtered", "dropped"])
def test_groups_that_cannot_be_trained_are_replaced_and_nobody_is_blamed(outcome: str):
    run = started()
    mixed = run.lease("x")
    run.submit(mixed)
    run.judge(mixed, ["usable", outcome])
    run.work("y")

    replacement = run.work("x")

    assert replacement.lease.groups == 1
    (closed,) = run.advance()
    assert [(g.lease, g.group) for g in closed.groups][:2] == [
        (mixed.digest, 0),
        (closed.groups[1].lease, 0),
    ]
    worker = run.state.workers[key("x")]
    assert worker.standing.rejected == 0
    earned = 2 * 3 if outcome == "filtered" else 2 * 2
    assert worker.accepted_rollouts == earned


def test_a_step_goes_on_when_its_only_worker_was_away_past_its_leases():
    # given a worker that holds leases of the whole step, and is away until they expire
    run = started(max_groups=12)
    first = run.lease("x")
    run.lease("x", holding=[first.digest])
    run.now += 31.0
    run.advance()

    # when it asks again, then it is leased the step that was withheld
    again = run.lease("x")
    assert (again.lease.step, again.lease.index) == (0, 2)


def test_a_worker_that_failed_a_steps_worth_of_groups_is_leased_no_more_of_it():
    run = started(max_groups=100)

    for _ in range(2):
        run.work("x", "rejected")

    assert run.lease("x").lease.step == 1
    assert run.lease("y").lease.step == 0


def test_a_key_registered_after_the_nonce_gets_a_nonce_of_its_own():
    run = started()
    early = run.lease("x")

    run.register("z")
    newcomer = run.lease("z")

    assert newcomer.lease.step == 0
    assert newcomer.lease.nonce != early.lease.nonce
    assert run.lease("y").lease.step == 1  # step 0 is leased in full
    run.answer(early), run.answer(newcomer)
    assert len(run.advance()) == 1


def test_the_last_step_finishes_the_run():
    run = started(steps=1)
    run.work("x"), run.work("y")
    assert run.lease("x") is None

    run.advance()

    assert run.state.finished
    assert run.lease("x") is None
    assert filling.next_due(run.state) is None


def test_old_leases_are_forgotten_once_no_answer_to_them_can_matter():
    run = started(steps=10, async_level=0)
    for step in range(4):
        run.work("x"), run.work("x")
        run.advance()
        run.publish(step + 1)

    assert {r.lease.step for r in run.state.leases.values()} == {3}
