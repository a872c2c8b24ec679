"""Handlers for validators: submissions to judge, and verdicts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection

from aiohttp import web

from runspec.core.files import sync_folder
from runspec.core.run_files import submission_files
from runspec.core.signed import BadSignature
from verify.coordinator import requests
from verify.coordinator.handlers import Answer, RunContext, Signed
from verify.coordinator.journal import Finished
from verify.coordinator.machine import events, verdicts
from verify.coordinator.machine.leases import LeaseRecord
from verify.coordinator.requests import Refusal, refusing
from verify.coordinator_http import SignedRequest
from verify.formats import verdict
from verify.formats.tables import MalformedTable

_log = logging.getLogger(__name__)


class Judging:
    """Gets one verdict for each submission that can still train, even if validators fail.

    Args:
        run: the run.
    """

    def __init__(self, run: RunContext) -> None:
        self._run, self._journal = run, run.journal
        self._claims = run.claims
        self._seen = verdicts.Seen()
        for record in run.journal.state.leases.values():  # after a restart
            if record.status == "accepted" and record.submission is not None:
                step, submission = record.lease.step, record.submission
                path = submission_files(run.journal.run_dir, step, submission).verdict
                try:
                    self._seen.add(step, submission, verdict.read_fingerprints(path))
                except (OSError, MalformedTable) as error:
                    _log.warning("new rollouts are not compared with those of %s: %s", path, error)

    def routes(self) -> list[web.RouteDef]:
        post, by = self._run.post, self._validator
        return [
            post("/v1/validator/next", self._next, "wait", "holding", by=by),
            post("/v1/validator/release", self._release, "submissions", "fault", by=by),
            self._run.get("/v1/submissions/{digest:[0-9a-f]{64}}", self._download, by),
            web.post("/v1/verdicts", self._verdict),
        ]

    def _validator(self, request: web.Request) -> SignedRequest:
        caller = self._run.authentication.caller(request)
        if caller.key not in self._run.roles.validator:
            raise Refusal(403, "roles.json does not name this key as a validator's")
        self._run.validators.seen(caller.key, self._journal.clock())
        return caller

    async def _next(self, asked: Signed) -> Answer:
        wait_s, holding = requests.wait_and_holding(asked.body)
        found = await self.next_submission(asked.key, holding, wait_s)
        if found is None:
            return web.Response(status=204)
        record, envelope = found
        share = 1.0  # of one that was judged before, and shows whether a validator works
        if record.status != "accepted":
            share = self._journal.state.share_of(record.lease.worker)
        return {
            "step": record.lease.step,
            "submission": record.submission,
            "lease": record.document,
            "envelope": envelope.decode(),
            "share": share,
        }

    async def _release(self, asked: Signed) -> None:
        """Take back claims that the validator will not answer.

        `fault` says why the checks failed at them; it is empty if the validator is at fault.
        """
        submissions, fault = (
            requests.digests("submissions", asked.body["submissions"]),
            asked.body["fault"],
        )
        if not isinstance(fault, str):
            raise Refusal(400, "fault must be a text")
        for submission in submissions:
            if fault:
                self._claims.fail(asked.key, submission, fault, self._journal.clock())
            else:
                self._claims.give_back(asked.key, submission)

    async def _download(self, request: web.Request) -> web.StreamResponse:
        """Send a submission's table while the run needs it."""
        submission = request.match_info["digest"]
        record = self._journal.state.leases.of_submission(submission)
        if record is None:
            raise Refusal(404, "no such submission")
        files = submission_files(self._journal.run_dir, record.lease.step, submission)
        return await requests.send_file(request, files.submission)

    async def _verdict(self, request: web.Request) -> web.StreamResponse:
        caller = self._validator(request)
        signed = requests.read_envelope(request)
        with refusing(400, BadSignature):
            envelope = verdict.open_verdict(signed, validators=frozenset({caller.key}))
        if envelope.digest != caller.body_digest:
            raise Refusal(400, "the envelope names another body")
        await self.judge(
            caller.key, envelope, signed, request.content.iter_chunked(requests.PIECE_BYTES)
        )
        return web.json_response({}, status=202)

    async def next_submission(
        self, validator: str, holding: Collection[str], wait_s: float
    ) -> tuple[LeaseRecord, bytes] | None:
        """Return the next submission to judge and its signed envelope; None if there was none.

        Raises:
            Finished: the run is finished.
        """
        deadline = self._journal.clock() + wait_s
        self._claims.keep(validator, holding, self._journal.clock())
        while True:
            if self._journal.state.finished:
                raise Finished
            state = self._journal.state
            waiting = {r.submission: r for r in state.to_judge if r.submission}
            now = self._journal.clock()
            submission = self._claims.claim(validator, waiting, now, judged=state.newest_accepted)
            if submission is not None:
                record = waiting.get(submission) or state.leases.of_submission(submission)
                assert record is not None
                files = submission_files(self._journal.run_dir, record.lease.step, submission)
                return record, files.submission_envelope.read_bytes()
            due = self._claims.next_change(self._journal.clock())
            if not await self._journal.change(deadline, due=due):
                return None

    async def judge(
        self,
        validator: str,
        envelope: verdict.VerdictEnvelope,
        signed: bytes,
        chunks: AsyncIterator[bytes],
    ) -> None:
        """Receive a verdict; the first on a submission counts, later ones change nothing.

        Args:
            validator: public key of the caller, whose signature on the envelope is checked.
            envelope: the verdict's signed statement.
            signed: bytes of the envelope.
            chunks: the body.
        """
        record = self._to_judge(envelope)
        if record is None:  # judged before; the validator may have shown by it that it works
            self._settle(validator, envelope.submission)
            return
        if envelope.bytes > verdict.MAX_BYTES:
            raise Refusal(413, f"{envelope.bytes} bytes, more than the {verdict.MAX_BYTES} allowed")
        files = submission_files(self._journal.run_dir, record.lease.step, envelope.submission)
        folder, size = files.verdict.parent, envelope.bytes
        async with requests.received(chunks, folder, digest=envelope.digest, size=size) as body:
            with refusing(400, MalformedTable, what="verdict: "):
                rows = await asyncio.to_thread(lambda: verdict.decode_verdicts(body.read_bytes()))
            judged = self._judged(validator, envelope, record, rows)
            if self._to_judge(envelope) is None:
                return  # another validator's verdict came first
            with self._journal.recording(files.verdict, files.verdict_envelope):
                body.rename(files.verdict)
                requests.write_small(files.verdict_envelope, signed)
                sync_folder(files.verdict.parent)
                self._journal.record(judged)
        if judged.accepted:
            self._seen.add(record.lease.step, judged.submission, [r.fingerprints for r in rows])
        else:
            _log.warning(
                "submission of worker %s for step %d rejected: %s",
                *(record.lease.worker[:16], record.lease.step, judged.reason),
            )
        self._settle(validator, envelope.submission)

    def _settle(self, validator: str, submission: str) -> None:
        """Note a verdict, and set aside submissions at which validators fail although they judge
        others."""
        self._claims.settle(validator, submission)
        waiting = {record.submission: record for record in self._journal.state.to_judge}
        for submission, attempts in self._claims.hopeless().items():
            if record := waiting.get(submission):
                now = self._journal.clock()
                self._journal.record(
                    events.SubmissionSetAside(now, record.digest, submission, attempts)
                )
                _log.error(
                    "submission %s of worker %s for step %d is set aside, its groups are dropped: "
                    "%d attempts of validators failed, the last one: %s; the file or the "
                    "validators may be at fault",
                    *(submission[:16], record.lease.worker[:16], record.lease.step),
                    *(len(attempts), attempts[-1].reason),
                )
            self._claims.forget(submission)

    def _to_judge(self, envelope: verdict.VerdictEnvelope) -> LeaseRecord | None:
        record = self._journal.state.leases.of_submission(envelope.submission)
        if record is None or record.status != "submitted":
            return None
        if (envelope.run, envelope.step) != (self._run.spec.name, record.lease.step):
            raise Refusal(400, "run or step are not the submission's")
        return record

    def _judged(
        self,
        validator: str,
        envelope: verdict.VerdictEnvelope,
        record: LeaseRecord,
        rows: list[verdict.RolloutVerdict],
    ) -> events.SubmissionJudged:
        """Return the verdict as it counts.

        An accepted submission is rejected for what only the coordinator sees. A row repeats a row
        that was accepted before, or the gaps of the worker's submissions together are more than
        rounding explains.
        """
        state = self._journal.state
        accepted, reason = envelope.accepted, envelope.reason
        groups: tuple[events.GroupGrade, ...] = ()
        limits = self._run.limits.of(record.lease.pool, record.lease.devices).limits
        excess, noise = None, limits.gap_noise
        if verdicts.by_coordinator(reason):
            raise Refusal(400, "verdict: the coordinator alone rejects for that")
        if accepted:
            with refusing(400, verdicts.VerdictMismatch, what="verdict: "):
                groups = verdicts.grade_groups(
                    rows,
                    submission=envelope.submission,
                    lease=record.lease,
                    group_size=state.policy.group_size,
                    dropped=envelope.dropped_groups,
                    filter_by=state.policy.filter_by,
                )
                excess = verdicts.excess_of(rows, noise)
            self._seen.forget(state.oldest_remembered)
            worker = state.workers[record.lease.worker]
            if fault := self._seen.fault(rows) or verdicts.gap_fault(worker, excess, noise):
                accepted, reason, groups = False, fault, ()
        return events.SubmissionJudged(
            at=self._journal.clock(),
            lease=record.digest,
            submission=envelope.submission,
            verdict=envelope.digest,
            validator=validator,
            accepted=accepted,
            reason=reason,
            groups=groups,
            gap_excess=excess,
            gap_noise=noise,
            fault=envelope.fault,
        )
