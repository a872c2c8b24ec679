"""An event wakes all who wait for a lease: what they are told may not take the loop's time."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Literal

from tests.verify.coordinator.filled import Filled, digest, key, policy
from verify.coordinator import filling
from verify.coordinator.edge.admission import MAX_UNPROVEN
from verify.coordinator.edge.limiter import AT_ONCE
from verify.coordinator.state import State

LEASES = 6000
MAX_NEWCOMER_POLLS = AT_ONCE["all", "newcomer poll"]
LONG_S = 0.5
"""Of processor time, for what takes 0.1 s at most, and took seconds where each looked through all
keys or all leases."""


def with_leases(
    run: Filled, *, of: str = "w0", status: Literal["open", "expired"] = "open", steps: int = 1
) -> State:
    """All that the steps need is leased, to two workers whose leases nobody answered."""
    record = run.lease(of)
    assert record is not None
    leases = {}
    for number in range(LEASES):
        lease = replace(record.lease, worker=key(f"w{number % 2}"), index=number, groups=1)
        name = digest("many", number)
        lease = replace(lease, step=number % steps)
        leases[name] = replace(record, lease=lease, digest=name, status=status)
    return replace(run.state, leases=leases, steps=dict.fromkeys(range(steps), run.state.steps[0]))


def asked(state: State, names: range, now: float) -> None:
    """Every key asks, each within its share of the time that all may take."""
    begun = time.process_time()
    for number in names:
        filling.decide_lease(state, key(f"w{number}"), now)
    assert time.process_time() - begun < LONG_S


def registered(keys: int, *, newcomer_groups: int) -> Filled:
    run = Filled(policy(groups=LEASES, newcomer_groups=newcomer_groups, max_groups=4 * LEASES))
    for number in range(keys):
        run.register(f"w{number}")
    run.publish(0)
    return run


def test_as_many_newcomers_as_may_wait_and_as_many_keys_as_may_register():
    run = registered(MAX_UNPROVEN, newcomer_groups=LEASES // 2)
    asked(with_leases(run), range(2, 2 + MAX_NEWCOMER_POLLS), run.now)


def test_as_many_newcomers_as_may_wait_and_as_many_leases_that_newcomers_failed_to_answer():
    # given three open steps, of which newcomers are leased nothing for a while
    run = registered(MAX_NEWCOMER_POLLS, newcomer_groups=LEASES // 6)
    run.work("w0")
    state = with_leases(run, of="w1", status="expired", steps=3)
    assert filling.decide_lease(state, key("w2"), run.now) is None
    asked(state, range(2, MAX_NEWCOMER_POLLS), run.now)


def test_a_thousand_workers_with_a_name():
    run = registered(1000, newcomer_groups=LEASES // 2)
    run.work("w0")
    state = with_leases(run)
    named = state.workers[key("w0")].standing
    assert not named.newcomer
    for name, worker in list(state.workers.items()):
        state = replace(state, workers=state.workers.insert(name, replace(worker, standing=named)))
    asked(state, range(2, 1000), run.now)
