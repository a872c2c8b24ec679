"""What known, recorded and new workers are leased, and what each of them can cost a step."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runspec.core.keys import SigningKey
from tests.verify.coordinator.deployment import tiny_spec
from tests.verify.coordinator.filled import Filled, digest, key, policy, started
from tests.verify.coordinator.in_process import edge_of, journal_of, leasing_of, roles_of
from verify.coordinator.edge.limits import AT_ONCE, MAX_UNPROVEN
from verify.coordinator.machine import filling
from verify.coordinator.machine.events import (
    CoordinatorStarted,
    InviteRevoked,
    VersionPublished,
    WorkerRegistered,
)
from verify.coordinator.machine.reputation import Standing
from verify.coordinator.machine.state import LeaseRecord, Pace, Rank, State

STRANGERS = ["s1", "s2", "s3", "s4", "s5", "s6"]


def opened(*, trust: int = 0, **changes: object) -> Filled:
    """A run of two workers of its own and six strangers; s1 has earned this trust."""
    run = started(**{"async_level": 0, **changes})
    for name in STRANGERS:
        run.register(name, own=False)
    record = run.state.workers[key("s1")]
    earned = replace(record, standing=Standing(delivered=trust))
    run.state = replace(run.state, workers=run.state.workers.insert(key("s1"), earned))
    return run


def rank(run: Filled, name: str) -> Rank:
    return run.state.workers[key(name)].rank


def further(run: Filled, name: str) -> LeaseRecord | None:
    """A lease beside those that the worker holds."""
    return run.lease(name, holding=list(run.state.leases))


def test_those_who_wait_are_served_by_rank_and_then_who_was_served_longest_ago():
    run = opened(groups=8, trust=9)
    for name in ("x", "s2", "y", "s1"):
        run.now += 1.0
        run.lease(name)

    asking = map(key, ["s3", "s2", "s1", "y", "x"])
    assert sorted(asking, key=partial(filling.turn, run.state)) == [
        key(name) for name in ("x", "y", "s1", "s3", "s2")
    ]


@pytest.mark.parametrize("comes", ["s1", "y"])
def test_a_request_that_comes_as_something_changes_waits_for_its_turn(tmp_path: Path, comes: str):
    """Else who asks very often would be served before those who wait already."""
    run, spec = Filled(policy(groups=2, groups_per_submission={"near": 2})), tiny_spec()
    run.register("x", "near")
    run.register(comes, "near", own=comes == "y")

    async def served() -> list[str]:
        with closing(journal_of(run, tmp_path)) as journal:
            edge = edge_of(journal, spec)
            leasing = leasing_of(journal, spec, SigningKey.generate(), roles_of(), edge)
            # given a worker that waits
            waits = asyncio.create_task(leasing.lease(key("x"), (), 5.0))
            await asyncio.sleep(0.0)
            # when there is work, and another asks before the first has heard of it
            journal.record(VersionPublished(run.now, 0, digest("manifest", 0)))
            await leasing.lease(key(comes), (), 0.0)
            await waits
            return [record.lease.worker for record in journal.state.leases.values()]

    assert asyncio.run(served())[0] == key("x")


def test_who_was_invited_is_known_until_the_invite_is_revoked():
    run = started()
    run.record(WorkerRegistered(run.now, key("guest"), "a", "invite"))
    assert rank(run, "guest") is Rank.KNOWN
    run.record(InviteRevoked(run.now, "invite", "it was published", "operator"))
    assert rank(run, "guest") is Rank.NEW
    run.work("guest")
    assert rank(run, "guest") is Rank.RECORDED


def test_who_is_in_quarantine_gets_trials_though_it_is_the_runs_own():
    run = started()
    run.submit(record := run.lease("x"))
    run.judge(record, None, reason="assignment: row 0: 1 > 0")
    assert (rank(run, "x"), run.lease("x").lease.groups) == (Rank.NEW, 1)


class TestTrials:
    def test_new_workers_hold_one_group_each_and_a_share_of_a_step_and_no_step_waits_for_it(self):
        run = opened(newcomer_groups=2)
        trials = [further(run, name) for name in (*STRANGERS, "s1")]
        assert [r.lease.groups for r in trials if r] == [1, 1]
        run.work("x"), run.work("y")
        (closed,) = run.advance()
        assert closed.complete

    @pytest.mark.parametrize("deed", ["silent", "released", "rejected"])
    def test_what_was_not_accepted_takes_its_place_until_the_lease_ends(self, deed: str):
        run = opened(newcomer_groups=1)
        record = run.lease("s1")
        if deed == "released":
            run.release(record)
        elif deed == "rejected":
            run.answer(record, "rejected")
        run.now = record.expires - 0.1
        run.advance()
        assert further(run, "s2") is None
        run.now = record.expires
        assert further(run, "s2") is not None

    def test_what_was_accepted_trains_and_makes_room_for_the_next(self):
        run = opened(newcomer_groups=1)
        for name in STRANGERS[:4]:
            run.work(name)
        (closed,) = run.advance()
        assert closed.complete

    def test_a_new_worker_opens_no_step_before_the_others_are_filled(self):
        run = opened(newcomer_groups=1, async_level=1)
        assert [further(run, name) is None for name in ("s1", "s2")] == [False, True]
        assert list(run.state.steps) == [0]
        run.work("x"), run.work("x")
        further(run, "s2")
        assert list(run.state.steps) == [0, 1]


class TestTrust:
    def test_it_grows_with_what_was_delivered_and_each_failure_makes_the_next_dearer(self):
        run = opened(groups=100, max_groups=1000, groups_per_submission={"a": 100})

        def work(times: int) -> list[int]:
            return [run.work("s1").lease.groups for _ in range(times)]

        assert work(5) == [1, 1, 2, 4, 8]
        run.answer(run.lease("s1"), "rejected")
        assert rank(run, "s1") is Rank.NEW
        assert work(5) == [1, 1, 1, 1, 2]  # half of what it delivered since
        run.lease("s1")
        run.now += 31.0
        run.advance()
        assert (rank(run, "s1"), run.state.workers[key("s1")].standing.withheld) == (Rank.NEW, 1)
        assert work(7) == [1] * 6 + [2]  # a third

    def test_a_stranger_that_gives_a_lease_back_is_new_and_nothing_counts_as_withheld(self):
        run = opened(trust=9)
        run.release(run.lease("s1"))
        standing = run.state.workers[key("s1")].standing
        assert (standing.trust, standing.withheld, standing.late) == (0, 0, 0)
        assert rank(run, "s1") is Rank.NEW

    def test_leases_under_way_count_and_the_last_verdicts_too(self):
        run = opened(groups=100, trust=3)
        first = further(run, "s1")
        assert (first.lease.groups, further(run, "s1").lease.groups) == (2, 1)
        run.submit(first)
        assert further(run, "s1") is None
        run.judge(first, ["usable", "filtered"])
        assert further(run, "s1").lease.groups == 2


class TestOverdue:
    """x works for 10 s at each lease, and s1 keeps silent."""

    def run(self, groups: int = 4) -> tuple[Filled, LeaseRecord]:
        run = opened(trust=9, groups=groups, lease_timeout_s=1000.0, deadline_s=1000.0)
        silent = run.lease("s1")
        record = run.lease("x")
        run.now += 10.0
        run.answer(record)
        return run, silent

    def test_a_worker_without_work_gets_the_groups_after_twice_its_own_time(self):
        run, silent = self.run()
        asking = map(key, [*STRANGERS, "x"])
        due = filling.next_overdue(run.state, asking, run.now)
        assert due == silent.lease.issued + filling.OVERDUE_AFTER * 10.0
        run.now = due - 0.1
        assert run.lease("x") is None
        run.now = due
        assert run.lease("x").lease.groups == silent.lease.groups

    def test_who_has_other_work_waits(self):
        run, silent = self.run(groups=20)
        run.now += 500.0
        assert run.lease("x").lease.groups == 2
        assert not run.state.leases[silent.digest].overdue

    def test_who_delivered_nothing_and_who_is_of_a_worse_rank_get_no_others_groups(self):
        run = opened(trust=9, lease_timeout_s=1000.0)
        further(run, "x"), further(run, "x")
        run.now += 500.0
        for name, gets in (("y", False), ("s1", False), ("y", True)):
            assert (further(run, name) is not None) == gets
            worker = replace(run.state.workers[key(name)], pace=Pace(1.0, 1.0))
            workers = run.state.workers.insert(key(name), worker)
            run.state = replace(run.state, workers=workers)
            assert name != "s1" or further(run, name) is None

    def test_its_holder_may_still_answer_and_be_trained_and_its_trust_is_gone(self):
        run, silent = self.run()
        run.now += 10.0
        other = run.lease("x")
        assert run.state.workers[key("s1")].standing.trust == 0
        run.answer(run.state.leases[silent.digest])
        (closed,) = run.advance()
        assert {g.lease for g in closed.groups} > {silent.digest} and closed.complete
        assert run.state.workers[key("s1")].standing.trust == 0  # late work earns no trust
        assert run.state.leases[other.digest].status == "open"

    def test_no_run_ends_while_its_holder_may_still_answer(self):
        run = started(max_groups=4, min_groups=4, lease_timeout_s=1000.0, steps=1)
        slow = run.lease("x")
        run.work("y")
        run.now += 500.0
        assert run.lease("y") is None  # all that the step may lease was leased
        assert run.state.leases[slow.digest].overdue and run.advance() == []
        run.answer(run.state.leases[slow.digest])
        assert [closed.step for closed in run.advance()] == [0]


class TestOrder:
    def test_a_lease_without_a_verdict_holds_back_its_rank_alone(self):
        run = opened(groups=4, trust=9)
        held = run.lease("s1")
        run.answer(run.lease("x"))
        own = further(run, "s1")
        assert own is None  # all four are under way
        run.state = replace(run.state, policy=replace(run.state.policy, groups=6, max_groups=12))
        run.answer(run.lease("y"))
        run.state = replace(run.state, policy=replace(run.state.policy, groups=4))

        (closed,) = run.advance()

        assert held.digest not in {g.lease for g in closed.groups}

    def test_what_is_judged_first_is_of_known_workers(self):
        run = opened(groups=8, trust=9)
        leases = [run.lease(name) for name in ("s1", "x", "s2", "y")]
        for record in leases:
            run.submit(record)
        judged = [record.digest for record in run.state.to_judge]
        assert judged == [leases[place].digest for place in (1, 3, 0, 2)]


class TestNoRunEndsByStrangers:
    def test_it_waits_past_the_deadline_and_goes_on_when_a_worker_comes(self):
        run = opened(newcomer_groups=1, max_groups=4)
        run.lease("s1")
        run.now += 1000.0
        assert run.advance() == []
        run.work("s2")
        assert run.advance() == []
        run.work("x")
        (closed,) = run.advance()
        assert len(closed.groups) == 3 and not closed.complete

    def test_what_strangers_have_rejected_or_withhold_uses_up_nothing(self):
        run = opened(newcomer_groups=2, max_groups=4)
        for _ in range(20):
            for name in STRANGERS:
                if (record := further(run, name)) and name in "s1 s3 s5":
                    run.answer(record, "rejected")
            run.now += 31.0
            assert run.advance() == []
        run.work("x"), run.work("y")
        assert len(run.advance()) == 1

    def test_known_workers_end_it_and_a_further_start_counts_anew(self):
        run = opened(max_groups=4)
        run.work("x", "filtered"), run.work("y", "filtered")
        assert "4 groups leased (max_groups allows 4)" in run.stalled()
        run.record(CoordinatorStarted(run.now))
        assert run.advance() == []
        run.work("x"), run.work("y")
        assert len(run.advance()) == 1


deeds = st.lists(
    st.tuples(
        st.sampled_from(STRANGERS), st.sampled_from(["ask", "work", "release", "reject", "wait"])
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=100)
@given(deeds, st.integers(2, 7), st.integers(1, 6), st.integers(1, 3))
def test_a_step_fills_by_one_known_worker_whatever_strangers_did_and_do(
    deeds, groups, newcomers, per_submission
):
    # given a worker that takes a second for a group, and strangers that did whatever they liked
    # while it was away
    run = opened(
        groups=groups,
        min_groups=groups,
        max_groups=groups,
        newcomer_groups=newcomers,
        groups_per_submission={"a": per_submission},
        lease_timeout_s=1e6,
        deadline_s=1e9,
        steps=1000,
    )
    own = run.lease("x")
    run.now += own.lease.groups
    run.answer(own)

    def advance() -> None:
        if run.advance():
            run.publish(run.state.next_close)

    for name, deed in deeds:
        mine = [r for r in run.state.leases.values() if r.lease.worker == key(name)]
        held = [r for r in mine if r.status == "open"]
        if deed == "ask":
            further(run, name)
        elif deed == "wait":
            run.now += 7.0
            advance()
        elif held and deed == "release":
            run.release(held[0])
        elif held:
            run.answer(held[0], "rejected" if deed == "reject" else "usable")
    advance()

    # when it asks, always after all of them, and they never answer
    begun, first = run.now, run.state.next_close
    while run.state.next_close == first:
        for name in STRANGERS:
            further(run, name)
        if record := run.lease("x"):
            run.now += record.lease.groups
            run.answer(record)
        else:
            run.now = filling.next_overdue(run.state, [key("x")], run.now)
        run.advance()

    # then the step is closed within its own time, and the patience that it has with them
    assert run.now - begun <= groups + filling.OVERDUE_AFTER * per_submission


LEASES = 6000
ASKING = AT_ONCE["all", "newcomer poll"]
LONG_S = 0.5
"""Of processor time, for what takes 0.1 s at most, and took seconds where each looked through all
keys or all leases."""


def with_leases(run: Filled, *, steps: int) -> State:
    """Of each step, all was leased that may be: to workers of each rank, none of which answers."""
    record, leases = run.lease("x"), {}
    for number in range(LEASES):
        lease = replace(record.lease, worker=key(f"w{number % 200}"), index=number, groups=1)
        name, lease = digest("many", number), replace(lease, step=number % steps)
        leases[name] = replace(record, lease=lease, digest=name, rank=Rank(number // 3 % 3))
    return replace(run.state, leases=leases, steps=dict.fromkeys(range(steps), run.state.steps[0]))


def test_as_many_new_keys_as_may_wait_keys_as_may_register_and_leases_that_nobody_answered():
    # given three open steps, of which nobody is leased anything for a while
    run = started(groups=2 * LEASES // 9, newcomer_groups=LEASES // 9, max_groups=4 * LEASES)
    for number in range(MAX_UNPROVEN):
        run.register(f"w{number}", own=False)
    run.work("x"), run.work("y")
    state = with_leases(run, steps=3)
    asking = [key(f"w{number}") for number in range(300, 300 + 2 * ASKING)]
    for name in asking[:ASKING]:  # half of those who ask have a record
        able = replace(state.workers[name], standing=Standing(delivered=9), pace=Pace(9.0, 9.0))
        state = replace(state, workers=state.workers.insert(name, able))
    assert filling.decide_lease(state, asking[-1], run.now) is None
    # then every key that may wait asks, each within its share of the time that all may take
    begun = time.process_time()
    for name in sorted(asking, key=partial(filling.turn, state)):
        filling.decide_lease(state, name, run.now)
    assert (
        filling.next_overdue(state, asking, run.now)
        == run.now + filling.OVERDUE_AFTER_AMONG_EQUALS * 9.0
    )
    assert time.process_time() - begun < LONG_S
