"""Findings of an audit, the keys whose signatures it accepts, and the checks of files.

The files are those beside the ledger: submissions, verdicts, and their envelopes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from runspec.core.canonical import MalformedJson, digest_bytes, digest_file, is_digest, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.roles import MAX_BYTES, Roles, issued_at, open_roles
from runspec.core.run_files import submission_files
from runspec.core.schema import RunSpec
from runspec.core.signed import BadSignature, SigningKey
from verify.coordinator.machine import verdicts
from verify.coordinator.machine.events import SubmissionJudged, SubmissionReceived
from verify.coordinator.machine.state import Policy
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
        overruled = not event.accepted and verdicts.by_coordinator(event.reason)
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
        name = None if event.accepted else verdicts.repeated_submission(event.reason)
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
        if event.accepted or verdicts.by_coordinator(event.reason):
            try:
                expected = verdicts.excess_of(decode_verdicts(table), event.gap_noise)
            except (MalformedTable, verdicts.VerdictMismatch) as error:
                self._report.add(row, "verdict file", error, "readable gaps")
                return
        found = event.gap_excess
        self._report.require(found == expected, row, "excess of gaps", found, expected)

    def _check_grades(
        self, row: int, event: SubmissionJudged, lease: Lease, table: bytes, dropped: list[int]
    ) -> None:
        try:
            grades = verdicts.grade_groups(
                decode_verdicts(table),
                submission=event.submission,
                lease=lease,
                group_size=self._policy.group_size,
                dropped=dropped,
                filter_by=self._policy.filter_by,
            )
        except (MalformedTable, verdicts.VerdictMismatch) as error:
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


_LONGEST = 200
"""Characters of a found or expected value; a ledger may hold anything."""


@dataclass(frozen=True)
class Finding:
    row: int | None
    """Row of the ledger; None if the finding is about no row."""
    what: str
    """The check, in a word or two (docs/audit.md lists them)."""
    found: str
    expected: str

    def __str__(self) -> str:
        where = "no row" if self.row is None else f"row {self.row}"
        return f"{where}: {self.what}: {self.found}; expected {self.expected}"


@dataclass(frozen=True)
class Credit:
    """Credit of a worker by the ledger."""

    rollouts: int = 0
    tokens: int = 0


@dataclass
class Report:
    """The outcome of an audit; filled while it runs."""

    rows: int = 0
    head: str = ""
    """Chain of the last row."""
    anchored_rows: int = 0
    """Rows that the newest manifest's signature covers."""
    steps_closed: int = 0
    files_read: int = 0
    """Files of submissions and verdicts, envelopes included."""
    files_gone: int = 0
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    credits: dict[str, Credit] = field(default_factory=dict)

    def add(self, row: int | None, what: str, found: object, expected: object) -> None:
        self.findings.append(Finding(row, what, _short(found), _short(expected)))

    def require(
        self, holds: bool, row: int | None, what: str, found: object, expected: object
    ) -> bool:
        """Add a finding unless `holds`; return `holds`."""
        if not holds:
            self.add(row, what, found, expected)
        return holds

    def lines(self) -> Iterator[str]:
        """Return the report as text; characters that cannot be printed are replaced."""
        return ("".join(c if c.isprintable() else "?" for c in line) for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield (
            f"{self.rows} rows, {self.steps_closed} steps closed, "
            f"{self.anchored_rows} rows under a signed manifest; head {self.rows}:{self.head}"
        )
        yield f"{self.files_read} files read, {self.files_gone} gone"
        yield from (f"note: {note}" for note in self.notes)
        for worker, credit in sorted(self.credits.items()):
            yield f"worker {worker}: {credit.rollouts} rollouts, {credit.tokens} tokens"
        yield from (f"FINDING {finding}" for finding in self.findings)
        count = len(self.findings)
        yield "clean" if not count else f"{count} finding{'s' * (count > 1)}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def read_roles(run_dir: Path, spec: RunSpec, root_key: str | None, report: Report) -> Roles:
    """Return the run's roles.json, verified by the root key, whether or not it has expired.

    Args:
        run_dir: the run directory.
        spec: its resolved spec.
        root_key: public, hex; None: the spec's, or the run's own root in `keys/`.
        report: gets a note if the root is the run's own.

    Raises:
        UserError: there is no root key, or roles.json is not signed by it.
    """
    path = run_dir / "keys" / "roles.json"
    root = root_key or spec.identity.root_public_key
    if root is None:
        own = run_dir / "keys" / "root.key"
        if not own.exists():
            raise UserError(
                "no root key: the spec pins none, and the run made none",
                place=str(own),
                remedy="give it with --root-key HEX",
            )
        root = SigningKey.load(own).public_hex
        report.notes.append(
            "the root key is the run directory's own: its owner could have signed anything"
        )
    try:
        data = read_bounded(path, MAX_BYTES)
        # A run may be audited long after its roles expired, so they are checked as of their issue.
        return open_roles(data, root_public_key=root, run=spec.name, now=issued_at(data))
    except (OSError, BadSignature) as error:
        raise UserError(
            f"cannot be verified: {error}",
            place=str(path),
            remedy="give the root's public key with --root-key",
        ) from error


@dataclass
class Signers:
    """Keys that may sign the documents of the rows between two rollbacks.

    Before the last rollback the run had other keys, which roles.json does not name. Documents of
    that time must all be signed by one coordinator, which is none of the current ones. The same
    holds for each learner island.
    """

    roles: Roles
    current: bool
    """Whether no rollback follows."""
    _earlier: dict[str, str] = field(default_factory=dict)
    """Keys of that time: the coordinator's under an empty name, the islands' under theirs."""

    def coordinators(self, document: bytes) -> frozenset[str]:
        """Return the keys that may have signed a lease or a batch."""
        if self.current:
            return self.roles.coordinator
        key = self._earlier_key("", document)
        return frozenset(() if key is None else (key,)) - self.roles.coordinator

    def islands(self, name: str, document: bytes) -> dict[str, str]:
        """Return the key that may have signed an island's offer, by the island's name."""
        keys = self.roles.islands
        if self.current:
            return {name: keys[name]} if name in keys else {}
        key = self._earlier_key(name, document)
        return {} if key is None or key in keys.values() else {name: key}

    def _earlier_key(self, name: str, document: bytes) -> str | None:
        """Return the key of the first document under a name; None if that has none."""
        if name not in self._earlier:
            with suppress(MalformedJson):
                key = parse_object(document, max_bytes=len(document)).get("key")
                if isinstance(key, str):
                    self._earlier[name] = key
        return self._earlier.get(name)
