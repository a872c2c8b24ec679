"""Steps that close or stall with what they have, late groups, and clocks that jump."""

from contextlib import closing

import pytest

from runspec.core.keys import SigningKey
from runspec.core.process import RunStopped
from tests.verify.coordinator.filled import POLICY, Filled, key, started
from tests.verify.coordinator.services import journal_of
from verify.coordinator import filling
from verify.coordinator.activity import Activity
from verify.coordinator.closing import Closing
from verify.coordinator.events import CoordinatorStarted


def test_a_step_that_used_up_max_groups_closes_with_what_it_has():
    run = started(max_groups=6)
    run.work("x", "filtered"), run.work("y", "filtered")

    run.work("x")

    assert filling.leasable_groups(run.state, 0) == 0
    (closed,) = run.advance()
    assert not closed.complete
    assert len(closed.groups) == 2


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


@pytest.mark.parametrize(("jump", "counts"), [(7200.0, False), (-7200.0, False), (5.0, True)])
def test_a_jump_of_the_clock_counts_for_no_deadline(tmp_path, jump: float, counts: bool):
    """A laptop that is shut, or a clock that is set: nobody could work then. A clock that is a
    little off is no reason for more time."""
    run = started()
    run.lease("x")
    clock = steady = run.now
    with closing(journal_of(run, tmp_path, lambda: clock)) as journal:
        clockwork = Closing(
            *(journal, "run", SigningKey.generate(), Activity()), steady=lambda: steady
        )
        clock, steady = clock + POLICY.deadline_s - 1.0, steady + POLICY.deadline_s - 1.0
        clockwork._advance()
        clock += jump
        if not counts:
            clockwork._advance()  # nothing stalls: the time begins anew
            clock, steady = clock + POLICY.deadline_s, steady + POLICY.deadline_s
        with pytest.raises(RunStopped, match="step 0 stalled"):
            clockwork._advance()
