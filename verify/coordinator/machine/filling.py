"""The decisions of the coordinator: what to lease, when to close a step. Pure functions of a State.

The rules (docs/public-runs.md has the promise that they keep):
- A lease names the newest published version v, and step s is leased only while
  s - v <= async_level. So steps overlap as far as the lag allows and no further.
- A worker has a rank. Known are the run's own workers and invited ones. Recorded are strangers
  whose last leases were answered. All others are new, and so is who is in quarantine.
- Those who wait for work are served by rank, then in the order in which they were served last,
  however often they ask.
- The lowest step that needs groups is leased first. A step relies on the leases of known and of
  recorded workers: it leases no more than it needs beside them. Failed, filtered and dropped groups
  are replaced by further leases.
- No step relies on a new worker. It gets trials: leases of one group, one at a time, each beside
  what the step needs. New workers together hold at most `newcomer_groups` of a step, and what one
  of them did not deliver counts until its lease ends. So leases that strangers see and do not
  answer are few, and cost a step nothing.
- A recorded worker holds no more groups than it delivered since it last failed, divided by one more
  than its failures (`Standing.trust`). So a key wastes at most what it gave.
- A lease becomes overdue while a worker of a better or the same rank waits without other work. Its
  own worker has then been silent for `OVERDUE_AFTER` times what the waiting one takes for as much,
  or `OVERDUE_AFTER_AMONG_EQUALS` times where the ranks are equal. Others are then leased its groups
  too. Its worker may still answer, and what comes in time is trained.
- Groups train in lease order within a rank, not in order of arrival, which would favour short
  outputs. So a lease without a verdict holds back those of its rank that were leased after it,
  until it is decided, overdue or expired. It holds back no better rank.
- A step opens when a worker asks and nothing below it needs groups. Its nonce is drawn then, over
  the keys that are registered. A key registered later is covered by a draw of its own: no key can
  be chosen to suit a nonce, and no step depends on the workers that happened to come first.
- A worker that leaves gives its open leases back, and others are leased the groups at once. It
  gains little choice by that: a stranger that gave a lease back is new again.
- `max_groups` bounds the groups of a step that known workers are leased. A run ends only where they
  used it up or are banned, or where nothing is published. Else a step with too few groups waits for
  workers, and after its deadline closes as soon as it has `min_groups`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import inf

from verify.coordinator.machine.events import LeaseOverdue, TrainedGroup
from verify.coordinator.machine.stalls import Stalled, banned, unfilled, unopened
from verify.coordinator.machine.state import LeaseRecord, Pace, Rank, State
from verify.formats.lease import MAX_OPEN_LEASES, Lease

IDLE_DEADLINE_S = 900.0
"""Least time in seconds that a run waits for its next version."""
OVERDUE_AFTER = 2.0
"""A lease is overdue after this many times what a waiting worker of a better rank takes."""
OVERDUE_AFTER_AMONG_EQUALS = 4.0
"""The same where the rank is the same: among honest workers some are so much slower."""


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
        state: of the run.
        key: a registered worker's.
        now: seconds since the epoch.
        holding: digests of the leases that the worker's process still works on. One that it does
            not know of (it was killed, or the answer was lost) is granted to it again.

    Returns:
        A lease that it holds already, or a new one to sign. If others' lease is overdue or a nonce
        is needed, that is to be recorded before the worker is decided on again.
    """
    if key in state.bans:
        return None
    unsettled = state.unsettled.get(key, ())
    mine = [r for r in unsettled if r.status == "open" and r.expires > now]
    for record in mine:
        deferred = record.lease.expires <= now
        if record.digest not in holding and not deferred:
            return record
    if len(mine) >= MAX_OPEN_LEASES or _most_groups(state, key) <= 0:
        return None
    lease = _new_lease(state, key, now)
    if lease is None:
        for at, record in _overdue_at(state, key):
            if at <= now:
                return LeaseOverdue(now, record.digest)
    return lease


def turn(state: State, key: str) -> tuple[Rank, float, int]:
    """Sort those who ask for work by this: rank, then who was served longest ago."""
    worker = state.workers[key]
    return worker.rank, worker.served, worker.number


