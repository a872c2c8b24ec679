"""Reputation, quarantine, ban and appeal: what a worker's history earns it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verify.coordinator.filled import Filled, key, policy
from verify.coordinator.events import (
    QuarantineEnded,
    SubmissionJudged,
    WorkerQuarantined,
)
from verify.coordinator.reputation import (
    CLEAR_AFTER,
    EXACT_CHECKS,
    QUARANTINE_AFTER,
    Standing,
    prefill_share,
    reputation,
)

NOISY, EXACT = "logprobs: row 0: 0.2 > 0.1", "assignment: row 0: 1 > 0"


def started(**changes: object) -> Filled:
    run = Filled(policy(groups=40, max_groups=400, **changes))
    run.register("x")
    run.register("y")
    run.publish(0)
    return run


def standing(run: Filled, name: str = "x") -> Standing:
    return run.state.workers[key(name)].standing


def reject(run: Filled, reason: str = NOISY, name: str = "x") -> None:
    record = run.lease(name)
    assert record is not None
    run.submit(record)
    run.judge(record, None, reason=reason)


def named(run: Filled, reason: str) -> str:
    """A reason with the last submission that was rejected, by which its worker can ask about it."""
    judged = [e for e in run.events if isinstance(e, SubmissionJudged) and not e.accepted][-1]
    step = run.state.leases[judged.lease].lease.step
    return f"{reason} (submission {judged.submission[:16]} of step {step})"


histories = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60)


def after(history: list[tuple[bool, bool]]) -> Standing:
    found = Standing()
    for accepted, recomputed in history:
        found = found.after_verdict(accepted=accepted, recomputed=recomputed)
    return found


def test_reputation_is_the_mean_of_the_stated_posterior():
    good = after(20 * [(True, True)])
    assert reputation(Standing()) == 0.0
    assert reputation(good) == 20 / 40
    assert reputation(good.after_withholding()) == 20 / 41
    assert reputation(after(20 * [(True, False)])) == 0.0  # nobody recomputed it

    fallen = good.after_verdict(accepted=False, recomputed=True)
    assert reputation(fallen) == 0.0
    for _ in range(20):
        fallen = fallen.after_verdict(accepted=True, recomputed=True)
    assert reputation(fallen) == 20 / 60  # slower than the first time


@given(histories, st.floats(0, 1), st.floats(0, 1))
def test_the_share_stays_between_floor_and_start_and_follows_the_work(history, one, other):
    floor, start = sorted((one, other))
    before = after(history)
    share = prefill_share(before, start=start, floor=floor)

    better = before.after_verdict(accepted=True, recomputed=True)
    unseen = before.after_verdict(accepted=True, recomputed=False)
    worse = before.after_verdict(accepted=False, recomputed=True)

    assert 0.0 <= reputation(before) < 1.0
    assert floor <= prefill_share(better, start=start, floor=floor) <= share <= start
    assert prefill_share(unseen, start=start, floor=floor) == share
    assert prefill_share(worse, start=start, floor=floor) == start
    assert prefill_share(before.quarantined("why"), start=start, floor=floor) == 1.0


@pytest.mark.parametrize("check", sorted(EXACT_CHECKS))
def test_what_cannot_be_an_accident_is_quarantine_at_once(check: str):
    run = started()
    reject(run, f"{check}: row 0: 1 > 0")
    assert standing(run).quarantine == named(run, f"{check}: row 0: 1 > 0")
    assert run.state.share_of(key("x")) == 1.0


def test_rejections_by_measured_limits_are_quarantine_when_they_come_together():
    run = started()
    for _ in range(QUARANTINE_AFTER - 1):
        reject(run)
    assert standing(run).quarantine is None
    for _ in range(CLEAR_AFTER):
        run.work("x")
    reject(run)
    assert standing(run).quarantine is None  # the strike before it is forgotten
    reject(run)
    assert standing(run).quarantine == named(run, NOISY)


def test_quarantine_ends_with_enough_good_work_in_a_row():
    run = started()
    reject(run, EXACT)
    for _ in range(CLEAR_AFTER - 1):
        run.work("x")
    reject(run)
    for _ in range(CLEAR_AFTER - 1):
        run.work("x")
    assert standing(run).quarantine is not None

    run.work("x")

    assert standing(run).quarantine is None and standing(run).strikes == 0
    assert isinstance(run.events[-1], QuarantineEnded)
    assert sum(isinstance(e, WorkerQuarantined) for e in run.events) == 1


def test_what_nobody_recomputed_does_not_lead_out_of_quarantine():
    # given submissions handed in before a worker is caught, of which none is drawn
    run = started()
    earlier = []
    for _ in range(CLEAR_AFTER + 1):
        record = run.lease("x")
        assert record is not None
        run.submit(record)
        earlier.append(record)
    run.judge(earlier.pop(), None, reason=EXACT)

    for record in earlier:
        run.judge(record, ["usable", "usable"], recomputed=False)

    assert standing(run).quarantine is not None and standing(run).strikes == 1
