"""The decisions of the coordinator: what to lease, when to close a step. Pure functions of a State.

The rules (docs/public-runs.md has the promise that they keep):
- A lease names the newest published version v, and step s is leased only while
  s - v <= async_level. So steps overlap as far as the lag allows and no further.
- A worker has a rank. The run's own workers and invited workers are known. Strangers that answered
  their last leases are recorded. Others are new, and those in quarantine or on probation too.
- Workers that wait for work are served by rank, then by who was served longest ago, however often
  they ask.
- The lowest step that needs groups is leased first. A step relies on the leases of known and
  recorded workers: it leases them no more than it needs. Further leases replace failed, filtered
  and dropped groups.
- No step relies on a new worker. It gets trials: leases of one group, one at a time, in addition to
  what the step needs. All new workers together hold at most `newcomer_groups` of a step, and a
  group that one of them did not deliver counts until its lease ends. So leases that strangers see
  and do not answer are few, and cost a step nothing.
- A worker that has shown to be slow (`overdue`) gets smaller leases, of a step that closes when it
  will have sampled them, as far as the lag allows.
- A recorded worker holds no more groups than it delivered since its last failure, divided by one
  more than the number of its failures (`Standing.trust`). So a key wastes at most what it gave.
- A lease whose worker was silent for too long becomes overdue when another worker waits without
  other work (`overdue`). Others are then leased its groups too. Its worker may still answer; groups
  that arrive in time are trained.
- Groups train in lease order within a rank. Order of arrival would favour short outputs. So a lease
  without a verdict holds back later leases of its rank until it is decided, overdue or expired. It
  holds back no better rank.
- A step opens when a worker asks and no lower step needs groups. Its nonce is drawn then, over the
  registered keys. A key that registers later gets another draw: so no key can be chosen to suit a
  nonce, and no step depends on which workers came first.
- A worker that leaves gives its open leases back, and others are leased the groups at once. It
  gains little choice by that, because a stranger that gave a lease back is new again.
- `max_groups` limits the groups of a step that known workers are leased. A run ends only if they
  used up that number or are banned, or if no version is published. Otherwise a step with too few
  groups waits for workers, and after its deadline it closes as soon as it has `min_groups`. So
  workers that are not known cannot stop a run: their failures do not count against `max_groups`.

A run that trains on documents has no workers. Step s closes as soon as s - v <= async_level for the
newest published version v. So the learner finds steps signed while a version is on its way, and no
more than two versions of parameters wait for the publisher.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain
from math import inf

from verify.coordinator.machine import overdue
from verify.coordinator.machine.events import LeaseOverdue, TrainedGroup
from verify.coordinator.machine.leases import LeaseRecord, Rank
from verify.coordinator.machine.stalls import Stalled, banned, unfilled, unopened
from verify.coordinator.machine.state import State
from verify.formats.lease import MAX_OPEN_LEASES, Lease

IDLE_DEADLINE_S = 900.0
"""Least number of seconds that a run waits for its next version."""


@dataclass(frozen=True)
class NonceNeeded:
    """Draw a nonce for this step over all registered keys, then ask again."""

    step: int


@dataclass(frozen=True)
class Close:
    """Sign the batch of the next step to close."""

    step: int
    groups: tuple[TrainedGroup, ...]
    complete: bool


def decide_lease(
    state: State, key: str, now: float, *, holding: Collection[str] = ()
) -> LeaseRecord | Lease | LeaseOverdue | NonceNeeded | None:
    """Decide what to answer a worker that asks for work; None: nothing now.

    Args:
        state: state of the run.
        key: public key of a registered worker.
        now: seconds since the epoch.
        holding: digests of the leases that the worker's process still works on. A lease that the
            process does not know (it was killed, or the answer was lost) is granted again.

    Returns:
        A lease that the worker holds already, or a new one to sign. If another worker's lease is
        overdue or a nonce is needed, record that first and decide again.
    """
    if key in state.bans:
        return None
    unsettled = state.leases.unsettled.get(key, ())
    mine = [r for r in unsettled if r.status == "open" and r.expires > now]
    for record in mine:
        deferred = record.lease.expires <= now
        if record.digest not in holding and not deferred:
            return record
    if len(mine) >= MAX_OPEN_LEASES or _most_groups(state, key) <= 0:
        return None
    lease = _new_lease(state, key, now)
    if lease is None:
        for at, record in overdue.overdue_at(state, key):
            if at <= now:
                return LeaseOverdue(now, record.digest)
    return lease


def turn(state: State, key: str) -> tuple[Rank, float, int]:
    """Return the sort key of a worker that asks for work: rank, then the time of its last lease."""
    worker = state.workers[key]
    return worker.rank, worker.served, worker.number


def served_ranks(state: State, now: float) -> set[Rank]:
    """Return the ranks of workers for which a step has groups."""
    return {rank for rank in Rank if _leasable_step(state, rank, now) is not None}


def _most_groups(state: State, key: str) -> int:
    """Return the largest number of groups of a worker's next lease."""
    worker = state.workers[key]
    most = state.policy.groups_per_submission[worker.pool]
    most = overdue.in_time(state, worker, most)
    if worker.rank is Rank.KNOWN:
        return most
    undecided = sum(
        record.lease.groups
        for record in state.leases.unsettled.get(key, ())
        if record.status == "open" or state.lag(record) <= state.policy.async_level
    )
    trust = worker.standing.trust if worker.rank is Rank.RECORDED else 1
    return min(most, trust - undecided)


