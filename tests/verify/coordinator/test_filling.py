"""Filling a step, case by case: leases, the online filter, leases given back, deadlines."""

from __future__ import annotations

import asyncio
import random
from contextlib import closing
from itertools import count

import pytest

from runspec.core.keys import SigningKey
from runspec.core.process import RunStopped
from tests.verify.coordinator.filled import Filled, key, started
from tests.verify.coordinator.in_process import journal_of
from verify.coordinator.machine import filling
from verify.coordinator.machine.events import LeaseExpired
from verify.coordinator.machine.stalls import Stalled, waited_for
from verify.coordinator.machine.state import Rank
from verify.coordinator.services.activity import Activity
from verify.coordinator.services.closing import Closing


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


def test_old_leases_are_forgotten_once_no_answer_to_them_can_matter():
    run = started(steps=10, async_level=0)
    for step in range(4):
        run.work("x"), run.work("x")
        run.advance()
        run.publish(step + 1)

    assert {r.lease.step for r in run.state.leases.values()} == {3}


# -- the online filter ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_groups_without_variance_are_replaced_until_the_step_is_full_or_its_cap_reached(seed: int):
    draw = random.Random(seed)
    share = draw.choice([0.2, 0.5, 0.9])
    run, usable = started(max_groups=12, min_groups=1), []
    while (record := run.lease(draw.choice("xy"))) and record.lease.step == 0:
        said = draw.choices(["filtered", "usable"], [share, 1 - share], k=record.lease.groups)
        run.submit(record)
        run.judge(record, said)
        usable += [(record.digest, i) for i, one in enumerate(said) if one == "usable"]
    leased = run.state.steps[0].leased
    closed = run.advance()

    assert leased == 12 or closed[0].complete
    assert closed == [] or [(one.lease, one.group) for one in closed[0].groups] == usable[:4]
    # replacements are other draws of problems, and nobody is blamed
    seeds = {each.lease.seed for each in run.state.leases.values()}
    assert len(seeds) == len(run.state.leases)
    assert run.state.workers[key("x")].standing.rejected == 0


# -- leases that are given back ------------------------------------------------------------------


def test_the_groups_of_a_lease_that_was_given_back_are_leased_to_others_at_once():
    run = started(groups=2)
    given_back = run.lease("x")
    assert run.lease("y").lease.step == 1  # all of step 0 is held

    run.release(given_back)

    other = run.lease("y", holding=[r.digest for r in run.state.leases.values()])
    assert (other.lease.step, other.lease.groups) == (0, 2)
    run.answer(other)
    assert [c.step for c in run.advance()] == [0]


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


def test_a_step_that_used_up_max_groups_closes_with_what_it_has():
    run = started(max_groups=6)
    run.work("x", "filtered"), run.work("y", "filtered")

    run.work("x")

    assert filling.leasable_groups(run.state, 0, Rank.KNOWN, run.now) == 0
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
        "2 groups filtered",
        "last rejection: logprobs: 0.05 > 0.01",
    ):
        assert part in reason


NO_GOLD = "p7: KeyError: 'gold' at my_rewards/grading.py:17"


@pytest.mark.parametrize(
    ("lost", "reason", "remedy"),
    [
        (
            {"outcomes": ["dropped"] * 2, "fault": NO_GOLD},
            f"4 groups dropped by the grader, the newest: {NO_GOLD}",
            "python -m sampler grade FILE.jsonl",
        ),
        (
            {"outcomes": ["filtered"] * 2, "task_reward": 0.0},
            "the model solves none of these problems (mean task reward 0)",
            "take easier problems",
        ),
        (
            {"outcomes": ["filtered"] * 2, "task_reward": 1.0},
            "the model solves all of these problems (mean task reward 1)",
            "take harder problems",
        ),
        (
            {"outcomes": ["filtered"] * 2, "task_reward": 0.5},
            "the model solves each of these problems always or never (mean task reward 0.5)",
            "keep the problems between",
        ),
        (
            {"outcomes": None, "reason": "toploc: row 3"},
            "2 submissions rejected (4 groups), last rejection: toploc: row 3",
            "the last rejection names",
        ),
    ],
)
def test_each_cause_of_a_stall_has_its_remedy_and_stalls_once_all_is_judged(lost, reason, remedy):
    run = started(max_groups=4)
    for name in ("x", "y"):
        record = run.lease(name)
        run.submit(record)
        run.judge(record, **lost)

    stalled = filling.decide_close(run.state, run.now)

    assert isinstance(stalled, Stalled)
    assert reason in stalled.reason
    assert remedy in stalled.remedy
    for words in ("solve-rates RUN_DIR/spec.json", "algorithm.filters.zero_variance: false"):
        assert (words in stalled.remedy) == ("filtered" in stalled.reason)
    assert "waited for" not in stalled.reason + stalled.remedy


