"""Limits how many submissions wait for a verdict; above the limit, workers must retry later.

If validators are slower than workers, or down, submissions would fill the disk. So the number and
bytes of waiting submissions are limited, and a reserve of the disk is kept for verdicts and the
ledger. Above a limit a submission gets 429 before its body is read, with a `Retry-After` from the
measured rate of verdicts, and no new lease is granted.

The worker loses nothing. If its lease would end before the retry, a `SubmissionDeferred` extends
the lease. Past the lease's own time only the submission that the worker announced is
accepted, so waiting gives nobody time to sample. An extension lasts at most `fill.deadline` in all,
and not beyond the lag.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runspec.core.schema import Backlog as BacklogLimits
from verify.coordinator.edge.requests import Refusal
from verify.coordinator.journal import Journal
from verify.coordinator.machine.events import SubmissionDeferred
from verify.coordinator.machine.state import LeaseRecord
from verify.formats.submission import SubmissionEnvelope

GRACE_S = 60.0
"""Seconds a worker may be late beyond its `Retry-After`."""
LONGEST_RETRY_S = 60
"""Workers retry at least this often, so that a validator that comes back finds work."""
FIRST_RETRY_S = 5
"""`Retry-After` before the first verdict."""


class Backlog:
    """Accepts submissions while there is room.

    Args:
        journal: journal of the run.
        limits: `verify.backlog` of the spec.
        free_bytes: free space of the disk that holds the run directory.
    """

    def __init__(
        self,
        journal: Journal,
        limits: BacklogLimits,
        *,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        self._journal, self._limits, self._free_bytes = journal, limits, free_bytes
        self.uploading: dict[str, SubmissionEnvelope] = {}
        """Submissions that are being uploaded, by lease."""
        self._deferred: dict[str, float] = {}
        """Time until which the retry of a deferred submission is expected, by lease."""

    @contextmanager
    def reserve(
        self, record: LeaseRecord, envelope: SubmissionEnvelope, now: float
    ) -> Iterator[None]:
        """Reserve room for a submission while it is uploaded.

        Args:
            record: lease of the submission, open at `now`.
            envelope: envelope of the submission.
            now: time at which the lease was open. By a later reading of the clock it could have
                ended, and a lease cannot be deferred after its end.

        Raises:
            Refusal: 429, there is no room; 503, the submission is being uploaded already.
        """
        digests = [upload.digest for upload in self.uploading.values()]
        if record.digest in self.uploading or envelope.digest in digests:
            raise Refusal(503, "this submission is being uploaded already")
        reason = self.full(envelope.bytes)
        if reason is not None:
            retry_after_s = self._retry_after_s(now)
            self._defer(record, envelope.digest, retry_after_s, now)
            raise Refusal(429, reason, retry_after_s=retry_after_s)
        self._deferred.pop(record.digest, None)
        self.uploading[record.digest] = envelope
        try:
            yield
        finally:
            del self.uploading[record.digest]

    def full(self, more: int = 1) -> str | None:
        """Return why there is no room; None if there is room.

        Args:
            more: bytes of the next submission.
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
        if free - self._uploading_bytes() - more < self._limits.disk_reserve:
            return (
                f"{free} bytes of the coordinator's disk are free, verify.backlog.disk_reserve is "
                f"{self._limits.disk_reserve}"
            )
        return None

    def report(self) -> dict[str, Any]:
        """Return the `backlog` part of `GET /v1/status`."""
        count, size = self._held()
        now = self._journal.clock()
        return {
            "submissions": count,
            "bytes": size,
            "deferred": sum(until > now for until in self._deferred.values()),
            "withheld": self.full(),
        }

    def _held(self) -> tuple[int, int]:
        waiting = self._journal.state.to_judge
        size = sum(self._journal.history.bytes_of(record.digest) for record in waiting)
        return len(waiting) + len(self.uploading), size + self._uploading_bytes()

    def _uploading_bytes(self) -> int:
        return sum(upload.bytes for upload in self.uploading.values())

    def _retry_after_s(self, now: float) -> int:
        """Seconds until it is this worker's turn, by the rate of verdicts so far."""
        self._deferred = {lease: until for lease, until in self._deferred.items() if until > now}
        rate = self._journal.history.verdicts_per_s(now)
        if rate <= 0.0:
            return FIRST_RETRY_S
        return max(1, min(LONGEST_RETRY_S, math.ceil((len(self._deferred) + 1) / rate)))

    def _defer(self, record: LeaseRecord, submission: str, retry_after_s: int, now: float) -> None:
        state = self._journal.state
        comes_again = now + retry_after_s
        self._deferred[record.digest] = comes_again + GRACE_S
        # Recorded only if the lease needs it, so a worker that asks often does not fill the ledger.
        if comes_again + GRACE_S / 2 <= record.expires or state.lag(record) > (
            state.policy.async_level
        ):
            return
        until = min(comes_again + GRACE_S, record.lease.expires + state.policy.deadline_s)
        if until > record.expires:
            self._journal.record(SubmissionDeferred(now, record.digest, submission, until))
