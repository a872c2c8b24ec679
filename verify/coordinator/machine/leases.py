"""The leases of a run, and what follows from all of them, kept up to date lease by lease.

An event changes one lease. So that it costs the same whatever the number of leases, sums and
selections are changed with it: a changed lease shares the others, and copies at most `dict`s of
references. `Leases` of the same records, made anew, have the same of everything.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from math import inf
from types import MappingProxyType
from typing import Literal

from rpds import HashTrieMap

from verify.coordinator.machine.events import FailedAttempt
from verify.formats.lease import Lease


class Rank(IntEnum):
    """How far a step relies on a worker's leases; better ranks come first (`filling`)."""

    KNOWN = 0
    """The run's own workers, and workers with an invite."""
    RECORDED = 1
    """Strangers that answered their last leases (`Standing.trust`)."""
    NEW = 2
    """All other workers, and workers in quarantine or on probation."""


@dataclass(frozen=True)
class LeaseRecord:
    lease: Lease
    digest: str
    document: str
    status: Literal[
        "open", "released", "submitted", "accepted", "rejected", "set_aside", "expired"
    ] = "open"
    submission: str | None = None
    verdict: str | None = None
    usable: tuple[int, ...] = ()
    """Groups that may be trained on and have not been."""
    rank: Rank = Rank.NEW
    """Rank of its worker when it was granted."""
    since: float = 0.0
    """Time from which its worker has no older lease to work on."""
    took_s: float = 0.0
    """Seconds from `since` to the submission."""
    overdue: bool = False
    """Whether others may be leased its groups, because its worker is silent."""
    recomputed: bool = False
    """Whether its rollouts were recomputed before they were accepted."""
    deferred: str | None = None
    """Digest of the deferred submission, which its holder sends again later."""
    deferred_until: float = 0.0
    attempts: tuple[FailedAttempt, ...] = ()
    """Failed attempts for which the submission was set aside."""

    @property
    def expires(self) -> float:
        """End of the lease: its own, or the end of its deferral if that is later."""
        return max(self.lease.expires, self.deferred_until)

    @property
    def awaited(self) -> bool:
        """Whether a step relies on its groups, which are not decided yet."""
        return self.status in ("open", "submitted") and not self.overdue


