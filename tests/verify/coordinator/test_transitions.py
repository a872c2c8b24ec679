"""Which events may follow, and what a rollback leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.verify.coordinator.filled import POLICY, key, started
from verify.coordinator.events import (
    Event,
    LeaseExpired,
    LeaseGranted,
    NonceDrawn,
    RolledBack,
    StepClosed,
    SubmissionReceived,
    TrainedGroup,
    VersionPublished,
    WorkerRegistered,
)
from verify.coordinator.transitions import IllegalTransition, apply, replay


def test_what_cannot_follow_is_refused() -> None:
    run = started()
    record = run.work("x")
    granted = next(e for e in run.events if isinstance(e, LeaseGranted))
    changes = ({"index": 2}, {"nonce": key("other")}, {"step": 1}, {"worker": key("z")})
    twice = (TrainedGroup(record.digest, 0),) * 2
    for event in (
        WorkerRegistered(run.now, key("x"), "a"),
        VersionPublished(run.now, 0, key("m")),
        NonceDrawn(run.now, 0, key("n"), 2),  # admits nobody
        NonceDrawn(run.now, 2, key("n"), 2),  # step 1 is not open
        NonceDrawn(run.now, 1, key("n"), 1),  # leaves a key out
        granted,
        *(
            LeaseGranted(run.now, replace(granted.lease, **change), key("other"), "")
            for change in changes
        ),
        SubmissionReceived(run.now, record.digest, key("again"), 1),
        LeaseExpired(run.now, record.digest),
        StepClosed(run.now, 1, (), ""),
        StepClosed(run.now, 0, (TrainedGroup(record.digest, 2),), ""),
        StepClosed(run.now, 0, twice, ""),
    ):
        with pytest.raises(IllegalTransition):
            apply(run.state, event)


def steps(first: int, last: int, nonce: str) -> list[Event]:
    return [
        event
        for step in range(first, last)
        for event in (NonceDrawn(0.0, step, nonce, 1), StepClosed(1.0, step, (), "{}"))
    ]


BEFORE: list[Event] = [
    WorkerRegistered(0.0, "old", "a"),
    VersionPublished(0.0, 3, "digest"),
    *steps(0, 3, "old"),
]


def test_after_a_rollback_steps_open_and_close_again_for_whoever_registers_anew() -> None:
    # given three closed steps, taken back to one
    state = replay(POLICY, [*BEFORE, RolledBack(2.0, 1)])
    assert (state.next_step, state.next_close, state.progress) == (1, 1, 2.0)
    # then nobody is registered, and nothing published or leased
    assert not state.workers and not state.leases and state.newest is None
    # when the version and the steps come again
    for event in (
        VersionPublished(3.0, 1, "another digest"),
        WorkerRegistered(3.0, "new", "a"),
        *steps(1, 4, "new"),
    ):
        state = apply(state, event)
    assert state.finished
    # and a run is not taken forward
    with pytest.raises(IllegalTransition, match="not trained"):
        replay(POLICY, [*BEFORE, RolledBack(2.0, 4)])
