"""`python -m verify audit`: replays a run's ledger without trusting anybody.

It reads the run directory only (docs/audit.md), every row of the ledger, and replays the state
machine. Hash chain, leases, files and batch manifests are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from runspec.core.canonical import hash_parts, is_digest
from runspec.core.schema import RunSpec
from runspec.core.schema.load import load_resolved
from runspec.core.signed import CLOCK_SKEW_S, BadSignature
from verify.audit.batches import BatchAudit, IslandAudit, batches_on_disk
from verify.audit.files import Credit, FileAudit, Report, Signers, read_roles
from verify.coordinator.ledger import FIRST_CHAIN, BadRow, LedgerSnapshot, decode_event
from verify.coordinator.ledger.store import Row
from verify.coordinator.machine import events
from verify.coordinator.machine.state import Policy, State
from verify.coordinator.machine.transitions import apply
from verify.coordinator.machine.verdicts import History, gap_fault, is_gap_fault
from verify.formats.batch import BatchGroup
from verify.formats.lease import Lease, lease_digest, open_lease


class LeaseAudit:
    """Checks what the state machine does not: signatures of leases, fresh nonces, distinct seeds.

    Args:
        run: name of the run.
        report: receives the findings.
    """

    def __init__(self, run: str, report: Report) -> None:
        self._run, self._report = run, report
        self._seeds: dict[bytes, int] = {}
        self._nonces: set[str] = set()

    def drawn(self, row: int, event: events.NonceDrawn) -> None:
        fresh = event.nonce not in self._nonces
        self._report.require(fresh, row, "nonce", "one drawn before", "32 fresh bytes")
        self._nonces.add(event.nonce)

    def granted(self, row: int, event: events.LeaseGranted, signers: Signers) -> None:
        lease, require = event.lease, self._report.require
        data = event.document.encode("utf-8", "replace")
        digest = lease_digest(data)
        require(event.digest == digest, row, "lease digest", event.digest, digest)
        try:
            signed = open_lease(data, coordinators=signers.coordinators(data))
            require(signed == lease, row, "lease", f"{lease}", f"as it was signed, {signed}")
        except BadSignature as error:
            self._report.add(row, "lease signature", error, "the coordinator's signature")
        require(lease.run == self._run, row, "lease", f"run {lease.run}", f"run {self._run}")
        try:
            seed = lease.seed
        except (ValueError, OverflowError):
            self._report.add(row, "lease", "fields that give no seed", "a lease's")
            return
        before = self._seeds.setdefault(seed, row)
        require(before == row, row, "lease seed", f"that of row {before}", "a seed of its own")


class ChainAudit:
    """Follows the hash chain. After a break it goes on from the broken row, so it finds each break.

    Args:
        report: receives the findings.
        heads: chains that earlier audits printed, by row; each row must still have its chain.
    """

    def __init__(self, report: Report, heads: dict[int, str]) -> None:
        self._report, self._heads = report, heads
        self.head, self.last = FIRST_CHAIN, 0

    def check(self, row: Row) -> None:
        """Check a row; afterwards `head` is its chain, `last` its number."""
        require = self._report.require
        if row.seq != self.last + 1:
            between = f"rows {self.last + 1} to {row.seq - 1}"
            self._report.add(row.seq, "rows", f"row {row.seq} after {self.last}", between)
        # A row number below zero, which only a tampered file has, is part of no chain.
        expected = hash_parts(bytes.fromhex(self.head), max(row.seq, 0), row.kind, row.body).hex()
        chain = row.chain.decode("ascii", "replace")
        require(chain == expected, row.seq, "chain", chain, expected)
        self.head, self.last = chain if is_digest(chain) else expected, row.seq
        if row.seq in self._heads:
            noted = self._heads.pop(row.seq)
            require(chain == noted, row.seq, "noted head", chain, noted)

    def end(self) -> None:
        """Check, after the last row, that no noted head lies beyond it."""
        for rows in sorted(self._heads):
            self._report.add(
                None, "noted head", f"{self.last} rows", f"{rows} rows, as were seen before"
            )


@dataclass
class _Answered:
    """A lease, and the submission and verdict that the ledger has for it."""

    lease: Lease
    submission: str | None = None
    verdict: str | None = None


def audit(run_dir: Path, *, root_key: str | None, heads: Mapping[int, str] | None = None) -> Report:
    """Replay the ledger of a run directory, of a live run or a copy.

    Args:
        run_dir: the run directory.
        root_key: the root's public key (hex); None: the spec's, or the run's throw-away root.
        heads: chains of rows that earlier audits printed.

    Raises:
        UserError: the ledger, the spec or roles.json cannot be read.
    """
    spec, report = load_resolved(run_dir), Report()
    # Listed before the rows are read: a row is written before its manifest, so each has a row.
    on_disk = batches_on_disk(run_dir)
    with closing(LedgerSnapshot(run_dir, spec)) as snapshot:
        rollbacks = [row.seq for row in snapshot.rows(events.RolledBack.__name__)]
        roles = read_roles(run_dir, spec, root_key, report)
        replay = _Replay(run_dir, spec.name, Policy.of(spec), report)
        chain = ChainAudit(report, dict(heads or {}))
        signers = Signers(roles, current=not rollbacks)
        for row in snapshot.rows():
            before = chain.head
            chain.check(row)
            replay.take(row, before, signers)
            if row.seq in rollbacks:
                signers = Signers(roles, current=row.seq == rollbacks[-1])
                pinned = spec.identity.root_public_key is not None
                report.require(not pinned, row.seq, "rollback", "one", "none: the root is pinned")
            report.rows += 1
        chain.end()
    report.require(
        replay.last_at <= roles.expires + CLOCK_SKEW_S,
        None,
        "roles",
        f"the last row is of {replay.last_at:.0f}",
        f"none after {roles.expires:.0f}, when roles.json expired",
    )
    report.head = chain.head
    replay.end(on_disk, _closed_since(run_dir, spec, chain.last))
    return report


def _closed_since(run_dir: Path, spec: RunSpec, last: int) -> int:
    """Return the step that closes next by the rows of a live run after `last`; 0 without any.

    The run may since have removed files that were needed when the rows were read.
    """
    next_close = 0
    with closing(LedgerSnapshot(run_dir, spec)) as now, suppress(BadRow):  # the next audit finds it
        for row in now.rows(events.StepClosed.__name__):
            if row.seq > last:
                event = decode_event(row.kind, row.body)
                next_close = event.step + 1 if isinstance(event, events.StepClosed) else 0
    return next_close


class _Replay:
    """Checks one row after the other; the checks are independent of each other."""

    def __init__(self, run_dir: Path, run: str, policy: Policy, report: Report) -> None:
        self._report = report
        self._leases = LeaseAudit(run, report)
        self._files = FileAudit(run_dir, run, policy, report)
        names = () if policy.islands is None else policy.islands.names
        self._batches = BatchAudit(run_dir, run, policy.rows_per_step, names, report)
        self._islands = IslandAudit(run, policy.islands, report)
        self._answers: dict[str, _Answered] = {}
        self.last_at = 0.0
        """Time of the last event, seconds since the epoch."""
        self._next_close = 0
        self._state, self._history = State(policy), History()
        self._broken = False
        """Whether the state machine refused a row; then it would refuse all later rows too."""

    def take(self, row: Row, chain_before: str, signers: Signers) -> None:
        """Check a row.

        Args:
            row: the row as stored.
            chain_before: chain of the row before.
            signers: keys that may sign its documents.
        """
        try:
            event = decode_event(row.kind, row.body)
        except BadRow as error:
            self._report.add(row.seq, "row", error, "an event")
            self._broken = True
            return
        self.last_at = event.at
        try:
            self._check(row, event, chain_before, signers)
        except OverflowError as error:  # JSON's integers may be too large for the mean, a float
            self._report.add(row.seq, "row", f"{error}, in it or above", "numbers of a run")
            self._broken = True

    def _check(self, row: Row, event: events.Event, chain_before: str, signers: Signers) -> None:
        counted = {}
        if isinstance(event, events.StepClosed):
            counted = self._history.batch_stats(event.at, event.step, event.trained)
        before = self._apply(row.seq, event)
        match event:
            case events.NonceDrawn():
                self._leases.drawn(row.seq, event)
            case events.LeaseGranted():
                self._leases.granted(row.seq, event, signers)
                self._answers[event.digest] = _Answered(event.lease)
            case events.SubmissionReceived():
                if answered := self._answered(row.seq, "submission", event.lease):
                    answered.submission = event.submission
                    self._files.received(row.seq, event, answered.lease)
            case events.SubmissionJudged():
                self._judged(row.seq, event, signers, before)
            case events.StepClosed():
                self._next_close = max(self._next_close, event.step + 1)
                groups = self._groups(event)
                manifest = self._batches.closed(row.seq, event, chain_before, groups, signers)
                if manifest is not None and before is not None:
                    self._batches.follows(row.seq, event, manifest, before, counted)
            case events.OfferReceived():
                self._islands.offered(row.seq, event, signers)
            case events.IslandsCommitted():
                self._islands.committed(row.seq, event, chain_before, signers, before)
            case events.ShareLost():
                self._islands.lost(row.seq, event)
            case events.OuterResult():
                self._islands.reported(row.seq, event)
            case events.RolledBack():
                self._next_close = event.version
                self._files.rolled_back()
                self._batches.rolled_back(event.version)
                self._islands.rolled_back(event.version)
                self._answers = {}

    def end(self, on_disk: dict[int, Path], closed_since: int) -> None:
        """Check, after the last row, what needs the whole ledger.

        Args:
            on_disk: batch manifests that were there before the rows were read.
            closed_since: the step that closes next by later rows; 0 without any.
        """
        report = self._report
        report.steps_closed = self._next_close
        self._batches.check_files(on_disk)
        self._files.judge_gone(max(self._next_close, closed_since))
        report.credits = {
            key: Credit(worker.accepted_rollouts, worker.accepted_tokens)
            for key, worker in self._state.workers.items()
        }
        if self._broken:
            report.notes.append(
                "the state machine refused a row; of those after it, neither filling nor credits "
                "were replayed"
            )

    def _apply(self, row: int, event: events.Event) -> State | None:
        """Apply an event and return the state before it; None if that is not known."""
        if self._broken:
            return None
        before = self._state
        try:
            self._state = apply(before, event)
        except (events.IllegalTransition, KeyError, ValueError) as error:
            self._report.add(row, "state", error, "an event that can follow")
            self._broken = True
            return None
        self._history.take(event, self._state.leases)
        return before

    def _judged(
        self, row: int, event: events.SubmissionJudged, signers: Signers, before: State | None
    ) -> None:
        answered = self._answered(row, "verdict", event.lease)
        if answered is None:
            return
        answered.verdict = event.verdict
        self._files.judged(row, event, answered.lease, signers)
        if before is not None and (event.accepted or is_gap_fault(event.reason)):
            worker = before.workers[answered.lease.worker]
            expected = gap_fault(worker, event.gap_excess, event.gap_noise)
            self._report.require(
                event.reason == expected, row, "gaps of the worker", event.reason, expected
            )

    def _answered(self, row: int, what: str, lease: str) -> _Answered | None:
        answered = self._answers.get(lease)
        if answered is None:
            self._report.add(row, what, f"for lease {lease}", "a lease granted above")
        return answered

    def _groups(self, event: events.StepClosed) -> list[BatchGroup] | None:
        groups = []
        for trained in event.trained:
            answered = self._answers.get(trained.lease)
            if answered is None or answered.submission is None or answered.verdict is None:
                return None
            groups.append(
                BatchGroup.of(answered.lease, answered.submission, answered.verdict, trained.group)
            )
        return groups
