"""Handlers of the coordinator, by topic: for workers, validators, islands, the operator, everybody.

A handler checks a request, decides by `verify.coordinator.machine`, and records an event in the
journal. Here is what the handlers of a run share: its journal and keys, its backlog, and how a
request arrives.

The `Backlog` limits how many submissions wait for a verdict. If validators are slower than workers,
or down, submissions would fill the disk. So the number and bytes of waiting submissions are
limited, and a reserve of the disk is kept for verdicts and the ledger. Above a limit a submission
gets 429 before its body is read, with a `Retry-After` from the measured rate of verdicts, and no
new lease is granted.

The worker loses nothing. If its lease would end before the retry, a `SubmissionDeferred` extends
the lease. Past the lease's own time only the submission that the worker announced is accepted, so
waiting gives nobody time to sample. An extension lasts at most `fill.deadline` in all, and not
beyond the lag.
"""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from aiohttp import web

from runspec.core.roles import Roles
from runspec.core.schema import Backlog as BacklogLimits
from runspec.core.schema import RunSpec
from runspec.core.signed import SigningKey
from verify.coordinator.authentication import Authentication
from verify.coordinator.handlers.workers import Activity
from verify.coordinator.journal import Journal
from verify.coordinator.machine.events import SubmissionDeferred
from verify.coordinator.machine.leases import LeaseRecord
from verify.coordinator.machine.trust import Claims
from verify.coordinator.requests import Refusal, read_json, send
from verify.coordinator_http import SignedRequest
from verify.formats.submission import SubmissionEnvelope
from verify.profile import PairLimits

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Answer = web.StreamResponse | dict[str, Any] | None
"""An answer, or what is sent as JSON; None: an empty map."""
_SMALL_BYTES = 64 * 1024
"""Larger answers count as downloads, and few downloads may be sent at once."""


@dataclass(frozen=True)
class Signed:
    """A signed request with a JSON body."""

    key: str
    """Public key of the caller."""
    body: dict[str, Any]
    http: web.Request


@dataclass(frozen=True)
class RunContext:
    """One run as its handlers see it."""

    journal: Journal
    spec: RunSpec
    """The resolved spec."""
    key: SigningKey
    """Signs what the coordinator grants."""
    roles: Roles
    authentication: Authentication
    """Identifies and limits callers."""
    backlog: Backlog
    """Limits the waiting submissions."""
    workers: Activity = field(default_factory=Activity)
    validators: Activity = field(default_factory=Activity)
    islands: Activity = field(default_factory=Activity)
    """Activity of learner islands, by name instead of key."""
    claims: Claims = field(default_factory=Claims)
    """Which validator works on which submission."""

    @cached_property
    def limits(self) -> PairLimits:
        """Limits of each pair, also those that have expired: the validators, which use all of them,
        check the dates."""
        return PairLimits(self.spec, dated=False)

    def operator(self, request: web.Request) -> SignedRequest:
        """Return who signed a request that only the coordinator's key may make.

        Raises:
            Refusal: 403, it is another key.
        """
        caller = self.authentication.caller(request)
        if caller.key not in self.roles.coordinator:
            raise Refusal(403, "only the coordinator's own key may do this")
        return caller

    def get(
        self, path: str, handler: Handler, by: Callable[[web.Request], SignedRequest | None]
    ) -> web.RouteDef:
        """Let a handler answer requests without a body.

        Args:
            path: path of the requests.
            handler: answers a request.
            by: identifies the caller or, if anybody may ask, limits unsigned requests.
        """

        async def answer(request: web.Request) -> web.StreamResponse:
            by(request)
            return await handler(request)

        return web.get(path, answer)

    def post(
        self,
        path: str,
        handler: Callable[[Signed], Awaitable[Answer]],
        *fields: str,
        by: Callable[[web.Request], SignedRequest] | str,
    ) -> web.RouteDef:
        """Let a handler answer signed requests that have a JSON body.

        Args:
            path: path of the requests.
            handler: answers a request.
            fields: fields that the body must have; it may have those with a question mark.
            by: identifies the caller, or is the kind of a worker's request (`RATES`).
        """

        needed = {name for name in fields if not name.startswith("?")}
        optional = {name[1:] for name in fields if name.startswith("?")}

        async def answer(request: web.Request) -> web.StreamResponse:
            caller = by(request) if callable(by) else self.authentication.caller(request, by)
            body = await read_json(request, caller, needed, optional)
            found = await handler(Signed(caller.key, body, request))
            if isinstance(found, web.StreamResponse):
                return found
            return web.json_response(found or {})

        return web.post(path, answer)

    async def send_json(
        self, request: web.Request, document: bytes, headers: Mapping[str, str] | None = None
    ) -> web.StreamResponse:
        """Answer with a JSON document that may be large.

        Raises:
            Refusal: 503, too many large answers are being sent.
        """
        if len(document) <= _SMALL_BYTES:
            return web.Response(body=document, content_type="application/json", headers=headers)
        with self.authentication.download(request):
            headers = {"Content-Type": "application/json", **(headers or {})}
            return await send(request, io.BytesIO(document), len(document), headers)


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
            # Seconds until it is this worker's turn, by the rate of verdicts so far.
            self._deferred = {le: until for le, until in self._deferred.items() if until > now}
            rate, retry_after_s = self._journal.history.verdicts_per_s(now), FIRST_RETRY_S
            if rate > 0.0:
                turn_s = math.ceil((len(self._deferred) + 1) / rate)
                retry_after_s = max(1, min(LONGEST_RETRY_S, turn_s))
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