def _leasable_step(state: State, rank: Rank, now: float, ahead: int = 0) -> int | None:
    """Return the lowest step with groups for a rank, or to open; one so far ahead, if any."""
    policy, newest, first = state.policy, state.newest, state.next_close
    if newest is None:
        return None
    end = min(policy.steps, newest.version + policy.async_level + 1)
    opened = [number for number in range(first, end) if number in state.steps]
    unopened = state.next_step if len(opened) < end - first else None  # steps open in order
    found = [number for number in opened if leasable_groups(state, number, rank, now) > 0]
    if not found:
        return None if any(needed_groups(state, n) > 0 for n in opened) else unopened
    later = next((number for number in found if number >= first + ahead), unopened)
    return found[0] if later is None else later


def _new_lease(state: State, key: str, now: float) -> NonceNeeded | Lease | None:
    """Return a lease of the lowest step that may be leased to this worker."""
    policy, worker, newest = state.policy, state.workers[key], state.newest
    most = _most_groups(state, key)
    number = _leasable_step(state, worker.rank, now, overdue.steps_ahead(state, worker, most))
    if number is None or newest is None:
        return None
    step = state.steps.get(number)
    nonce = step.nonce_for(worker) if step is not None else None
    if step is None or nonce is None:
        return NonceNeeded(number)
    return Lease(
        run=policy.run,
        step=number,
        nonce=nonce,
        worker=key,
        pool=worker.pool,
        index=step.next_index.get(key, 0),
        groups=min(most, leasable_groups(state, number, worker.rank, now)),
        version=newest.version,
        manifest_digest=newest.manifest_digest,
        issued=now,
        expires=now + policy.lease_timeout_s,
        devices=worker.devices,
    )


def needed_groups(state: State, number: int) -> int:
    """Return the groups that an open step lacks: neither trainable nor relied on."""
    held = _usable_groups(state, number) + state.leases.awaited[number]
    return max(0, state.policy.groups - held)


def _usable_groups(state: State, number: int) -> int:
    """Return the trainable groups of an open step; the next to close has late groups too."""
    if number != state.next_close:
        return state.leases.usable[number]
    return sum(groups for step, groups in state.leases.usable.items() if step <= number)


def leasable_groups(state: State, number: int, rank: Rank, now: float) -> int:
    """Return the groups of an open step that a worker of a rank may be leased now."""
    policy = state.policy
    if rank is Rank.NEW:
        trials = policy.newcomer_groups - tried_groups(state, number, now)
        return min(policy.groups - state.leases.usable[number], trials)
    left = policy.max_groups - state.steps[number].leased if rank is Rank.KNOWN else policy.groups
    return min(needed_groups(state, number), left)