def hopeful(state: State, asking: Iterable[str], now: float) -> list[str]:
    """Those of the workers that ask for whom there may be work: of many that wait, only few."""
    served = {rank for rank in Rank if _leasable_step(state, rank, now) is not None}
    oldest = min((record.since for record in state.silent), default=inf)

    def hopes(key: str) -> bool:
        worker = state.workers[key]
        if worker.rank in served:
            return True
        pace = worker.pace
        late = pace is not None and now >= oldest + OVERDUE_AFTER * pace.lease_s
        if late and any(at <= now for at, _ in _overdue_at(state, key)):
            return True
        return any(record.status == "open" for record in state.unsettled.get(key, ()))

    return list(filter(hopes, asking))


def next_overdue(state: State, asking: Iterable[str], now: float) -> float | None:
    """When a lease may next become overdue to one of the workers that ask, or a little before."""
    if not state.silent:
        return None
    workers = [state.workers[key] for key in asking]
    soonest = inf
    for rank in (Rank.KNOWN, Rank.RECORDED):
        paces = [w.pace for w in workers if w.pace is not None and w.rank is rank]
        if paces:
            fastest = Pace(min(p.lease_s for p in paces), min(p.group_s for p in paces))
            soonest = min([soonest, *(at for at, _ in _waits(state, rank, fastest))])
    if soonest > now:
        return soonest if soonest < inf else None
    times = (at for key in asking for at, _ in _overdue_at(state, key))
    return min((at for at in times if at > now), default=None)


def _overdue_at(state: State, key: str) -> Iterator[tuple[float, LeaseRecord]]:
    """From when on a worker without work waits for others' leases no more, for those that were
    silent for longest."""
    worker = state.workers[key]
    if worker.pace is not None and worker.rank is not Rank.NEW:
        waits = _waits(state, worker.rank, worker.pace)
        yield from ((at, record) for at, record in waits if record.lease.worker != key)


def _waits(state: State, rank: Rank, pace: Pace) -> Iterator[tuple[float, LeaseRecord]]:
    """For how long a worker of a rank and pace waits for leases."""
    for record in state.silent:
        if rank <= record.rank:
            times = OVERDUE_AFTER if rank < record.rank else OVERDUE_AFTER_AMONG_EQUALS
            yield record.since + times * pace.seconds(record.lease.groups), record


def _most_groups(state: State, key: str) -> int:
    """Groups of the next lease of a worker, at most."""
    worker = state.workers[key]
    most = state.policy.groups_per_submission[worker.pool]
    if worker.rank is Rank.KNOWN:
        return most
    undecided = sum(
        record.lease.groups
        for record in state.unsettled.get(key, ())
        if record.status == "open" or state.lag(record) <= state.policy.async_level
    )
    trust = worker.standing.trust if worker.rank is Rank.RECORDED else 1
    return min(most, trust - undecided)


def _leasable_step(state: State, rank: Rank, now: float) -> int | None:
    """The lowest step that has groups for a worker of a rank, or that is to be opened for it."""
    policy, newest, short = state.policy, state.newest, False
    if newest is None:
        return None
    end = min(policy.steps, newest.version + policy.async_level + 1)
    for number in range(state.next_close, end):
        if number not in state.steps:
            return None if short else number
        if leasable_groups(state, number, rank, now) > 0:
            return number
        short |= needed_groups(state, number) > 0
    return None


def _new_lease(state: State, key: str, now: float) -> NonceNeeded | Lease | None:
    """A lease of the lowest step that needs groups and may be leased to this worker."""
    policy, worker, newest = state.policy, state.workers[key], state.newest
    number = _leasable_step(state, worker.rank, now)
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
        groups=min(_most_groups(state, key), leasable_groups(state, number, worker.rank, now)),
        version=newest.version,
        manifest_digest=newest.manifest_digest,
        issued=now,
        expires=now + policy.lease_timeout_s,
    )


def needed_groups(state: State, number: int) -> int:
    """Groups that an open step has neither trainable nor under way, by workers it relies on."""
    held = _usable_groups(state, number) + state.awaited[number]
    return max(0, state.policy.groups - held)


def _usable_groups(state: State, number: int) -> int:
    """Trainable groups of an open step; of the next to close, late ones of closed steps too."""
    if number != state.next_close:
        return state.usable[number]
    return sum(groups for step, groups in state.usable.items() if step <= number)


