"""The decisions of the coordinator: what to lease, when to close a step. Pure functions of a State.

The rules (DESIGN, "Filling a step"):
- A lease names the newest published version v, and step s is leased only while
  s - v <= async_level. So steps overlap as far as the lag allows and no further.
- The lowest step that still needs groups is leased first. A step never has more groups outstanding
  than it needs: failed, filtered and dropped groups are replaced by further leases.
- Groups train in lease order, not in order of arrival, which would favour short outputs. So a lease
  without a verdict holds back every group leased after it, until it is decided or expires.
- A step opens when a worker asks and nothing below it needs groups. Its nonce is drawn then, over
  the keys that are registered. A key registered later is covered by a draw of its own: no key can
  be chosen to suit a nonce, and no step depends on the workers that happened to come first.
- A worker that leaves gives its open leases back (`released`), and others are leased the groups at
  once. It gains no choice by that: the index stays used, the lease stays one of the few that the
  worker may hold until it expires, and then counts as withheld. Seeds that it does not like cost it
  as much time as leases that it never answers. Where it comes back before that, and the groups are
  still needed, it is granted the same lease again.
- What is given back does not count against `max_groups`, so that passing volunteers cannot stall a
  step. But a step takes back no more groups than it needs: what is given back beyond that stays
  open until it expires, so that many keys cannot look at more leases than that any faster either.
- Newcomers are workers without an accepted submission, those in quarantine, and those that withheld
  `SILENT_AFTER` leases since their last accepted one. Once others have work accepted, newcomers
  hold at most `newcomer_groups` of a step together. What one of them failed to deliver counts for
  one lease_timeout more, and in that time is leased to the others only. So many new keys delay a
  step by one lease_timeout at most, while a worker with a name asks for work; and without such a
  worker newcomers are leased it again after that time.
- A worker in quarantine holds one lease at most, and is leased no other before its verdict. A
  banned key is leased nothing.
- A worker that had a whole step's worth of groups rejected is leased no more of that step, so that
  a single bad worker cannot use up `max_groups`. Withheld leases do not count: `lease_timeout`
  limits them already, and the only worker of a run may have been down with the coordinator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from verify.coordinator.events import TrainedGroup
from verify.coordinator.stalls import Stalled, unfilled, unopened
from verify.coordinator.state import LeaseRecord, State
from verify.formats.lease import Lease

IDLE_DEADLINE_S = 900.0
"""Least time in seconds that a run waits for its first worker or next version."""
MAX_OPEN_LEASES = 3
"""One fills the engine, one has its last sequences sampled, one is being submitted. With fewer, the
engine idles at the end of each lease. More would tie groups to one worker and to older versions."""


@dataclass(frozen=True)
class Held:
    """The worker holds this lease already."""

    record: LeaseRecord


@dataclass(frozen=True)
class Resume:
    """The worker gave this lease back and may go on with it: record that, then ask again."""

    record: LeaseRecord


@dataclass(frozen=True)
class NonceNeeded:
    """Draw a nonce for this step over all registered keys, then ask again."""

    step: int


@dataclass(frozen=True)
class Grant:
    """Sign this lease for the worker."""

    step: int
    nonce: str
    index: int
    groups: int
    version: int
    manifest_digest: str


@dataclass(frozen=True)
class Close:
    """Sign the batch of the next step to close."""

    step: int
    groups: tuple[TrainedGroup, ...]
    complete: bool


def decide_lease(
    state: State, key: str, now: float, *, holding: Collection[str] = ()
) -> Held | Resume | NonceNeeded | Grant | None:
    """Decide what to answer a worker that asks for work; None: nothing now.

    Args:
        state: of the run.
        key: a registered worker's.
        now: seconds since the epoch.
        holding: digests of the leases that the worker's process still works on. One that it does
            not know of (it was killed, or the answer was lost) is granted to it again.
    """
    if key in state.bans:
        return None
    mine = [
        record
        for record in state.unsettled.get(key, ())
        if record.status in ("open", "released") and record.expires > now
    ]
    in_time = [record for record in mine if record.lease.expires > now]  # not deferred past it
    for record in in_time:
        if record.status == "open" and record.digest not in holding:
            return Held(record)
    quarantined = state.workers[key].standing.quarantine is not None
    if quarantined and (len(mine) > 1 or _unjudged(state, key)):
        return None
    for record in in_time:
        if record.status == "released" and _still_needed(state, record):
            return Resume(record)
    if len(mine) >= (1 if quarantined else MAX_OPEN_LEASES):
        return None
    return _new_lease(state, key, now)


def _new_lease(state: State, key: str, now: float) -> NonceNeeded | Grant | None:
    """A lease of the lowest step that needs groups and may be leased to this worker."""
    policy, worker = state.policy, state.workers[key]
    held_back = False
    for number in range(state.next_close, policy.steps):
        if state.newest is None or number - state.newest.version > policy.async_level:
            return None
        step = state.steps.get(number)
        if step is None:
            return None if held_back else NonceNeeded(number)
        groups = min(policy.groups_per_submission[worker.pool], leasable_groups(state, number))
        if worker.standing.newcomer and groups > 0:
            groups = min(groups, newcomer_room(state, number, now))
            held_back |= groups <= 0
        if groups <= 0 or step.rejected.get(key, 0) >= policy.groups:
            continue
        nonce = step.nonce_for(worker)
        if nonce is None:
            return NonceNeeded(number)
        newest = state.newest
        index = step.next_index.get(key, 0)
        return Grant(number, nonce, index, groups, newest.version, newest.manifest_digest)
    return None


def granted_lease(state: State, key: str, grant: Grant, *, run: str, now: float) -> Lease:
    """The lease that a decision grants.

    Args:
        state: that the decision was made of.
        key: the worker's.
        grant: the decision.
        run: the run's name.
        now: seconds since the epoch.
    """
    return Lease(
        run=run,
        step=grant.step,
        nonce=grant.nonce,
        worker=key,
        pool=state.workers[key].pool,
        index=grant.index,
        groups=grant.groups,
        version=grant.version,
        manifest_digest=grant.manifest_digest,
        issued=now,
        expires=now + state.policy.lease_timeout_s,
    )


def needed_groups(state: State, number: int) -> int:
    """Groups that an open step has neither trainable nor outstanding."""
    held = state.outstanding[number] + state.usable[number]
    if number == state.next_close:  # late ones of closed steps too
        held += sum(groups for step, groups in state.usable.items() if step < number)
    return max(0, state.policy.groups - held)


def leasable_groups(state: State, number: int) -> int:
    """Groups of an open step that may be leased now."""
    room = state.policy.max_groups - state.steps[number].leased
    return min(needed_groups(state, number), room)


def newcomer_room(state: State, number: int, now: float) -> int:
    """Groups of an open step that newcomers may be leased now; 0 or less: none."""
    policy = state.policy
    if policy.newcomer_groups >= policy.groups or all(key in state.bans for key in state.named):
        return policy.groups
    held, failed = newcomer_groups(state, number, now)
    return min(policy.newcomer_groups - held - failed, leasable_groups(state, number) - failed)


def newcomer_groups(state: State, number: int, now: float) -> tuple[int, int]:
    """Return how many groups of a step newcomers hold, and how many they did not deliver."""
    of_step = state.newcomers.get(number)
    if of_step is None:
        return 0, 0
    return of_step.held, sum(groups for until, groups in of_step.failed if now < until)


def _unjudged(state: State, key: str) -> bool:
    """Whether a worker waits for a verdict that is still to come."""
    return any(
        record.status == "submitted" and state.lag(record) <= state.policy.async_level
        for record in state.unsettled.get(key, ())
    )


def _still_needed(state: State, record: LeaseRecord) -> bool:
    """Whether a lease that was given back may be taken up again: nobody else got its groups."""
    number = record.lease.step
    return number in state.steps and leasable_groups(state, number) >= record.lease.groups


def takes_back(state: State, record: LeaseRecord) -> bool:
    """Whether the groups of an open lease that its holder gives back may be leased to others.

    Once only: each return is a row of the ledger, on disk before it is answered.
    """
    if record.resumed:
        return False
    step = state.steps.get(record.lease.step)
    return step is None or step.given_back + record.lease.groups <= state.policy.groups


def expired_leases(state: State, now: float) -> list[LeaseRecord]:
    """Unanswered leases whose time has run out."""
    return [r for r in _unanswered(state) if r.expires <= now]


def decide_close(state: State, now: float) -> Close | Stalled | None:
    """Whether the next step to close can be closed, or never will be; None: not yet."""
    policy, number = state.policy, state.next_close
    if state.finished:
        return None
    step = state.steps.get(number)
    if step is None:
        return _idle(state, now)
    groups = _groups_in_lease_order(state, past_outstanding=False)
    if len(groups) >= policy.groups:
        return Close(number, groups[: policy.groups], complete=True)
    if now < step.since + policy.deadline_s and not _exhausted(state, number):
        return None
    groups = _groups_in_lease_order(state, past_outstanding=True)[: policy.groups]
    if len(groups) >= policy.min_groups:
        return Close(number, groups, complete=len(groups) == policy.groups)
    return unfilled(state, number, had=len(groups), now=now)


def next_due(state: State) -> float | None:
    """When time alone will next change a decision, in seconds since the epoch."""
    if state.finished:
        return None
    step = state.steps.get(state.next_close)
    closing = step.since + state.policy.deadline_s if step else state.progress + _idle_s(state)
    return min([closing, *(record.expires for record in _unanswered(state))])


def _unanswered(state: State) -> Iterator[LeaseRecord]:
    return (r for r in state.leases.values() if r.status in ("open", "released"))


def _groups_in_lease_order(state: State, *, past_outstanding: bool) -> tuple[TrainedGroup, ...]:
    """The groups that the next step to close may train, up to its first undecided lease.

    Late leases of steps that are closed hold nothing back: they have had their time.
    """
    groups: list[TrainedGroup] = []
    for record in state.leases.values():
        if record.lease.step > state.next_close:
            continue  # the lag needs no look: `apply` strikes groups beyond it from `usable`
        own = record.lease.step == state.next_close
        if own and record.outstanding and not past_outstanding:
            break
        groups += [TrainedGroup(record.digest, group) for group in record.usable]
        if len(groups) >= state.policy.groups:
            break
    return tuple(groups)


def _exhausted(state: State, number: int) -> bool:
    """Whether all that may be leased was leased and decided, and was not enough."""
    return not state.outstanding[number] and state.steps[number].leased >= state.policy.max_groups


def _idle_s(state: State) -> float:
    return max(state.policy.deadline_s, IDLE_DEADLINE_S)


def _idle(state: State, now: float) -> Stalled | None:
    """Stall if no step was open for too long: the run waits for its publisher or first worker."""
    if now < state.progress + _idle_s(state):
        return None
    return unopened(state, now)
