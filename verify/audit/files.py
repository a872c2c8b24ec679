"""Checks the files beside the ledger: submissions, verdicts, and their envelopes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from runspec.core.canonical import digest_bytes, digest_file, is_digest
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.run_files import submission_files
from runspec.core.signed import BadSignature
from verify.audit.findings import Report, Signers
from verify.coordinator.machine.events import SubmissionJudged, SubmissionReceived
from verify.coordinator.machine.state import Policy
from verify.coordinator.machine.verdicts import (
    VerdictMismatch,
    by_coordinator,
    excess_of,
    grade_groups,
    repeated_submission,
)
from verify.formats import submission as submission_format
from verify.formats import verdict as verdict_format
from verify.formats.lease import Lease
from verify.formats.submission import open_submission
from verify.formats.tables import MalformedTable
from verify.formats.verdict import decode_verdicts, open_verdict, read_fingerprints

T = TypeVar("T")


@dataclass(frozen=True)
class Gone:
    """A file that does not exist, any more or at all."""

    row: int
    path: Path
    step: int


class FileAudit:
    """Compares files with their rows in the ledger.

    Args:
        run_dir: the run directory.
        run: name of the run.
        policy: policy of the run's spec.
        report: receives the findings.
    """

    def __init__(self, run_dir: Path, run: str, policy: Policy, report: Report) -> None:
        self._run_dir, self._run, self._policy, self._report = run_dir, run, policy, report
        self.gone: list[Gone] = []
        self._accepted: dict[str, Path] = {}
        """Verdict files by submission."""

    def received(self, row: int, event: SubmissionReceived, lease: Lease) -> None:
        if not is_digest(event.submission):
            self._report.add(row, "submission", event.submission, "a digest")
            return
        files = submission_files(self._run_dir, lease.step, event.submission)
        digest = self._read(row, files.submission, lease.step, digest_file)
        if digest is not None:
            same = digest == event.submission
            self._report.require(same, row, "submission file", digest, event.submission)
        most = submission_format.MAX_ENVELOPE_BYTES
        data = self._read(row, files.submission_envelope, lease.step, read_bounded, most)
        if data is None:
            return
        try:
            envelope = open_submission(data)
        except BadSignature as error:
            self._report.add(row, "submission signature", error, "the worker's signature")
            return
        expected = {
            "run": self._run,
            "step": lease.step,
            "worker": lease.worker,
            "index": lease.index,
            "lease": event.lease,
            "digest": event.submission,
            "bytes": event.bytes,
        }
        self._compare(row, "submission envelope", asdict(envelope), expected)

    def judged(self, row: int, event: SubmissionJudged, lease: Lease, signers: Signers) -> None:
        self._report.require(
            (event.validator in signers.roles.validator) == signers.current,
            row,
            "validator",
            f"key {event.validator}",
            "one that roles.json names",
        )
        if not (is_digest(event.submission) and is_digest(event.verdict)):
            self._report.add(row, "verdict", event.verdict, "digests")
            return
        files = submission_files(self._run_dir, lease.step, event.submission)
        if event.accepted:
            self._accepted[event.submission] = files.verdict
        most = verdict_format.MAX_ENVELOPE_BYTES
        data = self._read(row, files.verdict_envelope, lease.step, read_bounded, most)
        dropped = self._check_verdict(row, event, lease, data) if data is not None else None
        most = verdict_format.MAX_BYTES
        table = self._read(row, files.verdict, lease.step, read_bounded, most)
        if table is None:
            return
        digest = digest_bytes(table)
        same = self._report.require(
            digest == event.verdict, row, "verdict file", digest, event.verdict
        )
        if same and event.accepted and dropped is not None:
            self._check_grades(row, event, lease, table, dropped)
        if same:
            self._check_repetition(row, event, files.verdict)
            self._check_excess(row, event, table)

    def judge_gone(self, next_close: int) -> None:
        """Decide which files may be missing, after the whole ledger was read.

        Args:
            next_close: the step that closes next, by the whole ledger.
        """
        oldest_needed = next_close - self._policy.async_level
        for gone in self.gone:
            if gone.step >= oldest_needed:
                self._report.add(
                    gone.row,
                    "file",
                    f"{gone.path} is gone",
                    f"files of step {oldest_needed} and later, which may still be trained",
                )
        self._note_gone(
            f"those of steps below {oldest_needed} may be, once a full checkpoint has passed them"
        )

    def rolled_back(self) -> None:
        """Note the files that a rollback removed: all but the batch manifests that stay."""
        self._note_gone("a rollback removed them")
        self.gone = []

    def _note_gone(self, why: str) -> None:
        self._report.files_gone += len(self.gone)
        if self.gone:
            self._report.notes.append(f"{len(self.gone)} files are gone: {why}")

    def _check_verdict(
        self, row: int, event: SubmissionJudged, lease: Lease, data: bytes
    ) -> list[int] | None:
        """Return the groups that the validator dropped; None if the verdict is not the row's."""
        try:
            envelope = open_verdict(data, validators=frozenset({event.validator}))
        except BadSignature as error:
            self._report.add(row, "verdict signature", error, f"validator {event.validator}'s")
            return None
        overruled = not event.accepted and by_coordinator(event.reason)
        expected = {
            "run": self._run,
            "step": lease.step,
            "submission": event.submission,
            "accepted": event.accepted or overruled,
            "reason": "" if overruled else event.reason,
            "fault": event.fault,
            "digest": event.verdict,
        }
        self._compare(row, "verdict envelope", asdict(envelope), expected)
        return envelope.dropped_groups

    def _check_repetition(self, row: int, event: SubmissionJudged, copy: Path) -> None:
        """Check that a submission rejected as a duplicate shares fingerprints with the original."""
        name = None if event.accepted else repeated_submission(event.reason)
        if name is None:
            return
        original = self._accepted.get(name)
        if original is None:
            self._report.add(row, "duplicates", name, "a submission that was accepted before")
            return
        if not original.exists():
            return  # noted at the row of the original
        try:
            first, second = ({p for r in read_fingerprints(f) for p in r} for f in (original, copy))
        except (OSError, MalformedTable) as error:
            self._report.add(row, "verdict file", error, "readable fingerprints")
            return
        found = f"no run of tokens of {name}"
        self._report.require(bool(first & second), row, "duplicates", found, "one at least")

    def _check_excess(self, row: int, event: SubmissionJudged, table: bytes) -> None:
        """Check the excess by the noise of the row, because profiles may have changed since."""
        expected = None
        if event.accepted or by_coordinator(event.reason):
            try:
                expected = excess_of(decode_verdicts(table), event.gap_noise)
            except (MalformedTable, VerdictMismatch) as error:
                self._report.add(row, "verdict file", error, "readable gaps")
                return
        found = event.gap_excess
        self._report.require(found == expected, row, "excess of gaps", found, expected)

    def _check_grades(
        self, row: int, event: SubmissionJudged, lease: Lease, table: bytes, dropped: list[int]
    ) -> None:
        try:
            grades = grade_groups(
                decode_verdicts(table),
                submission=event.submission,
                lease=lease,
                group_size=self._policy.group_size,
                dropped=dropped,
                zero_variance_filter=self._policy.zero_variance_filter,
            )
        except (MalformedTable, VerdictMismatch) as error:
            self._report.add(row, "verdict file", error, "a row for each rollout of the lease")
            return
        if len(event.groups) != len(grades):
            self._report.add(row, "grades", f"{len(event.groups)} groups", f"{len(grades)} groups")
            return
        for found, expected in zip(event.groups, grades, strict=True):
            self._report.require(
                found == expected, row, f"grade of group {expected.group}", found, expected
            )

    def _compare(
        self, row: int, what: str, found: dict[str, object], expected: dict[str, object]
    ) -> None:
        for name, value in expected.items():
            self._report.require(
                found[name] == value, row, what, f"{name} {found[name]}", f"{value}, as in the row"
            )

    def _read(
        self, row: int, path: Path, step: int, read: Callable[..., T], *limits: int
    ) -> T | None:
        """Return what `read` returns of a file; None if the file is missing or cannot be read."""
        try:
            found = read(path, *limits)
        except FileNotFoundError:
            self.gone.append(Gone(row, path, step))
            return None
        except (OSError, UserError) as error:
            self._report.add(row, "file", f"{path}: {error}", "a readable file within its limit")
            return None
        self._report.files_read += 1
        return found