def leasable_groups(state: State, number: int, rank: Rank, now: float) -> int:
    """Groups of an open step that a worker of a rank may be leased now."""
    policy = state.policy
    if rank is Rank.NEW:
        trials = policy.newcomer_groups - tried_groups(state, number, now)
        return min(policy.groups - state.usable[number], trials)
    left = policy.max_groups - state.steps[number].leased if rank is Rank.KNOWN else policy.groups
    return min(needed_groups(state, number), left)


def tried_groups(state: State, number: int, now: float) -> int:
    """Groups of an open step that new workers hold, or did not deliver lately."""
    ends = state.trials.get(number, ())
    return len(ends) - bisect_right(ends, now)


def expired_leases(state: State, now: float) -> list[LeaseRecord]:
    """Unanswered leases whose time has run out."""
    return [r for r in _unanswered(state) if r.expires <= now]


def decide_close(state: State, now: float) -> Close | Stalled | None:
    """Whether the next step to close can be closed, or never will be; None: not yet."""
    policy, number = state.policy, state.next_close
    if state.finished:
        return None
    step = state.steps.get(number)
    if step is not None and _usable_groups(state, number) >= policy.groups:
        groups = _groups_in_order(state, past_awaited=False)
        if len(groups) >= policy.groups:
            return Close(number, groups[: policy.groups], complete=True)
    if _own_banned(state) and not any(record.awaited for record in state.live):
        return banned(state)
    if step is None:
        return _idle(state, now)
    exhausted = _exhausted(state, number)
    if now < step.since + policy.deadline_s and not exhausted:
        return None
    groups = _groups_in_order(state, past_awaited=True)[: policy.groups]
    if len(groups) >= policy.min_groups:
        return Close(number, groups, complete=len(groups) == policy.groups)
    return unfilled(state, number, had=len(groups), now=now) if exhausted else None


def next_due(state: State, now: float) -> float | None:
    """When time alone will next change a decision, in seconds since the epoch."""
    if state.finished:
        return None
    step = state.steps.get(state.next_close)
    closing = step.since + state.policy.deadline_s if step else state.progress + _idle_s(state)
    times = [closing, *(record.expires for record in _unanswered(state))]
    return min((at for at in times if at > now), default=None)


def _unanswered(state: State) -> Iterator[LeaseRecord]:
    return (r for r in state.live if r.status == "open")


def _groups_in_order(state: State, *, past_awaited: bool) -> tuple[TrainedGroup, ...]:
    """The groups that the next step to close may train: late ones of steps that are closed, which
    hold nothing back, then rank by rank those up to the first lease that is awaited."""
    late: list[TrainedGroup] = []
    own: dict[Rank, list[TrainedGroup]] = {rank: [] for rank in Rank}
    held_back = set[Rank]()
    for record in state.live:
        groups = [TrainedGroup(record.digest, group) for group in record.usable]
        if record.lease.step < state.next_close:
            late += groups  # the lag needs no look: `apply` strikes groups beyond it from `usable`
        elif record.lease.step == state.next_close:
            if record.awaited and not past_awaited:
                held_back.add(record.rank)
            elif record.rank not in held_back:
                own[record.rank] += groups
    return tuple(chain(late, *own.values()))


def _exhausted(state: State, number: int) -> bool:
    """Whether known workers were leased all that a step may lease them, and it was not enough."""
    undecided = chain(*state.unsettled.values())
    if any(record.lease.step == number for record in undecided):
        return False  # a lease that is overdue may still be answered
    return state.steps[number].leased >= state.policy.max_groups


def _own_banned(state: State) -> bool:
    """Whether all who ever registered are banned, workers of the run's own among them."""
    if not all(key in state.bans for key in state.workers):
        return False
    return any(worker.own for worker in state.workers.values())


def _idle_s(state: State) -> float:
    return max(state.policy.deadline_s, IDLE_DEADLINE_S)


def _idle(state: State, now: float) -> Stalled | None:
    """Stall if no step was open for too long and the publisher is the reason."""
    needed, newest = state.next_close - state.policy.async_level, state.newest
    published = newest is not None and newest.version >= needed
    if published or now < state.progress + _idle_s(state):
        return None
    return unopened(state, now)
