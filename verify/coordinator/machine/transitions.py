"""The state after an event: `apply`, a pure function of the state before it.

`apply` keeps these invariants, and the property tests check them:
- A group is trained at most once, and at a step that is at most `async_level` after its version.
- Steps open in order and close in order, each once; a rollback takes both counts back.
- Learner islands commit each closed step once, in order (`islands`).
- The leases of one worker and one step are numbered 0, 1, 2, ... under one nonce, which was drawn
  after the worker's key was registered; so no two leases share a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from verify.coordinator.machine import events, islands
from verify.coordinator.machine.events import IllegalTransition
from verify.coordinator.machine.leases import LeaseRecord, Leases, Rank
from verify.coordinator.machine.state import (
    Draw,
    OpenStep,
    Pace,
    Policy,
    State,
    Tally,
    Worker,
)
from verify.coordinator.machine.trust import (
    Standing,
)

LONGEST_DEFERRAL_S = 600.0
"""Largest time from a deferral to the new end of its lease, in seconds."""


def replay(policy: Policy, history: Iterable[events.Event]) -> State:
    """Return the state after the events of a whole ledger."""
    state = State(policy)
    for event in history:
        state = apply(state, event)
    return state


def apply(state: State, event: events.Event) -> State:
    """Return the state after an event.

    Raises:
        IllegalTransition: the event cannot follow.
    """
    match event:
        case events.CoordinatorStarted():
            steps = {n: replace(s, since=event.at, leased=0) for n, s in state.steps.items()}
            again = islands.restarted(state.islands, event.at)
            return replace(state, steps=steps, progress=event.at, islands=again)
        case events.WorkerRegistered():
            _require(event.worker not in state.workers, "a key is registered twice")
            _require(event.invite not in state.revoked, "a key that came with a revoked invite")
            number = len(state.workers)
            worker = Worker(number, event.pool, event.invite, event.own, devices=event.devices)
            if event.invite is not None:
                uses = state.invited.get(event.invite, 0) + 1
                state = replace(state, invited=state.invited.insert(event.invite, uses))
            return _with_worker(state, event.worker, worker)
        case events.ProbationChanged():
            return _with_worker(state, event.worker, _on_probation(state, event))
        case events.WorkerQuarantined():
            state = _strike_unproven(state, event.worker)
            return _with_standing(state, event.worker, lambda s: s.quarantined(event.reason))
        case events.QuarantineEnded():
            quarantine = _known(state, event.worker).standing.quarantine
            _require(quarantine is not None, "no quarantine to end")
            return _with_standing(state, event.worker, lambda s: replace(s, quarantine=None))
        case events.KeyBanned():
            return _ban(state, event)
        case events.BanLifted():
            return _lift_ban(state, event)
        case events.InviteRevoked():
            _require(event.invite not in state.revoked, "an invite is revoked twice")
            state = replace(state, revoked=state.revoked.insert(event.invite, event.reason))
            for key, worker in state.workers.items():
                if worker.invite == event.invite:
                    state = _with_worker(state, key, replace(worker, revoked=True))
            return state
        case events.VersionPublished():
            newer = state.newest is None or event.version > state.newest.version
            _require(newer, f"version {event.version} is not newer")
            return replace(state, newest=event, progress=event.at)
        case events.NonceDrawn():
            return _draw(state, event)
        case events.LeaseGranted():
            return _grant(state, event)
        case events.LeaseOverdue():
            return _overdue(state, event)
        case events.LeaseExpired():
            return _end_lease(state, _record(state, event.lease, "open"))
        case events.LeaseReleased():
            return _release(state, event)
        case events.SubmissionDeferred():
            return _defer(state, event)
        case events.SubmissionReceived():
            return _receive(state, event)
        case events.SubmissionJudged():
            return _judge(state, event)
        case events.SubmissionSetAside():
            return _set_aside(state, event)
        case events.StepClosed():
            return _close(state, event)
        case (
            events.OfferReceived()
            | events.IslandsCommitted()
            | events.ShareLost()
            | events.OuterResult()
        ):
            return _of_islands(state, event)
        case events.RolledBack():
            _require(0 <= event.version <= state.next_close, "a rollback to what was not trained")
            back = State(state.policy, next_step=event.version, next_close=event.version)
            back = replace(back, bans=state.bans, invited=state.invited, revoked=state.revoked)
            committed = islands.rolled_back(state.islands, event.version)
            return replace(back, progress=event.at, islands=committed)
    raise IllegalTransition(f"{type(event).__name__} is no event of a run")


def _of_islands(
    state: State,
    event: events.OfferReceived | events.IslandsCommitted | events.ShareLost | events.OuterResult,
) -> State:
    policy, before = state.policy.islands, state.islands
    if policy is None:
        raise IllegalTransition("an island's event in a run with one learner")
    match event:
        case events.OfferReceived():
            after = islands.offered(policy, before, event, state.next_close)
        case events.IslandsCommitted():
            after = islands.committed(policy, before, event)
        case events.ShareLost():
            after = islands.lost(policy, before, event)
        case events.OuterResult():
            after = islands.reported(policy, before, event)
    return replace(state, islands=after)


def _overdue(state: State, event: events.LeaseOverdue) -> State:
    record = _record(state, event.lease, "open")
    _require(not record.overdue, "a lease is overdue twice")
    state, key = _with_lease(state, replace(record, overdue=True)), record.lease.worker
    # It is so slow at least, though it may never answer in time to show it.
    silent_s = max(0.0, event.at - record.since)
    worker = _with_pace(state.workers[key], silent_s, record.lease.groups)
    return _with_standing(_with_worker(state, key, worker), key, Standing.after_silence)


def _with_pace(worker: Worker, took_s: float, groups: int) -> Worker:
    return replace(worker, pace=(worker.pace or Pace(0.0, 0.0)).after(took_s, groups))


def _typical(state: State, pool: str, record: LeaseRecord) -> Mapping[str, float]:
    """Return `State.typical` after a lease, whose groups count as much as those of others."""
    groups, before = record.lease.groups, state.typical.get(pool)
    took_s = record.took_s / groups
    whole = state.policy.groups_per_submission.get(pool, groups)  # its pool may be gone
    kept = 0.9 ** (groups / whole)
    return {**state.typical, pool: took_s + kept * ((before or took_s) - took_s)}


def _on_probation(state: State, event: events.ProbationChanged) -> Worker:
    worker = _known(state, event.worker)
    _require(worker.probation != event.on, "a probation that does not change")
    return replace(worker, probation=event.on)


def _ban(state: State, event: events.KeyBanned) -> State:
    """Ban a key; its open leases end at once."""
    _require(event.key not in state.bans, "a key is banned twice")
    state = replace(state, bans=state.bans.insert(event.key, event.reason))
    for record in list(state.leases.values()):
        if record.lease.worker == event.key and record.status == "open":
            state = _end_lease(state, record)
    return _strike_unproven(state, event.key)


def _lift_ban(state: State, event: events.BanLifted) -> State:
    _require(event.key in state.bans, "a key that is not banned")
    state = replace(state, bans=state.bans.remove(event.key))
    worker = state.workers.get(event.key)
    if worker is None:
        return state
    pardoned = worker.standing.pardoned(f"its ban was lifted: {event.reason}")
    return _with_worker(state, event.key, replace(worker, standing=pardoned, gap_excess=0.0))


def _draw(state: State, event: events.NonceDrawn) -> State:
    draw = Draw(event.nonce, event.workers)
    _require(event.workers == len(state.workers) > 0, "a draw covers the keys registered so far")
    if event.step in state.steps:
        step = state.steps[event.step]
        _require(draw.workers > step.draws[-1].workers, "a draw that admits nobody")
        step = replace(step, draws=(*step.draws, draw))
    else:
        _require(event.step == state.next_step < state.policy.steps, "steps open in order")
        step = OpenStep(opened=event.at, since=event.at, draws=(draw,))
        state = replace(state, next_step=event.step + 1)
    return replace(state, steps={**state.steps, event.step: step})


def _grant(state: State, event: events.LeaseGranted) -> State:
    lease = event.lease
    step, worker = state.steps.get(lease.step), state.workers.get(lease.worker)
    if step is None or worker is None or event.digest in state.leases:
        raise IllegalTransition(f"lease {event.digest[:16]} of no open step or no known worker")
    _require(step.nonce_for(worker) == lease.nonce, "a lease under a nonce that is not its own")
    _require(step.next_index.get(lease.worker, 0) == lease.index, "lease indices have no holes")
    _require(lease.step - lease.version <= state.policy.async_level, "a lease beyond the lag")
    step = replace(step, next_index=step.next_index.insert(lease.worker, lease.index + 1))
    record = LeaseRecord(lease, event.digest, event.document, rank=worker.rank, since=event.at)
    state = _with_lease(replace(state, steps={**state.steps, lease.step: step}), record)
    state = _with_leased(state, record, lease.groups)
    state = _with_worker(state, lease.worker, replace(worker, served=event.at))
    return _counted(state, record, leased_groups=lease.groups)


def _receive(state: State, event: events.SubmissionReceived) -> State:
    record = _record(state, event.lease, "open")
    took_s = max(0.0, event.at - record.since)
    received = replace(record, status="submitted", submission=event.submission, took_s=took_s)
    found = False
    for other in state.leases.unsettled[record.lease.worker]:  # in lease order
        found |= other.digest == record.digest
        if found and other.status == "open":
            state = _with_lease(state, replace(other, since=event.at))
    return _with_lease(state, received)


def _end_lease(state: State, record: LeaseRecord) -> State:
    """End a lease without a submission: it counts as withheld."""
    state = _with_lease(state, replace(record, status="expired"))
    state = _with_standing(state, record.lease.worker, Standing.after_withholding)
    return _counted(state, record, expired_groups=record.lease.groups)


def _release(state: State, event: events.LeaseReleased) -> State:
    """End a lease that was given back.

    Its groups no longer count as leased, so workers who come and go do not use up what the step may
    lease.
    """
    record = _record(state, event.lease, "open")
    state = _with_leased(state, record, -record.lease.groups)
    state = _with_lease(state, replace(record, status="released"))
    return _with_standing(state, record.lease.worker, Standing.after_return)


def _defer(state: State, event: events.SubmissionDeferred) -> State:
    record = _record(state, event.lease, "open")
    own_time = event.at < record.lease.expires
    _require(own_time or event.submission == record.deferred, "another submission is deferred")
    _require(event.at < record.expires < event.until, "a deferral that extends no lease")
    _require(event.until - event.at <= LONGEST_DEFERRAL_S, "a deferral without end")
    _require(state.lag(record) <= state.policy.async_level, "a deferral beyond the lag")
    record = replace(record, deferred=event.submission, deferred_until=event.until)
    return _with_lease(state, record)


def _with_leased(state: State, record: LeaseRecord, change: int) -> State:
    """Change the groups of a step that count as leased to known workers."""
    step = state.steps.get(record.lease.step)
    if step is None or record.rank is not Rank.KNOWN:
        return state
    step = replace(step, leased=max(0, step.leased + change))
    return replace(state, steps={**state.steps, record.lease.step: step})


def _judge(state: State, event: events.SubmissionJudged) -> State:
    record = _record(state, event.lease, "submitted")
    _require(record.submission == event.submission, "a verdict on another submission")
    worker, lease = state.workers[record.lease.worker], record.lease
    recomputed = any(group.logprob_diff is not None for group in event.groups)
    standing = worker.standing.after_verdict(
        0 if record.overdue else lease.groups, accepted=event.accepted, recomputed=recomputed
    )
    worker = replace(worker, standing=standing).with_gaps(event.gap_excess, event.gap_noise)
    if not event.accepted:
        rollouts = lease.groups * state.policy.group_size
        state = _counted(
            state, record, event.reason[:300], rejected_submissions=1, rejected_rollouts=rollouts
        )
        record = replace(record, status="rejected", verdict=event.verdict)
    else:
        earned = [g for g in event.groups if g.outcome != "dropped"]
        worker = replace(
            worker,
            accepted_rollouts=worker.accepted_rollouts + sum(g.rollouts for g in earned),
            accepted_tokens=worker.accepted_tokens + sum(g.tokens for g in earned),
        )
        worker = _with_pace(worker, record.took_s, lease.groups)
        if record.rank is not Rank.NEW:
            state = replace(state, typical=_typical(state, worker.pool, record))
        state = _counted(state, record, grades=event.groups)
        if dropped := len(event.groups) - len(earned):
            dropped += state.dropped_groups
            state = replace(state, dropped_groups=dropped, last_fault=event.fault)
        trained = not worker.probation
        usable = tuple(g.group for g in event.groups if trained and g.outcome == "usable")
        record = replace(record, status="accepted", verdict=event.verdict)
        record = replace(record, usable=usable, recomputed=recomputed)
    state = _with_worker(_with_lease(state, record), lease.worker, worker)
    if standing.quarantine is not None or lease.worker in state.bans:
        # A validator claimed the submission before the worker was put into quarantine.
        state = _strike_unproven(state, lease.worker)
    return _lapse(state, [state.leases[record.digest]])


def _set_aside(state: State, event: events.SubmissionSetAside) -> State:
    """Drop the groups of a submission; the step leases others in their place."""
    record = _record(state, event.lease, "submitted")
    _require(record.submission == event.submission, "another submission is set aside")
    _require(len(event.attempts) > 0, "a submission is set aside that nobody failed at")
    state = _with_lease(state, replace(record, status="set_aside", attempts=event.attempts))
    state = _with_standing(state, record.lease.worker, Standing.after_set_aside)
    return _counted(state, record, set_aside_groups=record.lease.groups)


def _close(state: State, event: events.StepClosed) -> State:
    # A run without workers opens no steps: each closes at once.
    unopened = state.policy.rows_per_step > 0 and event.step < state.policy.steps
    opened = event.step in state.steps or unopened
    _require(event.step == state.next_close and opened, "steps close in order")
    leases = dict(state.leases)
    for group in event.trained:
        record = leases.get(group.lease)
        if record is None or group.group not in record.usable:
            raise IllegalTransition(f"group {group.group} of {group.lease[:16]} cannot be trained")
        _require(state.lag(record) <= state.policy.async_level, "a group beyond the lag")
        usable = tuple(g for g in record.usable if g != group.group)
        leases[group.lease] = replace(record, usable=usable)
    took_s = max(0.0, event.at - state.closed) if state.closed else 0.0
    state = replace(
        state,
        closed=event.at,
        step_s=0.8 * state.step_s + 0.2 * took_s if state.step_s else took_s,
        steps={n: s for n, s in state.steps.items() if n != event.step},
        tallies={n: t for n, t in state.tallies.items() if n != event.step},
        next_step=max(state.next_step, event.step + 1),
        next_close=event.step + 1,
        progress=event.at,
    )
    oldest = state.oldest_remembered
    kept = {d: r for d, r in leases.items() if r.lease.step >= oldest or r.status == "submitted"}
    return _lapse(replace(state, leases=Leases(kept, state.next_close)))


def _strike_unproven(state: State, worker: str) -> State:
    """Strike the groups of a doubted worker that were accepted without being recomputed."""
    return _strike(state, lambda r: r.lease.worker == worker and not r.recomputed)


def _lapse(state: State, among: Iterable[LeaseRecord] | None = None) -> State:
    """Strike the groups that no step still to close may train; None: of all leases."""
    return _strike(state, lambda r: state.lag(r) > state.policy.async_level, among)


def _strike(
    state: State,
    struck: Callable[[LeaseRecord], bool],
    among: Iterable[LeaseRecord] | None = None,
) -> State:
    """Strike the groups of some leases that are not trained yet."""
    for record in list(state.live if among is None else among):
        if record.usable and struck(record):
            state = _counted(state, record, expired_groups=len(record.usable))
            state = _with_lease(state, replace(record, usable=()))
    return state


def _record(state: State, lease: str, status: str) -> LeaseRecord:
    record = state.leases.get(lease)
    if record is None or record.status != status:
        raise IllegalTransition(f"lease {lease[:16]} is not {status}")
    return record


def _counted(state: State, record: LeaseRecord, rejection: str = "", **more: Any) -> State:
    """Add to counts of the tally that a lease belongs to, or to its grades."""
    step = max(record.lease.step, state.next_close)
    tally = state.tallies.get(step, Tally())
    sums = {name: getattr(tally, name) + value for name, value in more.items()}
    tally = replace(tally, last_rejection=rejection or tally.last_rejection, **sums)
    return replace(state, tallies={**state.tallies, step: tally})


def _with_lease(state: State, record: LeaseRecord) -> State:
    return replace(state, leases=state.leases.changed(record))


def _with_worker(state: State, key: str, worker: Worker) -> State:
    before = state.workers.get(key)
    unproven = state.unproven + worker.unproven - (before is not None and before.unproven)
    ranks = state.rank_changes + (before is not None and before.rank is not worker.rank)
    workers = state.workers.insert(key, worker)
    return replace(state, workers=workers, unproven=unproven, rank_changes=ranks)


def _with_standing(state: State, key: str, change: Callable[[Standing], Standing]) -> State:
    worker = _known(state, key)
    return _with_worker(state, key, replace(worker, standing=change(worker.standing)))


def _known(state: State, key: str) -> Worker:
    _require(key in state.workers, "an event of a key that is no worker's")
    return state.workers[key]


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise IllegalTransition(otherwise)
