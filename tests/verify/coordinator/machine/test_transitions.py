"""Which events may follow, and what a rollback leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.verify.coordinator.filled import POLICY, digest, key, started
from verify.coordinator.machine.events import (
    BY_OPERATOR,
    BanLifted,
    Event,
    FailedAttempt,
    IllegalTransition,
    InviteRevoked,
    KeyBanned,
    LeaseExpired,
    LeaseGranted,
    NonceDrawn,
    QuarantineEnded,
    RolledBack,
    StepClosed,
    SubmissionReceived,
    SubmissionSetAside,
    TrainedGroup,
    VersionPublished,
    WorkerQuarantined,
    WorkerRegistered,
)
from verify.coordinator.machine.transitions import apply, replay


def test_what_cannot_follow_is_refused() -> None:
    run = started()
    record = run.work("x")
    waiting = run.lease("y")
    assert waiting is not None
    run.submit(waiting)
    run.record(InviteRevoked(run.now, key("invite"), "published", BY_OPERATOR))
    run.record(KeyBanned(run.now, key("banned"), "known from another run", BY_OPERATOR))
    failed = (FailedAttempt(1.0, "ab" * 32, "its process ended"),)
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
        InviteRevoked(run.now, key("invite"), "again", BY_OPERATOR),
        WorkerRegistered(run.now, key("y2"), "a", key("invite")),
        BanLifted(run.now, key("x"), "none to lift", BY_OPERATOR),
        QuarantineEnded(run.now, key("x")),
        WorkerQuarantined(run.now, key("nobody"), "why"),
        KeyBanned(run.now, key("banned"), "again", BY_OPERATOR),
        SubmissionSetAside(run.now, record.digest, str(record.submission), failed),  # it is judged
        SubmissionSetAside(run.now, waiting.digest, digest("s", waiting.digest), ()),  # by nobody
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
    decided: list[Event] = [
        KeyBanned(1.0, "old", "edited tokens", BY_OPERATOR),
        WorkerRegistered(1.0, "guest", "a", "invite"),
        InviteRevoked(1.0, "invite", "published", BY_OPERATOR),
    ]
    state = replay(POLICY, [*BEFORE, *decided, RolledBack(2.0, 1)])
    assert (state.next_step, state.next_close, state.progress) == (1, 1, 2.0)
    # then what was decided of keys and invites stays
    assert set(state.bans) == {"old"} and set(state.revoked) == set(state.invited) == {"invite"}
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
