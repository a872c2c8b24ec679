"""Many new keys: what they may hold together, and that they keep nobody from filling a step."""

from __future__ import annotations

import time
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verify.coordinator.filled import Filled, digest, key, policy
from verify.coordinator import filling
from verify.coordinator.edge.limiter import AT_ONCE
from verify.coordinator.edge.new_keys import MAX_UNPROVEN
from verify.coordinator.events import BY_OPERATOR, KeyBanned
from verify.coordinator.state import State

SYBILS = ["s1", "s2", "s3", "s4", "s5", "s6"]


def started(
    *, groups: int = 4, newcomer_groups: int = 2, per_submission: int = 1, async_level: int = 0
) -> Filled:
    """Step 0 was filled by `k`, which so has a name; step 1 is to be filled."""
    run = Filled(
        policy(
            groups=groups,
            min_groups=groups,
            max_groups=10_000,
            async_level=async_level,
            deadline_s=1e9,
            newcomer_groups=newcomer_groups,
            groups_per_submission={"a": per_submission},
        )
    )
    run.register("k")
    run.publish(0)
    while not run.advance():
        run.work("k")
    run.publish(1)
    for name in SYBILS:
        run.register(name)
    return run


def ask(run: Filled, name: str) -> None:
    """For a lease that is never answered."""
    mine = [d for d, r in run.state.leases.items() if r.lease.worker == key(name)]
    run.lease(name, holding=mine)


def held_by_sybils(run: Filled) -> int:
    return sum(
        r.lease.groups
        for r in run.state.leases.values()
        if r.outstanding and r.lease.worker != key("k")
    )


def test_newcomers_together_hold_a_share_of_a_step_and_the_rest_is_for_others():
    run = started(groups=4, newcomer_groups=2)
    for name in SYBILS:
        ask(run, name)
    assert held_by_sybils(run) == 2
    assert [run.work("k").lease.groups for _ in range(2)] == [1, 1]


def test_where_nobody_has_a_name_newcomers_get_everything():
    run = started(groups=4, newcomer_groups=1)
    run.record(KeyBanned(run.now, key("k"), "by hand", BY_OPERATOR))
    for name in SYBILS:
        ask(run, name)
    assert held_by_sybils(run) == 4


def test_what_newcomers_failed_to_deliver_is_theirs_again_after_another_timeout():
    """Workers with a name may have left: then newcomers must be able to go on."""
    run = started(groups=2, newcomer_groups=1)
    ask(run, "s1")
    run.now += run.state.policy.lease_timeout_s
    run.advance()
    ask(run, "s2")
    assert held_by_sybils(run) == 0
    run.now += run.state.policy.lease_timeout_s
    ask(run, "s2")
    assert held_by_sybils(run) == 1


def test_a_newcomer_that_is_held_back_opens_no_later_step():
    run = started(groups=2, newcomer_groups=1, async_level=1)
    ask(run, "s1")
    ask(run, "s2")
    assert list(run.state.steps) == [1]
    run.work("k")  # now step 1 needs no more, and the next may open
    ask(run, "s2")
    assert list(run.state.steps) == [1, 2]


deeds = st.lists(
    st.tuples(st.sampled_from(SYBILS), st.sampled_from(["ask", "release", "reject", "wait"])),
    max_size=40,
)


@settings(deadline=None, max_examples=60)
@given(deeds, st.integers(2, 7), st.integers(1, 6), st.integers(1, 3))
def test_a_step_fills_within_one_timeout_while_one_worker_with_a_name_asks(
    deeds, groups, newcomers, per_submission
):
    # given new keys that did whatever they liked while nobody else was there
    run = started(
        groups=groups, newcomer_groups=min(newcomers, groups - 1), per_submission=per_submission
    )
    for name, deed in deeds:
        mine = [r for r in run.state.leases.values() if r.lease.worker == key(name)]
        held = [r for r in mine if r.status == "open"]
        if deed == "ask":
            ask(run, name)
        elif deed == "wait":
            run.now += 7.0
            run.advance()
        elif held and deed == "release":
            run.release(held[0])
        elif held:
            run.answer(held[0], "rejected")

    # when a worker with a name asks, always after all of them, and they never answer
    woke = run.now
    closed = fill(run)
    while not closed and run.now < woke + run.state.policy.lease_timeout_s:
        run.now = min(filling.next_due(run.state), woke + run.state.policy.lease_timeout_s)
        closed = run.advance() or fill(run)

    # then the step is closed, complete, no later than their last lease runs out
    assert [each.step for each in closed] == [1] and closed[0].complete


