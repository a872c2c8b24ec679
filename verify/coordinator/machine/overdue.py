"""Which workers are slow, and when a lease is overdue: another worker waits that would be faster.

A worker of the same or a better rank waits without other work, and the lease's worker was silent
for `OVERDUE_AFTER` times what the waiting worker takes for as many groups, or
`OVERDUE_AFTER_AMONG_EQUALS` times if the ranks are equal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import inf
from types import MappingProxyType

from verify.coordinator.machine.leases import LeaseRecord, Rank
from verify.coordinator.machine.state import Pace, State, Worker

OVERDUE_AFTER = 2.0
"""A lease is overdue after this many times the time of a waiting worker of a better rank."""
OVERDUE_AFTER_AMONG_EQUALS = 4.0
"""The same for a worker of equal rank; some honest workers are this much slower than others."""
SLOW_AFTER = 2.0
"""Who takes longer than this many times a pool's typical time a group is slow: its leases are cut
to as much as takes it so long as a whole lease takes others, times this."""
SHORT_S = 30.0
"""Leases that take less time are not worth dividing."""


def in_time(state: State, worker: Worker, groups: int) -> int:
    """Return how many groups a worker may be leased of so many; all of them if it is not slow."""
    pace = _slow_pace(state, worker)
    if pace is None:
        return groups
    return max(1, int(groups * SLOW_AFTER * state.typical[worker.pool] / pace.group_s))


def steps_ahead(state: State, worker: Worker, groups: int) -> int:
    """Return how many steps will close while a slow worker samples some groups; 0 for others."""
    pace = _slow_pace(state, worker)
    return int(groups * pace.group_s / state.step_s) if pace and state.step_s else 0


def _slow_pace(state: State, worker: Worker) -> Pace | None:
    """Return the pace of a slow worker; None for others."""
    pace, allowed_s = worker.pace, SLOW_AFTER * state.typical.get(worker.pool, inf)
    slow = pace is not None and pace.lease_s >= SHORT_S and pace.group_s > allowed_s
    return pace if slow else None


def fastest(
    state: State, asking: Iterable[str], known: Mapping[Rank, Pace] = MappingProxyType({})
) -> dict[Rank, Pace]:
    """Return for each rank the least times of workers that ask, and of `known`."""
    found = dict(known)
    for worker in (state.workers[key] for key in asking):
        pace, rank = worker.pace, worker.rank
        if pace is not None and rank is not Rank.NEW:
            best = found.get(rank, pace)
            found[rank] = Pace(min(best.lease_s, pace.lease_s), min(best.group_s, pace.group_s))
    return found


def soonest_overdue(state: State, paces: Mapping[Rank, Pace]) -> float:
    """Return when a lease becomes overdue for workers of these times; infinity: never."""
    return min((at for rank in paces for at, _ in _waits(state, rank, paces[rank])), default=inf)


def next_overdue(state: State, asking: Collection[str], now: float) -> float | None:
    """Return when a lease next becomes overdue for a worker that asks, or a little earlier."""
    if not state.leases.silent:
        return None
    soonest = soonest_overdue(state, fastest(state, asking))
    if soonest > now:
        return soonest if soonest < inf else None
    times = (at for key in asking for at, _ in overdue_at(state, key))
    return min((at for at in times if at > now), default=None)


def overdue_at(state: State, key: str) -> Iterator[tuple[float, LeaseRecord]]:
    """Yield when the leases of the most silent workers become overdue for a worker without work."""
    worker = state.workers[key]
    if worker.pace is not None and worker.rank is not Rank.NEW:
        waits = _waits(state, worker.rank, worker.pace)
        yield from ((at, record) for at, record in waits if record.lease.worker != key)


def _waits(state: State, rank: Rank, pace: Pace) -> Iterator[tuple[float, LeaseRecord]]:
    """Yield until when a worker of a rank and pace waits for leases, and the leases."""
    for record in state.leases.silent:
        if rank <= record.rank:
            times = OVERDUE_AFTER if rank < record.rank else OVERDUE_AFTER_AMONG_EQUALS
            yield record.since + times * pace.seconds(record.lease.groups), record