class Leases(Mapping[str, LeaseRecord]):
    """Leases by digest, in lease order.

    Args:
        records: by digest, in lease order.
        next_close: the next step to close when they were counted; leases of steps before it can be
            late, but no step relies on them.
    """

    def __init__(
        self, records: Mapping[str, LeaseRecord] = MappingProxyType({}), next_close: int = 0
    ) -> None:
        self._next_close = next_close
        self._records: dict[str, LeaseRecord] = {}
        self.live: dict[str, LeaseRecord] = {}
        """Those that are undecided or have groups to train."""
        self.submitted: dict[str, LeaseRecord] = {}
        self.unsettled: HashTrieMap[str, tuple[LeaseRecord, ...]] = HashTrieMap()
        """Open and submitted ones by worker."""
        self.awaited: Counter[int] = Counter()
        """Undecided groups that a step relies on, by the step of their leases."""
        self.undecided: Counter[int] = Counter()
        """Open and submitted ones, by step."""
        self.submissions: HashTrieMap[str, str] = HashTrieMap()
        """The lease of each submission."""
        self._none_ends_before = inf
        """No open lease ends before this time."""
        self._trained: Counter[int] = Counter()
        """Usable groups of workers that are not new, by step."""
        self._new: dict[int, dict[str, LeaseRecord]] = {}
        """Leases of new workers, by step."""
        self._heard: dict[tuple[Rank, int], dict[str, LeaseRecord]] = {}
        """Unanswered ones that open steps rely on, by rank and groups, longest silent first."""
        for record in records.values():
            self.take(record)
        for kind, heard in self._heard.items():
            self._heard[kind] = dict(sorted(heard.items(), key=lambda item: item[1].since))

    def __getitem__(self, digest: str) -> LeaseRecord:
        return self._records[digest]

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def changed(self, record: LeaseRecord) -> Leases:
        """Return the leases with one added or replaced."""
        new = copy(self)
        for name, value in vars(self).items():
            if name in ("usable", "silent", "trials"):
                delattr(new, name)
            elif isinstance(value, dict):
                setattr(new, name, value.copy())
        new.take(record)
        return new

    def take(self, record: LeaseRecord) -> None:
        """Count a record in place of an earlier one of its lease; nobody has these leases yet."""
        digest, lease, before = record.digest, record.lease, self._records.get(record.digest)
        self._records[digest] = record
        undecided = record.status in _UNDECIDED
        if record.status == "open":
            self._none_ends_before = min(self._none_ends_before, record.expires)
        _put(self.live, record, wanted=undecided or bool(record.usable))
        _put(self.submitted, record, wanted=record.status == "submitted")
        if record.status == "submitted" and before is not None:  # in lease order
            self.submitted = {d: self.live[d] for d in self.live if d in self.submitted}
        others = self.unsettled.get(lease.worker, ())
        if undecided or before is not None:
            mine = [record if each.digest == digest else each for each in others]
            if before is None or before.status not in _UNDECIDED:
                mine.append(record)
            kept = tuple(each for each in mine if each.status in _UNDECIDED)
            self.unsettled = (
                self.unsettled.insert(lease.worker, kept)
                if kept
                else self.unsettled.discard(lease.worker)
            )
        was = before is not None and before.status in _UNDECIDED
        self.undecided[lease.step] += undecided - was
        if record.submission is not None:
            self.submissions = self.submissions.insert(record.submission, digest)
        if record.rank is Rank.NEW:
            self._new[lease.step] = {**self._new.get(lease.step, {}), digest: record}
            return
        for sign, each in ((-1, before), (1, record)):
            if each is not None:
                self.awaited[lease.step] += sign * lease.groups * each.awaited
                self._trained[lease.step] += sign * len(each.usable)
        kind = record.rank, lease.groups
        heard = {**self._heard.get(kind, {})}
        if before is None or before.since != record.since:
            heard.pop(digest, None)  # it goes to the end
        silent = record.status == "open" and not record.overdue and record.deferred is None
        _put(heard, record, wanted=silent and lease.step >= self._next_close)
        self._heard[kind] = heard

    def of_submission(self, submission: str) -> LeaseRecord | None:
        """Return the lease that was answered with a submission."""
        digest = self.submissions.get(submission)
        return None if digest is None else self._records.get(digest)

    def ended(self, now: float) -> Sequence[LeaseRecord]:
        """Return the open leases whose time is over."""
        return [r for r in self._open(now) if r.expires <= now]

    def next_end(self, now: float) -> float:
        """Return a time after `now` before which no open lease ends; infinity: none is open."""
        if now < self._none_ends_before:
            return self._none_ends_before
        return min((r.expires for r in self._open(now) if r.expires > now), default=inf)

    def _open(self, now: float) -> Sequence[LeaseRecord]:
        """Return the open leases if one of them may have ended, else none."""
        if now < self._none_ends_before:
            return ()
        found = [r for r in self.live.values() if r.status == "open"]
        # Most leases are answered in time, so a time that was once the first end passes in vain.
        self._none_ends_before = min((r.expires for r in found), default=inf)
        return found

    @cached_property
    def usable(self) -> Counter[int]:
        """Groups that may be trained on and have not been, by the step of their leases.

        A new worker's groups do not count if an undecided lease of another new worker comes before
        them, because it is not known when they may train.
        """
        groups = +self._trained
        for step, records in self._new.items():
            for record in records.values():
                if record.awaited and step >= self._next_close:
                    break
                groups[step] += len(record.usable)
        return groups

    @cached_property
    def silent(self) -> Sequence[LeaseRecord]:
        """Unanswered leases that open steps rely on; deferred leases are left out.

        For each rank and number of groups, the lease whose worker was silent for longest; those
        that were silent for longest first.
        """
        found = [next(iter(records.values())) for records in self._heard.values() if records]
        return sorted(found, key=lambda record: record.since)

    @cached_property
    def trials(self) -> Mapping[int, Sequence[float]]:
        """Ends of the leases of new workers that were not accepted, by step, ascending."""
        found: dict[int, list[float]] = defaultdict(list)
        for step, records in self._new.items():
            found[step] += [r.expires for r in records.values() if r.status != "accepted"]
        return {step: sorted(ends) for step, ends in found.items() if ends}


_UNDECIDED = ("open", "submitted")


def _put(records: dict[str, LeaseRecord], record: LeaseRecord, *, wanted: bool) -> None:
    if wanted:
        records[record.digest] = record
    else:
        records.pop(record.digest, None)
