"""After a rollback the ledger goes on: the same steps again, under new keys and new nonces."""

from __future__ import annotations

import pytest

from tests.verify.coordinator.filled import POLICY
from verify.coordinator.events import (
    Event,
    NonceDrawn,
    RolledBack,
    StepClosed,
    VersionPublished,
    WorkerRegistered,
)
from verify.coordinator.transitions import IllegalTransition, apply, replay


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


def test_steps_open_and_close_again_for_whoever_registers_anew() -> None:
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


def test_a_run_is_not_taken_forward() -> None:
    with pytest.raises(IllegalTransition, match="not trained"):
        replay(POLICY, [*BEFORE, RolledBack(2.0, 4)])
