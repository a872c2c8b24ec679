"""Quarantines and bans that follow from an event, and enter the ledger with it.

They are events themselves, so no reader of the ledger computes them. The limits may differ between
two versions of this program, and a worker's recorded standing must not change with them.
"""

from __future__ import annotations

from verify.coordinator.machine import events
from verify.coordinator.machine.state import State
from verify.coordinator.machine.transitions import apply
from verify.coordinator.machine.trust import BAN_AFTER, CLEAR_AFTER, should_quarantine

SET_ASIDE = "set aside: validators came to no verdict on a submission"


def recorded(state: State, event: events.Event) -> tuple[State, list[events.Event]]:
    """Return the state after an event and its consequences, and these events, for one transaction.

    Raises:
        IllegalTransition: the event cannot follow.
    """
    state = apply(state, event)
    follow = consequences(state, event)
    for each in follow:
        state = apply(state, each)
    return state, [event, *follow]


def consequences(state: State, event: events.Event) -> list[events.Event]:
    """Return the events that the coordinator records in one transaction with `event`.

    Args:
        state: state after `event`.
        event: the newest event.
    """
    if not isinstance(event, events.SubmissionJudged | events.SubmissionSetAside):
        return []
    lease = state.leases[event.lease].lease
    key = lease.worker
    standing = state.workers[key].standing
    if key in state.bans:
        return []
    if isinstance(event, events.SubmissionSetAside):
        why, what = SET_ASIDE, "rejected or set aside"
    elif event.accepted:
        over = standing.quarantine is not None and standing.in_a_row >= CLEAR_AFTER
        return [events.QuarantineEnded(event.at, key)] if over else []
    else:
        why, what = event.reason, "rejected"
    which = f"{why[:400]} (submission {event.submission[:16]} of step {lease.step})"
    if standing.strikes >= BAN_AFTER:
        reason = f"{standing.strikes} submissions {what}, the last one for {which}"
        return [events.KeyBanned(event.at, key, reason, events.BY_COORDINATOR)]
    if should_quarantine(standing, why):
        return [events.WorkerQuarantined(event.at, key, which)]
    return []
