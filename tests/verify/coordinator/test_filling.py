"""Filling a step, case by case."""

from dataclasses import replace

import pytest

from tests.verify.coordinator.filled import Filled, key, policy
from verify.coordinator import filling
from verify.coordinator.events import (
    CoordinatorStarted,
    LeaseExpired,
    LeaseGranted,
    NonceDrawn,
    StepClosed,
    SubmissionReceived,
    TrainedGroup,
    VersionPublished,
    WorkerRegistered,
)
from verify.coordinator.filling import MAX_OPEN_LEASES
from verify.coordinator.transitions import IllegalTransition, apply


def started(**changes: object) -> Filled:
    run = Filled(policy(**changes))
    run.register("x")
    run.register("y")
    run.publish(0)
    return run


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


def test_the_groups_of_a_lease_that_was_given_back_are_leased_to_others_at_once():
    run = started(groups=2)
    given_back = run.lease("x")
    assert run.lease("y").lease.step == 1  # all of step 0 is held

    run.release(given_back)

    other = run.lease("y", holding=[r.digest for r in run.state.leases.values()])
    assert (other.lease.step, other.lease.groups) == (0, 2)
    run.answer(other)
    assert [c.step for c in run.advance()] == [0]


def test_a_lease_that_was_given_back_comes_again_while_it_is_needed():
    run = started()
    given_back = run.lease("x")
    run.release(given_back)

    assert run.lease("x").document == given_back.document
    assert run.state.leases[given_back.digest].status == "open"
    run.answer(run.state.leases[given_back.digest])
    assert run.state.workers[key("x")].standing.withheld == 0


def test_a_lease_that_was_given_back_and_replaced_buys_no_other_seed():
    # given a worker that gave back all that it may hold, and others who took its groups
    run = started(async_level=3, max_groups=100)
    held: list[str] = []
    for _ in range(MAX_OPEN_LEASES):
        held.append(run.lease("x", holding=held).digest)
    for digest in held:
        run.release(run.state.leases[digest])
    for _ in range(2):
        run.work("y")
    while (record := run.lease("y")) and record.lease.step < 2:
        run.answer(record)

    # when it asks for more, then it gets none until those have expired, as if it had kept silent
    assert run.lease("x") is None
    run.now += 31.0
    run.advance()
    assert run.state.workers[key("x")].standing.withheld == len(held)
    fresh = run.lease("x")
    assert fresh is not None
    assert fresh.digest not in held
    assert fresh.lease.seed not in {run.state.leases[d].lease.seed for d in held}


def test_a_lease_that_was_given_back_holds_nothing_back():
    run = started()
    first, second = run.lease("x"), run.lease("y")
    run.answer(second)
    run.release(first)
    replacement = run.lease("y")
    run.answer(replacement)

    (closed,) = run.advance()

    assert [g.lease for g in closed.groups] == [second.digest] * 2 + [replacement.digest] * 2


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


def test_a_step_that_used_up_max_groups_closes_with_what_it_has():
    run = started(max_groups=6)
    run.work("x", "filtered"), run.work("y", "filtered")

    run.work("x")

    assert filling.leasable_groups(run.state, 0) == 0
    (closed,) = run.advance()
    assert not closed.complete
    assert len(closed.groups) == 2


def test_volunteers_who_come_and_go_do_not_use_up_what_a_step_may_lease():
    # given as many groups given back, by keys of their own, as max_groups allows
    run = started(max_groups=4)
    for name in ("first", "second"):
        run.register(name)
        run.release(run.lease(name))

    # when those who stay work
    run.work("x"), run.work("y")

    # then the step is filled by them
    (closed,) = run.advance()
    assert closed.complete


def test_many_keys_cannot_look_at_leases_faster_than_by_keeping_silent():
    # given a step that took back all the groups that it needs
    run = started(groups=2, max_groups=100)
    run.register("first"), run.register("second")
    run.release(run.lease("first"))

    # when another key gives its lease back
    seen = run.lease("second")
    run.release(seen)

    # then nobody is leased its groups before it expires
    assert run.state.leases[seen.digest].status == "open"
    assert run.lease("x").lease.step == 1


def test_a_step_that_used_up_max_groups_in_vain_stalls_and_says_why():
    run = started(max_groups=4)
    run.work("x", "rejected"), run.work("y", "filtered")

    reason = run.stalled()

    for part in (
        "step 0 stalled: 0 of 4 groups, at least 2 needed",
        "4 groups leased",
        "1 submissions rejected",
        "2 filtered",
        "last rejection: logprobs: 0.05 > 0.01",
    ):
        assert part in reason


