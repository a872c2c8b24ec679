"""Quarantines and bans that follow from an event and enter the ledger with it.

They are events, and no reader of the ledger computes them: the limits may change between two
versions of this program, and what a worker was told must stay true.
"""

from __future__ import annotations

from verify.coordinator.machine.events import (
    BY_COORDINATOR,
    Event,
    KeyBanned,
    QuarantineEnded,
    SubmissionJudged,
    SubmissionSetAside,
    WorkerQuarantined,
)
from verify.coordinator.machine.reputation import BAN_AFTER, CLEAR_AFTER, should_quarantine
from verify.coordinator.machine.state import State
from verify.coordinator.machine.transitions import apply

SET_ASIDE = "set aside: validators came to no verdict on a submission"


def recorded(state: State, event: Event) -> tuple[State, list[Event]]:
    """The state after an event and its consequences, and these events: one transaction.

    Raises:
        IllegalTransition: the event cannot follow.
    """
    state, events = apply(state, event), [event]
    for follows in consequences(state, event):
        state = apply(state, follows)
        events.append(follows)
    return state, events


def consequences(state: State, event: Event) -> list[Event]:
    """The events that the coordinator records in one transaction with `event`.

    Args:
        state: with `event` applied.
        event: the newest.
    """
    if not isinstance(event, SubmissionJudged | SubmissionSetAside):
        return []
    lease = state.leases[event.lease].lease
    key = lease.worker
    standing = state.workers[key].standing
    if key in state.bans:
        return []
    if isinstance(event, SubmissionSetAside):
        why, what = SET_ASIDE, "rejected or set aside"
    elif event.accepted:
        over = standing.quarantine is not None and standing.in_a_row >= CLEAR_AFTER
        return [QuarantineEnded(event.at, key)] if over else []
    else:
        why, what = event.reason, "rejected"
    which = f"{why[:400]} (submission {event.submission[:16]} of step {lease.step})"
    if standing.strikes >= BAN_AFTER:
        reason = f"{standing.strikes} submissions {what}, the last one for {which}"
        return [KeyBanned(event.at, key, reason, BY_COORDINATOR)]
    if should_quarantine(standing, why):
        return [WorkerQuarantined(event.at, key, which)]
    return []
