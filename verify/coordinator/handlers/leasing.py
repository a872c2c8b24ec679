"""Handlers for workers: leases, heartbeats, submissions."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from aiohttp import web

from runspec.core.files import sync_folder
from runspec.core.run_files import SubmissionFiles, submission_files
from runspec.core.signed import BadSignature
from verify.coordinator import requests
from verify.coordinator.handlers import Answer, RunContext, Signed
from verify.coordinator.handlers.line import Line, Question
from verify.coordinator.handlers.registering import require_pools
from verify.coordinator.journal import Finished
from verify.coordinator.machine import events, filling, overdue
from verify.coordinator.machine.hopes import Hopes
from verify.coordinator.machine.leases import LeaseRecord, Rank
from verify.coordinator.machine.state import Pace, State
from verify.coordinator.requests import Refusal, refusing
from verify.formats.lease import Lease, lease_digest, sign_lease
from verify.formats.submission import SubmissionEnvelope, max_submission_bytes, open_submission

_log = logging.getLogger(__name__)
_LOOK_S = 0.001
"""Seconds for each waiting question between two looks at all of them."""
_AT_ONCE = 10
"""Leases granted before other requests are answered again."""


class Leasing:
    """Tells workers what to sample and receives their submissions.

    Args:
        run: the run.
    """

    def __init__(self, run: RunContext) -> None:
        self._run, self._journal = run, run.journal
        self._pools = {pool.name: pool for pool in run.spec.samplers}
        self._waiting = Line(lambda: run.journal.state)
        self._paces: dict[Rank, Pace] = {}
        """Of their workers, or faster (`overdue.fastest`)."""
        self._watch: asyncio.Task[None] | None = None
        """Answers them after each event: alone, so that an event wakes whom it has work for."""
        self._settled: State | None = None
        """State in which there was no work for the waiting questions."""
        self._overdue_at = math.inf
        """Time at which there may be work although the state does not change."""
        self._looked = -math.inf
        """Time at which each waiting question was last looked at."""

    def routes(self) -> list[web.RouteDef]:
        post = self._run.post
        return [
            post("/v1/heartbeat", self._heartbeat, "state", by="heartbeat"),
            post("/v1/leases", self._lease, "wait", "holding", by="lease"),
            post("/v1/release", self._release, "leases", by="release"),
            web.post("/v1/submissions", self._submit),
        ]

    async def _heartbeat(self, asked: Signed) -> Answer:
        run, now = self._run, self._journal.clock()
        if asked.key in run.roles.validator:
            activity = run.validators
        elif asked.key in self._journal.state.workers:
            activity = run.workers
        else:
            raise Refusal(403, "this key is neither a worker's nor a validator's")
        with refusing(400, TypeError, ValueError, what="state: "):
            every_s = activity.heartbeat(asked.key, dict(asked.body["state"]), now)
        run.claims.prolong(asked.key, now)
        return {"every_s": every_s}

    async def _lease(self, asked: Signed) -> web.Response:
        wait_s, holding = requests.wait_and_holding(asked.body)
        if asked.key in self._journal.state.workers:
            self._run.workers.seen(asked.key, self._journal.clock())
        connection = asked.http.transport

        def gone() -> bool:
            return connection is None or connection.is_closing()

        with self._run.authentication.poll(asked.key, asked.http):
            lease = await self.lease(asked.key, holding, wait_s, gone=gone)
        if lease is None:
            return web.Response(status=204)
        return web.Response(body=lease, content_type="application/json")

    async def _release(self, asked: Signed) -> None:
        self.release(asked.key, requests.digests("leases", asked.body["leases"]))
        for question in [each for each in self._waiting if each.key == asked.key]:
            self._answer(question, None)  # whoever gives leases back leaves

    async def _submit(self, request: web.Request) -> web.StreamResponse:
        caller = self._run.authentication.caller(request, "submission")
        signed = requests.read_envelope(request)
        with refusing(400, BadSignature):
            envelope = open_submission(signed)
        if envelope.worker != caller.key:
            raise Refusal(403, "the submission is another worker's")
        if envelope.digest != caller.body_digest:
            raise Refusal(400, "the envelope names another body")
        await self.submit(envelope, signed, request.content.iter_chunked(requests.PIECE_BYTES))
        return web.json_response({}, status=202)

    async def lease(
        self,
        key: str,
        holding: Collection[str],
        wait_s: float,
        *,
        gone: Callable[[], bool] = lambda: False,
    ) -> bytes | None:
        """Return a signed lease for a worker; None if there was none within `wait_s` seconds.

        Args:
            key: public key of the worker.
            holding: digests of the leases that its process works on.
            wait_s: how long to wait for work.
            gone: whether the worker has closed the connection, so that it gets no lease.

        Raises:
            Refusal: the key is not registered.
            Finished: the run is finished.
        """
        require_pools(self._run.spec)
        if key not in self._journal.state.workers:
            raise Refusal(403, "this key is not registered: POST /v1/workers first")
        if self._journal.state.finished:
            raise Finished
        answer = asyncio.get_running_loop().create_future()
        question = Question(key, holding, gone, answer)
        self._waiting.join(question)
        try:
            self._answer_in_turn([question])
            if not answer.done() and wait_s > 0.0:
                if self._watch is not None:  # it may have to look earlier now
                    self._watch.cancel()
                self._watch = asyncio.create_task(self._answer_after_events())
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await answer
            # An answer that comes with the end of the wait counts.
            record = answer.result() if answer.done() and not answer.cancelled() else None
            return None if record is None else record.document.encode()
        finally:
            self._waiting.leave(question)
            if not len(self._waiting) and self._watch is not None:
                self._watch.cancel()
                self._watch = None

    async def _answer_after_events(self) -> None:
        error: Exception | None = None
        try:
            going_on = True
            while going_on:
                if self._journal.state.finished:
                    raise Finished
                if self._answer_in_turn(()):
                    going_on = await self._journal.change(None, due=self._overdue_at)
                else:
                    await asyncio.sleep(0)  # lets other requests be answered
        except Exception as failure:  # noqa: BLE001 - raised again for each that waits
            error = failure
        for question in [*self._waiting]:
            self._answer(question, error)

    def _answer(self, question: Question, answer: LeaseRecord | Exception | None) -> None:
        self._waiting.leave(question)
        if question.answer.done():  # it has waited long enough
            return
        if isinstance(answer, Exception):
            question.answer.set_exception(answer)
        else:
            question.answer.set_result(answer)

    def _answer_in_turn(self, new: Sequence[Question]) -> bool:
        """Answer open questions for which there is work; return whether these were all.

        Args:
            new: the newest question. If nothing has changed, only it needs an answer.
        """
        journal, now = self._journal, self._journal.clock()
        self._paces = overdue.fastest(journal.state, {each.key for each in new}, self._paces)
        if late := now >= self._overdue_at:
            self._looked = now
        while True:
            before = journal.state
            granted = self._granted(self._waiting if late else new, now)
            for question, record in granted.items():
                self._answer(question, record)
            if len(granted) >= _AT_ONCE:
                return False
            if journal.state is before:
                break
        self._settled = journal.state
        soonest = overdue.soonest_overdue(journal.state, self._paces)
        if late and soonest <= now:  # workers so fast may wait no more
            keys = {question.key for question in self._waiting}
            self._paces = overdue.fastest(journal.state, keys)
            soonest = overdue.next_overdue(journal.state, keys, now) or math.inf
        self._overdue_at = max(soonest, self._looked + _LOOK_S * len(self._waiting))
        return True

    def _granted(self, asking: Iterable[Question], now: float) -> dict[Question, LeaseRecord]:
        """Lease what there is, in turn, and what only those that ask may be leased.

        Once `_AT_ONCE` questions have a lease, the others stay open.
        """
        journal, found = self._journal, dict[Question, LeaseRecord]()
        hopes = Hopes(journal.state, now)

        def lease(question: Question) -> None:
            nonlocal hopes
            if question in found or question.gone() or len(found) >= _AT_ONCE:
                return
            if (record := self._lease_now(question)) is not None:
                found[question] = record
            if journal.state is not hopes.state:
                hopes = Hopes(journal.state, now)

        with journal.together():
            for rank in Rank if journal.state is not self._settled else ():
                for question in self._waiting.of(rank) if rank in hopes.served else ():
                    lease(question)
                    if rank not in hopes.served or len(found) >= _AT_ONCE:
                        break
            for question in asking:
                if hopes(question.key):
                    lease(question)
        return found

    def _lease_now(self, question: Question) -> LeaseRecord | None:
        key = question.key
        while True:
            state, now = self._journal.state, self._journal.clock()
            decision = filling.decide_lease(state, key, now, holding=question.holding)
            match decision:
                case LeaseRecord():
                    return decision
                case None:
                    return None
                case _ if self._run.backlog.full() is not None:
                    return None  # the status reports why
                case filling.NonceNeeded(step):
                    nonce, workers = secrets.token_hex(32), len(self._journal.state.workers)
                    self._journal.record(events.NonceDrawn(now, step, nonce, workers))
                case events.LeaseOverdue():
                    lease = self._journal.state.leases[decision.lease].lease
                    self._journal.record(decision)
                    _log.warning(
                        "worker %s is silent: others are leased the groups of its lease %d of "
                        "step %d too",
                        *(lease.worker[:16], lease.index, lease.step),
                    )
                case Lease():
                    document = sign_lease(decision, self._run.key)
                    digest = lease_digest(document)
                    event = events.LeaseGranted(now, decision, digest, document.decode())
                    self._journal.record(event)

    def release(self, key: str, leases: Collection[str]) -> None:
        """Take back leases that their holder will not answer; others may be leased the groups.

        Leases that are not open, not the caller's, or being answered now do not change.

        Args:
            key: public key of the worker.
            leases: digests of the leases.
        """
        for digest in leases:
            record = self._journal.state.leases.get(digest)
            held = record is not None and record.lease.worker == key and record.status == "open"
            if held and digest not in self._run.backlog.uploading:
                self._journal.record(events.LeaseReleased(self._journal.clock(), digest))

    async def submit(
        self, envelope: SubmissionEnvelope, signed: bytes, chunks: AsyncIterator[bytes]
    ) -> None:
        """Receive a submission; the same bytes again change nothing.

        If too many submissions wait for a verdict, a refusal names the time of a retry before the
        body is read, and the lease lasts until then.

        Args:
            envelope: statement of the submission; the caller's signature is checked.
            signed: bytes of the envelope.
            chunks: the body.
        """
        require_pools(self._run.spec)
        record, now = self._lease_of(envelope), self._journal.clock()
        if record.submission == envelope.digest:
            return
        self._must_be_open(record, envelope, now)
        if envelope.digest in self._journal.state.leases.submissions:
            raise Refusal(409, "the same bytes were submitted for another lease")
        limit = max_submission_bytes(self._run.spec, self._pools[record.lease.pool])
        if envelope.bytes > limit:
            raise Refusal(413, f"{envelope.bytes} bytes, more than the {limit} allowed")
        files = submission_files(self._journal.run_dir, envelope.step, envelope.digest)
        folder, size = files.submission.parent, envelope.bytes
        with self._run.backlog.reserve(record, envelope, now):
            async with requests.received(chunks, folder, digest=envelope.digest, size=size) as body:
                with self._journal.recording(files.submission, files.submission_envelope):
                    await requests.to_the_end(partial(_place, body, files, signed))
                    now = self._journal.clock()
                    self._must_be_open(self._lease_of(envelope), envelope, now)
                    event = events.SubmissionReceived(now, envelope.lease, envelope.digest, size)
                    self._journal.record(event)

    def _lease_of(self, envelope: SubmissionEnvelope) -> LeaseRecord:
        record = self._journal.state.leases.get(envelope.lease)
        if record is None:
            raise Refusal(409, "no such lease, or its step is long closed")
        lease = record.lease
        if lease.worker != envelope.worker:
            raise Refusal(403, "the lease is another worker's")
        if (lease.run, lease.step, lease.index) != (envelope.run, envelope.step, envelope.index):
            raise Refusal(400, "run, step or index are not the lease's")
        return record

    def _must_be_open(self, record: LeaseRecord, envelope: SubmissionEnvelope, now: float) -> None:
        if self._journal.state.finished:
            raise Finished
        if record.status == "expired" or record.expires <= now:
            raise Refusal(409, "the lease has expired")
        if record.lease.expires <= now and record.deferred != envelope.digest:
            raise Refusal(409, "the lease has expired for all but what was deferred")
        if record.status == "released":
            raise Refusal(409, "the lease was given back")
        if record.status != "open":
            raise Refusal(409, "the lease was answered already, with other bytes")


def _place(body: Path, files: SubmissionFiles, signed: bytes) -> None:
    requests.write_small(files.submission_envelope, signed)
    body.rename(files.submission)
    sync_folder(files.submission.parent)
