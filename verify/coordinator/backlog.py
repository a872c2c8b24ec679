"""How much may wait for a verdict: beyond it, workers are told to come again later.

Validators may be slower than workers, or away. Then what was handed in would fill the disk. So
submissions that wait for a verdict are bounded in number and bytes, and a reserve of the disk is
kept for verdicts and the ledger. Above a bound a submission is answered 429 before its body is
read, with a `Retry-After` from the measured rate of verdicts, and no new lease is granted.

Nothing is lost by that. Who came in time keeps the lease: where its time would run out before the
worker is to come again, a `SubmissionDeferred` extends it. Past the lease's own time only the
submission that the holder had by then is taken, so that waiting gives nobody time to sample. It
may last for another `fill.deadline` in all, and no longer than its lag allows.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runspec.core.spec.schema import Backlog as Limits
from verify.coordinator.events import SubmissionDeferred
from verify.coordinator.intake import Refusal
from verify.coordinator.journal import Journal
from verify.coordinator.state import LeaseRecord
from verify.formats.submission import SubmissionEnvelope

GRACE_S = 60.0
"""What a worker may be late beyond the `Retry-After` that it was told."""
LONGEST_RETRY_S = 60
"""Workers ask at least this often, so that a validator that comes back finds work."""
FIRST_RETRY_S = 5
"""Where no verdict was ever measured."""


class Backlog:
    """Admits submissions while there is room.

    Args:
        journal: the run's.
        waiting: the submissions that wait for a verdict.
        limits: `verify.backlog` of the spec.
        free_bytes: of the disk that holds the run directory.
    """

    def __init__(
        self,
        journal: Journal,
        waiting: Callable[[], Sequence[LeaseRecord]],
        limits: Limits,
        *,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        self._journal, self._waiting, self._limits = journal, waiting, limits
        self._free_bytes = free_bytes
        self._uploading: dict[str, int] = {}
        """Bytes that are still to come, by lease."""
        self._told: dict[str, float] = {}
        """By lease, until when a worker that was told to come again is awaited."""

    @contextmanager
    def admitted(
        self, record: LeaseRecord, envelope: SubmissionEnvelope, now: float
    ) -> Iterator[None]:
        """Keeps room for a submission while it is uploaded.

        Args:
            record: of its lease, which is open to it at `now`.
            envelope: of the submission.
            now: when that was found. A lease that ends between two looks at the clock would be
                deferred after its end, which is no event that can follow.

        Raises:
            Refusal: 429, there is none now.
        """
        reason = self.full(envelope.bytes)
        if reason is not None:
            retry_after_s = self._retry_after_s(now)
            self._defer(record, envelope.digest, retry_after_s, now)
            raise Refusal(429, reason, retry_after_s=retry_after_s)
        self._told.pop(record.digest, None)
        self._uploading[record.digest] = envelope.bytes
        try:
            yield
        finally:
            del self._uploading[record.digest]

    def full(self, more: int = 1) -> str | None:
        """Why nothing is taken in and nothing new is leased; None when there is room.

        Args:
            more: bytes that would come.
        """
        count, size = self._held()
        if count >= self._limits.submissions:
            return (
                f"{count} submissions wait for a verdict, verify.backlog.submissions is "
                f"{self._limits.submissions}"
            )
        if count and size + more > self._limits.bytes:
            return f"{size} bytes wait for a verdict, verify.backlog.bytes is {self._limits.bytes}"
        free = self._free_bytes(self._journal.run_dir)
        if free - sum(self._uploading.values()) - more < self._limits.disk_reserve:
            return (
                f"{free} bytes of the coordinator's disk are free, verify.backlog.disk_reserve is "
                f"{self._limits.disk_reserve}"
            )
        return None

    def report(self) -> dict[str, Any]:
        """For `GET /v1/status`."""
        count, size = self._held()
        now = self._journal.clock()
        return {
            "submissions": count,
            "bytes": size,
            "deferred": sum(until > now for until in self._told.values()),
            "withheld": self.full(),
        }

    def _held(self) -> tuple[int, int]:
        waiting = self._waiting()
        size = sum(self._journal.history.bytes_of(record.digest) for record in waiting)
        return len(waiting) + len(self._uploading), size + sum(self._uploading.values())

    def _retry_after_s(self, now: float) -> int:
        """Seconds until it is this caller's turn, by the rate of verdicts so far."""
        self._told = {lease: until for lease, until in self._told.items() if until > now}
        rate = self._journal.history.verdicts_per_s(now)
        if rate <= 0.0:
            return FIRST_RETRY_S
        return max(1, min(LONGEST_RETRY_S, math.ceil((len(self._told) + 1) / rate)))

    def _defer(self, record: LeaseRecord, submission: str, retry_after_s: int, now: float) -> None:
        state = self._journal.state
        comes_again = now + retry_after_s
        self._told[record.digest] = comes_again + GRACE_S
        # A row only where the lease needs it: who asks all the time must not fill the ledger.
        if comes_again + GRACE_S / 2 <= record.expires or state.lag(record) > (
            state.policy.async_level
        ):
            return
        until = min(comes_again + GRACE_S, record.lease.expires + state.policy.deadline_s)
        if until > record.expires:
            self._journal.record(SubmissionDeferred(now, record.digest, submission, until))