def fill(run: Filled) -> list[filling.Close]:
    for _ in range(3 * run.state.policy.groups):
        for name in SYBILS:
            ask(run, name)
        record = run.lease("k")
        if record is not None:
            run.answer(record)
        if closed := run.advance():
            return closed
    return []


def test_who_worked_once_and_then_withholds_all_that_it_gets_is_a_newcomer_again():
    """Else a few keys with one honest submission each would hold every step for ever."""
    run = started(groups=6, newcomer_groups=2)
    for name in SYBILS:
        run.work(name)
    assert len(run.advance()) == 1
    run.publish(2)
    # when they take all there is and never answer, and a worker that does asks after them
    begun = run.now
    while not (closed := run.advance()) and run.now < begun + 1000.0:
        for name in SYBILS:
            for _ in range(filling.MAX_OPEN_LEASES):
                ask(run, name)
        record = run.lease("k")
        if record is not None:
            run.answer(record)
        else:
            run.now = filling.next_due(run.state)
    # then an honest submission has bought them no more than twice the leases that each may hold
    assert [each.step for each in closed] == [2] and closed[0].complete
    bought = len(SYBILS) * 2 * filling.MAX_OPEN_LEASES
    rounds = bought // run.state.policy.groups + 1
    assert run.now - begun <= rounds * run.state.policy.lease_timeout_s
    # and one that answers again has its name again
    assert run.state.workers[key("s1")].standing.newcomer
    run.publish(3)
    run.work("s1")
    assert not run.state.workers[key("s1")].standing.newcomer


def test_a_machine_that_went_down_with_all_that_it_held_keeps_its_name():
    run = started(groups=6, newcomer_groups=2)
    run.register("other")
    for _ in range(filling.MAX_OPEN_LEASES):
        ask(run, "k")
    run.now += run.state.policy.lease_timeout_s
    run.advance()
    assert run.state.workers[key("k")].standing.withheld == filling.MAX_OPEN_LEASES
    assert not run.state.workers[key("k")].standing.newcomer


LEASES = 6000
MAX_NEWCOMER_POLLS = AT_ONCE["all", "newcomer poll"]
LONG_S = 0.5
"""Of processor time, for what takes 0.1 s at most, and took seconds where each looked through all
keys or all leases."""


def with_leases(run: Filled, *, steps: int) -> State:
    """All that the steps need was leased, to two workers whose leases nobody answered."""
    record = run.lease("w1")
    assert record is not None
    leases = {}
    for number in range(LEASES):
        lease = replace(record.lease, worker=key(f"w{number % 2}"), index=number, groups=1)
        name = digest("many", number)
        lease = replace(lease, step=number % steps)
        leases[name] = replace(record, lease=lease, digest=name, status="expired")
    return replace(run.state, leases=leases, steps=dict.fromkeys(range(steps), run.state.steps[0]))


def test_as_many_newcomers_as_may_wait_keys_as_may_register_and_leases_that_nobody_answered():
    # given three open steps, of which newcomers are leased nothing for a while
    run = Filled(policy(groups=LEASES, newcomer_groups=LEASES // 6, max_groups=4 * LEASES))
    for number in range(MAX_UNPROVEN):
        run.register(f"w{number}")
    run.publish(0)
    run.work("w0")
    state = with_leases(run, steps=3)
    assert filling.decide_lease(state, key("w2"), run.now) is None
    # then every key that may wait asks, each within its share of the time that all may take
    begun = time.process_time()
    for number in range(2, 2 + MAX_NEWCOMER_POLLS):
        filling.decide_lease(state, key(f"w{number}"), run.now)
    assert time.process_time() - begun < LONG_S