def test_the_deadline_closes_a_step_with_its_share_and_a_late_group_trains_a_step_later():
    run = started(lease_timeout_s=1000.0)
    late, prompt = run.lease("x"), run.lease("y")
    run.answer(prompt)

    run.now += 100.0
    (closed,) = run.advance()
    assert not closed.complete
    assert {g.lease for g in closed.groups} == {prompt.digest}

    run.answer(late)
    own = run.lease("y")
    assert (own.lease.step, own.lease.groups) == (1, 2)
    assert filling.needed_groups(run.state, 1) == 0  # the late ones count
    run.answer(own)
    (closed,) = run.advance()
    assert closed.complete
    assert [g.lease for g in closed.groups] == [late.digest] * 2 + [own.digest] * 2


def test_late_groups_do_not_let_a_step_pass_over_its_own_earlier_lease():
    run = started(lease_timeout_s=1000.0)
    late, prompt = run.lease("x"), run.lease("y")
    run.answer(prompt)
    run.now += 100.0
    run.advance()
    run.register("z")
    first, second = run.lease("y"), run.lease("z")  # all of step 1
    run.answer(second)

    run.answer(late)

    assert run.advance() == []  # four groups are usable, but `first` was leased before `second`
    run.answer(first)
    (closed,) = run.advance()
    assert [g.lease for g in closed.groups] == [late.digest] * 2 + [first.digest] * 2
    assert run.work("y").lease.groups == 2  # what is left over trains at step 2
    (closed,) = run.advance()
    assert [g.lease for g in closed.groups][:2] == [second.digest] * 2


def test_a_late_group_beyond_the_lag_expires():
    run = started(lease_timeout_s=1000.0, async_level=0)
    late, prompt = run.lease("x"), run.lease("y")
    run.answer(prompt)
    run.now += 100.0
    run.advance()
    run.publish(1)

    run.answer(late)

    assert run.state.leases[late.digest].usable == ()
    assert run.state.tallies[1].expired_groups == 2
    assert run.state.workers[key("x")].accepted_rollouts == 4  # it earns its credit
    assert [run.work("y").lease.groups, run.work("y").lease.groups] == [2, 2]


def test_a_stall_at_the_deadline_names_whom_the_step_waited_for():
    run = started(lease_timeout_s=1000.0)
    run.lease("x")
    run.submit(run.lease("y"))

    run.now += 100.0

    assert f"waited for worker {key('x')[:16]}, validators (1 submissions)" in run.stalled()


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda run: None, "the publisher: version 0 is needed, the newest published is none"),
        (lambda run: run.publish(0), "a worker to register"),
        (
            lambda run: (run.publish(0), run.register("x")),
            "a lease request of any of the 1 registered workers",
        ),
    ],
)
def test_a_run_that_never_begins_stalls_too(prepare, expected: str):
    run = Filled()
    prepare(run)
    assert run.advance() == []

    run.now += filling.IDLE_DEADLINE_S

    assert expected in run.stalled()


def test_the_time_in_which_the_coordinator_was_down_counts_for_no_deadline():
    run = started()
    run.work("x")
    run.now += 99.0
    run.record(CoordinatorStarted(run.now))

    run.now += 99.0

    assert run.advance() == []
    assert filling.next_due(run.state) == pytest.approx(run.now + 1.0)


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


class TestIllegalTransitions:
    """What `apply` refuses, whoever asks for it."""

    def refuses(self, run: Filled, event: object) -> None:
        with pytest.raises(IllegalTransition):
            apply(run.state, event)  # type: ignore[arg-type]

    def test_workers_and_versions(self):
        run = started()
        self.refuses(run, WorkerRegistered(run.now, key("x"), "a"))
        self.refuses(run, VersionPublished(run.now, 0, key("m")))

    def test_nonces(self):
        run = started()
        run.lease("x")
        self.refuses(run, NonceDrawn(run.now, 0, key("n"), 2))  # admits nobody
        self.refuses(run, NonceDrawn(run.now, 2, key("n"), 2))  # step 1 is not open
        self.refuses(run, NonceDrawn(run.now, 1, key("n"), 1))  # leaves a key out

    def test_leases(self):
        run = started()
        run.lease("x")
        granted = next(e for e in run.events if isinstance(e, LeaseGranted))
        self.refuses(run, granted)
        for change in ({"index": 2}, {"nonce": key("other")}, {"step": 1}, {"worker": key("z")}):
            lease = replace(granted.lease, **change)
            self.refuses(run, LeaseGranted(run.now, lease, key("other"), ""))

    def test_submissions_expiries_and_closings(self):
        run = started()
        record = run.work("x")
        self.refuses(run, SubmissionReceived(run.now, record.digest, key("again"), 1))
        self.refuses(run, LeaseExpired(run.now, record.digest))
        self.refuses(run, StepClosed(run.now, 1, (), ""))
        self.refuses(run, StepClosed(run.now, 0, (TrainedGroup(record.digest, 2),), ""))
        twice = (TrainedGroup(record.digest, 0),) * 2
        self.refuses(run, StepClosed(run.now, 0, twice, ""))
