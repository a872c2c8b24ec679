"""Service for validators: hands out submissions to judge and receives verdicts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from runspec.core.files import sync_folder
from runspec.core.run_files import submission_files
from verify.coordinator.intake import Refusal, received, refusing, write_small
from verify.coordinator.journal import Finished, Journal
from verify.coordinator.machine.events import GroupGrade, SubmissionJudged, SubmissionSetAside
from verify.coordinator.machine.gap_history import AnotherCalibration, excess_of
from verify.coordinator.machine.gap_history import fault as gap_fault
from verify.coordinator.machine.state import LeaseRecord
from verify.coordinator.machine.verdicts import Seen, VerdictMismatch, by_coordinator, grade_groups
from verify.coordinator.services.claims import Claims
from verify.formats.tables import MalformedTable
from verify.formats.verdict import MAX_BYTES, RolloutVerdict, VerdictEnvelope, decode_verdicts
from verify.thresholds import GapNoise

_log = logging.getLogger(__name__)


class Judging:
    """Gets one verdict for each submission that can still train, even if validators fail.

    Args:
        journal: records the events.
        run: name of the run.
        gap_noise: noise of the gaps, by calibrated pool.
    """

    def __init__(
        self,
        journal: Journal,
        run: str,
        gap_noise: Mapping[str, GapNoise] = MappingProxyType({}),
    ) -> None:
        self._journal, self._run, self._gap_noise = journal, run, gap_noise
        self.claims = Claims()
        self._seen = Seen.of(journal.run_dir, journal.state)

    async def next_submission(
        self, validator: str, holding: Collection[str], wait_s: float
    ) -> tuple[LeaseRecord, bytes] | None:
        """Return the next submission to judge and its signed envelope; None if there was none.

        Raises:
            Finished: the run is finished.
        """
        deadline = self._journal.clock() + wait_s
        self.claims.keep(validator, holding, self._journal.clock())
        while True:
            if self._journal.state.finished:
                raise Finished
            waiting = {r.submission: r for r in self.submitted() if r.submission}
            known = self._accepted()
            judged = known.submission if known else None
            submission = self.claims.claim(validator, waiting, self._journal.clock(), judged=judged)
            if submission is not None:
                record = waiting.get(submission) or known
                assert record is not None
                files = submission_files(self._journal.run_dir, record.lease.step, submission)
                return record, files.submission_envelope.read_bytes()
            due = self.claims.next_change(self._journal.clock())
            if not await self._journal.change(deadline, due=due):
                return None

    def release(self, validator: str, submissions: Collection[str], fault: str) -> None:
        """Take back claims that the validator will not answer.

        Args:
            validator: public key of the caller.
            submissions: digests of the claimed submissions.
            fault: why the checks failed at them; empty if the validator itself is at fault.
        """
        for submission in submissions:
            if fault:
                self.claims.fail(validator, submission, fault, self._journal.clock())
            else:
                self.claims.give_back(validator, submission)

    def submitted(self) -> Sequence[LeaseRecord]:
        """Return the submissions that wait for a verdict, in lease order.

        Submissions that no step can train any more are left out: their weights and files may be
        gone, and a validator that waits for them judges nothing else.
        """
        return self._journal.state.to_judge

    def share_of(self, record: LeaseRecord) -> float:
        """Return the chance that a submission is recomputed.

        It is 1 for a submission that was judged before and shows whether a validator works.
        """
        if record.status == "accepted":
            return 1.0
        return self._journal.state.share_of(record.lease.worker)

    def _accepted(self) -> LeaseRecord | None:
        """Return the newest accepted submission whose weights and files are there."""
        state = self._journal.state
        for record in reversed(list(state.leases.values())):
            if record.status == "accepted" and state.lag(record) <= state.policy.async_level:
                return record
        return None

    def submission_file(self, submission: str) -> Path | None:
        """Return the file of a submission's table while the run needs it; None after that."""
        record = self._record_of(submission)
        if record is None:
            return None
        return submission_files(self._journal.run_dir, record.lease.step, submission).submission

    async def judge(
        self,
        validator: str,
        envelope: VerdictEnvelope,
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
            self.claims.settle(validator, envelope.submission)
            self._set_aside()
            return
        if envelope.bytes > MAX_BYTES:
            raise Refusal(413, f"{envelope.bytes} bytes, more than the {MAX_BYTES} allowed")
        files = submission_files(self._journal.run_dir, record.lease.step, envelope.submission)
        async with received(
            chunks, files.verdict.parent, digest=envelope.digest, size=envelope.bytes
        ) as body:
            rows = await asyncio.to_thread(_read_verdicts, body)
            judged = self._judged(validator, envelope, record, rows)
            if self._to_judge(envelope) is None:
                return  # another validator's verdict came first
            judged = self._compared(judged, record, rows)
            with self._journal.recording(files.verdict, files.verdict_envelope):
                body.rename(files.verdict)
                write_small(files.verdict_envelope, signed)
                sync_folder(files.verdict.parent)
                self._journal.record(judged)
        if judged.accepted:
            self._seen.add(record.lease.step, judged.submission, [r.fingerprints for r in rows])
        else:
            _log.warning(
                "submission of worker %s for step %d rejected: %s",
                *(record.lease.worker[:16], record.lease.step, judged.reason),
            )
        self.claims.settle(validator, envelope.submission)
        self._set_aside()

    def _set_aside(self) -> None:
        """Set aside submissions at which validators fail although they judge others."""
        waiting = {record.submission: record for record in self.submitted()}
        for submission, attempts in self.claims.hopeless().items():
            if record := waiting.get(submission):
                event = SubmissionSetAside(
                    self._journal.clock(), record.digest, submission, attempts
                )
                self._journal.record(event)
                _log.error(
                    "submission %s of worker %s for step %d is set aside, its groups are dropped: "
                    "%d attempts of validators failed, the last one: %s; the file or the "
                    "validators may be at fault",
                    *(submission[:16], record.lease.worker[:16], record.lease.step),
                    *(len(attempts), attempts[-1].reason),
                )
            self.claims.forget(submission)

    def _record_of(self, submission: str) -> LeaseRecord | None:
        leases = self._journal.state.leases.values()
        return next((record for record in leases if record.submission == submission), None)

    def _to_judge(self, envelope: VerdictEnvelope) -> LeaseRecord | None:
        record = self._record_of(envelope.submission)
        if record is None or record.status != "submitted":
            return None
        if (envelope.run, envelope.step) != (self._run, record.lease.step):
            raise Refusal(400, "run or step are not the submission's")
        return record

    def _judged(
        self,
        validator: str,
        envelope: VerdictEnvelope,
        record: LeaseRecord,
        rows: list[RolloutVerdict],
    ) -> SubmissionJudged:
        policy = self._journal.state.policy
        groups: tuple[GroupGrade, ...] = ()
        excess, noise = None, self._gap_noise.get(record.lease.pool)
        if by_coordinator(envelope.reason):
            raise Refusal(400, "verdict: the coordinator alone rejects for that")
        if envelope.accepted:
            with refusing(400, VerdictMismatch, AnotherCalibration, what="verdict: "):
                groups = grade_groups(
                    rows,
                    submission=envelope.submission,
                    lease=record.lease,
                    group_size=policy.group_size,
                    dropped=envelope.dropped_groups,
                    zero_variance_filter=policy.zero_variance_filter,
                )
                excess = excess_of(rows, noise)
        return SubmissionJudged(
            at=self._journal.clock(),
            lease=record.digest,
            submission=envelope.submission,
            verdict=envelope.digest,
            validator=validator,
            accepted=envelope.accepted,
            reason=envelope.reason,
            groups=groups,
            gap_excess=excess,
            gap_noise=noise,
            fault=envelope.fault,
        )

    def _compared(
        self, judged: SubmissionJudged, record: LeaseRecord, rows: list[RolloutVerdict]
    ) -> SubmissionJudged:
        """Reject an accepted submission for what only the coordinator sees.

        A row repeats a row that was accepted before, or the gaps of the worker's submissions
        together are more than rounding explains.
        """
        state = self._journal.state
        self._seen.forget(state.oldest_remembered)
        if not judged.accepted:
            return judged
        worker = state.workers[record.lease.worker]
        reason = self._seen.fault(rows) or gap_fault(worker, judged.gap_excess, judged.gap_noise)
        return replace(judged, accepted=False, reason=reason, groups=()) if reason else judged


def _read_verdicts(path: Path) -> list[RolloutVerdict]:
    with refusing(400, MalformedTable, what="verdict: "):
        return decode_verdicts(path.read_bytes())