def test_groups_that_nobody_answered_stall_with_the_workers_to_look_at():
    run = started(max_groups=4, lease_timeout_s=30.0)
    run.lease("x"), run.lease("y")
    run.now += 31.0
    for record in filling.expired_leases(run.state, run.now):
        run.record(LeaseExpired(run.now, record.digest))

    stalled = filling.decide_close(run.state, run.now)

    assert isinstance(stalled, Stalled)
    assert "4 groups withheld or late" in stalled.reason
    assert "runspec workers" in stalled.remedy


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


def test_a_step_waits_past_its_deadline_says_for_whom_and_goes_on_when_they_come():
    run = started(lease_timeout_s=1000.0)
    held, submitted = run.lease("x"), run.lease("y")
    run.submit(submitted)

    run.now += 100.0

    assert run.advance() == []
    assert waited_for(run.state) == f"worker {key('x')[:16]}, validators (1 submissions)"
    run.answer(held)
    (closed,) = run.advance()  # no lease is waited for any more
    assert (len(closed.groups), closed.complete) == (2, False)


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
def test_a_run_waits_for_workers_without_end_and_stalls_without_a_version(prepare, expected: str):
    run = Filled()
    prepare(run)
    assert run.advance() == []

    run.now += filling.IDLE_DEADLINE_S

    assert waited_for(run.state) == expected
    if run.state.newest is None:
        assert expected in run.stalled()
    else:
        assert run.advance() == []


@pytest.mark.parametrize(("jump", "counts"), [(7200.0, False), (-7200.0, False), (5.0, True)])
def test_a_jump_of_the_clock_counts_for_no_deadline(tmp_path, jump: float, counts: bool):
    """A laptop that is shut, or a clock that is set: nobody could work then. A clock that is a
    little off is no reason for more time."""
    run, patience = Filled(), filling.IDLE_DEADLINE_S
    clock = steady = run.now
    with closing(journal_of(run, tmp_path, lambda: clock)) as journal:
        clockwork = Closing(
            *(journal, "run", SigningKey.generate(), Activity()), steady=lambda: steady
        )
        clock, steady = clock + patience - 1.0, steady + patience - 1.0
        clockwork._advance(clock)
        clock += jump
        if not counts:
            clockwork._advance(clock)  # nothing stalls: the time begins anew
            clock, steady = clock + patience, steady + patience
        with pytest.raises(RunStopped, match="step 0 stalled"):
            clockwork._advance(clock)


def test_a_lease_that_expires_while_the_others_are_looked_at_is_found(tmp_path):
    run = started()
    lease = run.lease("x")
    times = count(run.now, 0.0)

    async def until_it_expired() -> None:
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            tasks.create_task(clockwork.keep_time())
            while journal.state.leases[lease.digest].status == "open":
                await asyncio.sleep(0.001)
            journal.stop()

    with closing(journal_of(run, tmp_path, lambda: next(times))) as journal:
        clockwork = Closing(journal, "run", SigningKey.generate(), Activity())
        clockwork._ahead += lease.expires - run.now
        times = count(lease.expires - 5e-4, 1e-3)  # it expires between the first two readings
        asyncio.run(until_it_expired())
