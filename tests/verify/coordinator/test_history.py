"""What the ledger's events say of times: accepted tokens a second, of the time a step was open."""

from __future__ import annotations

from tests.verify.coordinator.filled import POLICY, Filled, policy
from verify.coordinator.events import StepClosed
from verify.coordinator.history import History
from verify.coordinator.state import State
from verify.coordinator.transitions import apply

TOKENS = 10
"""Of each group that `filled` grades."""


def rates(run: Filled) -> dict[int, float | None]:
    """What the manifest of each step says, by step."""
    history, state, found = History(), State(run.state.policy), {}
    for event in run.events:
        if isinstance(event, StepClosed):
            stats = history.batch_stats(event.at, event.step, event.trained)
            found[event.step] = stats["accepted_tokens_per_s"]
        state = apply(state, event)
        history.take(event, state.leases)
    return found


def test_the_first_step_has_a_rate_as_every_other():
    run = Filled(POLICY)
    run.register("x"), run.publish(0)
    for seconds in (10.0, 2.0):
        first = run.lease("x")
        assert first is not None
        second = run.lease("x", holding=[first.digest])
        assert second is not None
        run.now += seconds
        run.answer(first), run.answer(second)
        run.advance()

    groups = POLICY.groups
    assert rates(run) == {0: groups * TOKENS / 10.0, 1: groups * TOKENS / 2.0}


def test_what_was_rejected_counts_for_nothing_and_what_was_filtered_counts():
    run = Filled(POLICY)
    run.register("x"), run.publish(0)
    for outcome in ("rejected", "filtered", "usable", "usable"):
        record = run.lease("x")
        assert record is not None
        run.now += 5.0
        run.answer(record, outcome)
    run.advance()

    assert rates(run) == {0: 6 * TOKENS / 20.0}


def test_overlapping_steps_count_all_that_was_accepted_while_they_were_open():
    run = Filled(policy(groups=2, lease_timeout_s=1000.0))
    run.register("x"), run.register("y"), run.publish(0)
    first = run.lease("x")
    run.now += 4.0
    second = run.lease("y")  # opens step 1: all of step 0 is leased
    assert first is not None and second is not None
    assert (first.lease.step, second.lease.step) == (0, 1)
    run.now += 6.0
    run.answer(second), run.answer(first)
    run.advance()

    assert rates(run) == {0: 4 * TOKENS / 10.0, 1: 4 * TOKENS / 6.0}