def tried_groups(state: State, number: int, now: float) -> int:
    """Return the groups of an open step that new workers hold, or did not deliver lately."""
    ends = state.leases.trials.get(number, ())
    return len(ends) - bisect_right(ends, now)


def expired_leases(state: State, now: float) -> list[LeaseRecord]:
    """Return the unanswered leases whose time is over."""
    return [*state.leases.ended(now)]


def decide_close(state: State, now: float) -> Close | Stalled | None:
    """Decide whether the next step closes or the run has stalled; None: neither yet."""
    policy, number = state.policy, state.next_close
    if state.finished:
        return None
    if policy.rows_per_step:
        # Only the first version has a deadline: when the next one comes depends on the learner's
        # speed.
        if state.newest is None:
            return _idle(state, now)
        # Islands that commit steps need no island that publishes them.
        ahead = number - max(state.newest.version, state.islands.step)
        return Close(number, (), complete=True) if ahead <= policy.async_level else None
    step = state.steps.get(number)
    if step is not None and _usable_groups(state, number) >= policy.groups:
        groups = _groups_in_order(state, past_awaited=False)
        if len(groups) >= policy.groups:
            return Close(number, groups[: policy.groups], complete=True)
    own_banned = all(key in state.bans for key in state.workers) and any(
        worker.own for worker in state.workers.values()
    )
    if own_banned and not any(record.awaited for record in state.live):
        return banned(state)
    if step is None:
        return _idle(state, now)
    # Known workers used up the groups that the step may lease them. A lease that is overdue may
    # still be answered.
    undecided = state.leases.undecided[number] > 0
    exhausted = not undecided and step.leased >= policy.max_groups
    if now < step.since + policy.deadline_s and not exhausted:
        return None
    groups = _groups_in_order(state, past_awaited=True)[: policy.groups]
    if len(groups) >= policy.min_groups:
        return Close(number, groups, complete=len(groups) == policy.groups)
    return unfilled(state, number, had=len(groups), now=now) if exhausted else None


def next_due(state: State, now: float) -> float | None:
    """Return when a decision next changes without an event, in seconds since the epoch, or an
    earlier time."""
    if state.finished:
        return None
    if state.policy.rows_per_step and state.newest is not None:
        return None
    step = state.steps.get(state.next_close)
    closing = step.since + state.policy.deadline_s if step else state.progress + _idle_s(state)
    due = min((at for at in (closing, state.leases.next_end(now)) if at > now), default=inf)
    return due if due < inf else None


def _groups_in_order(state: State, *, past_awaited: bool) -> tuple[TrainedGroup, ...]:
    """Return the groups that the next step to close may train.

    Late groups of closed steps come first. Then, rank by rank, come the groups up to the first
    lease that is awaited.
    """
    late: list[TrainedGroup] = []
    own: dict[Rank, list[TrainedGroup]] = {rank: [] for rank in Rank}
    held_back = set[Rank]()
    for record in state.live:
        step = record.lease.step
        if step > state.next_close:
            continue
        groups = [TrainedGroup(record.digest, group) for group in record.usable]
        if step < state.next_close:
            late += groups  # within the lag: `apply` strikes groups beyond it from `usable`
        elif record.awaited and not past_awaited:
            held_back.add(record.rank)
        elif record.rank not in held_back:
            own[record.rank] += groups
    return tuple(chain(late, *own.values()))


def _idle_s(state: State) -> float:
    return max(state.policy.deadline_s, IDLE_DEADLINE_S)


def _idle(state: State, now: float) -> Stalled | None:
    """Return a stall if no step was open for too long and the publisher is the reason."""
    needed, newest = state.next_close - state.policy.async_level, state.newest
    published = newest is not None and newest.version >= needed
    if published or now < state.progress + _idle_s(state):
        return None
    return unopened(state, now)
