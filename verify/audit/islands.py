"""Checks what learner islands offered and what the coordinator committed."""

from __future__ import annotations

from dataclasses import replace

from runspec.core.signed import BadSignature
from verify.audit.findings import Report
from verify.audit.signers import Signers
from verify.coordinator.machine import islands
from verify.coordinator.machine.events import (
    IslandsCommitted,
    OfferReceived,
    OuterResult,
    ShareLost,
)
from verify.coordinator.machine.islands import IslandPolicy
from verify.coordinator.machine.state import State
from verify.formats.islands import (
    CommitRecord,
    Contribution,
    ShareOffered,
    open_commit,
    open_offer,
    record_digest,
)


class IslandAudit:
    """Checks offers, commit records and outer states, one after the other.

    It needs no state of the machine except for the time of a commit, so a row that the machine
    refuses hides nothing here.

    Args:
        run: name of the run.
        policy: policy of the islands; None for a run with one learner.
        report: receives the findings.
    """

    def __init__(self, run: str, policy: IslandPolicy | None, report: Report) -> None:
        self._run, self._policy, self._report = run, policy, report
        self._offers: dict[tuple[int, str], ShareOffered] = {}
        """Newest offer of each step and island."""
        self._records: dict[int, tuple[int, str]] = {}
        """For each step the row and the digest of its record."""
        self._results: dict[int, tuple[str, frozenset[str]]] = {}
        """For each step the digest of its outer state, and the islands that reported it."""

    def rolled_back(self, version: int) -> None:
        """Record that the steps from `version` on are open again."""
        self._offers = {}
        self._records = {s: found for s, found in self._records.items() if s < version}
        self._results = {s: found for s, found in self._results.items() if s < version}

    def offered(self, row: int, event: OfferReceived, signers: Signers) -> None:
        data, offer = event.document.encode("utf-8", "replace"), event.offer
        try:
            keys = signers.islands(offer.island, data)
            signed = open_offer(data, keys=keys, run=self._run)
        except BadSignature as error:
            self._report.add(row, "offer signature", error, f"island {offer.island}'s signature")
            return
        self._report.require(signed == offer, row, "offer", offer, f"as it was signed, {signed}")
        self._offers[signed.step, signed.island] = signed

    def committed(
        self,
        row: int,
        event: IslandsCommitted,
        chain_before: str,
        signers: Signers,
        before: State | None,
    ) -> None:
        """Check a record: signature, anchor, chain of records, and each contributor's offer.

        Args:
            row: number of the record's row.
            event: the record.
            chain_before: chain of the row before.
            signers: keys that may sign it.
            before: the state before; None if it is not known.
        """
        require = self._report.require
        data, step = event.document.encode("utf-8", "replace"), event.record.step
        first, _ = self._records.setdefault(step, (row, record_digest(data)))
        require(first == row, row, "commit", f"a second record of step {step}", f"row {first}'s")
        try:
            keys = signers.coordinators(data)
            record = open_commit(data, coordinators=keys, run=self._run, step=step)
        except BadSignature as error:
            self._report.add(row, "commit signature", error, "the coordinator's signature")
            return
        require(record == event.record, row, "commit", event.record, f"as it was signed, {record}")
        found = f"{record.ledger_rows}:{record.ledger_chain}"
        expected = f"{row - 1}:{chain_before}"
        if require(found == expected, row, "anchor", expected, f"{found}, as signed"):
            self._report.anchored_rows = row - 1
        _, previous = self._records.get(step - 1, (0, None))
        require(record.previous == previous, row, "commit chain", record.previous, previous)
        for each in record.contributors:
            offer = self._offers.get((step, each.island))
            same = offer is not None and Contribution.of(offer) == each
            require(same, row, "contribution", each, f"its signed offer, {offer}")
            base = record.base if offer is None else offer.base
            require(base == record.base, row, "contribution", f"base {base}", record.base)
        if step - 1 in self._results:
            base, _ = self._results[step - 1]
            require(record.base == base, row, "commit", f"base {record.base}", f"{base}, reported")
        if before is not None:
            self._follows(row, event.at, record, before)

    def lost(self, row: int, event: ShareLost) -> None:
        """Record that a step is open again: a share of its record could not be fetched."""
        require, step = self._report.require, event.step
        found = f"step {step} open again"
        require(step in self._records, row, "lost share", found, "a committed step")
        require(step + 1 not in self._records, row, "lost share", found, "the newest step")
        self._records.pop(step, None)
        self._results.pop(step, None)

    def reported(self, row: int, event: OuterResult) -> None:
        require, step = self._report.require, event.step
        digest, reporters = self._results.get(step, (event.digest, frozenset()))
        second = event.digest != digest or event.island in reporters
        require(not second, row, "outer state", f"a second of step {step}", digest)
        self._results[step] = digest, reporters | {event.island}
        require(step in self._records, row, "outer state", f"of step {step}", "a committed step")

    def _follows(self, row: int, at: float, record: CommitRecord, before: State) -> None:
        """Check that the record is the one that the coordinator's rules give."""
        policy = self._policy
        if policy is None:  # the state machine refuses the row
            return
        self._report.require(
            record.codec == policy.codec, row, "commit", f"codec {record.codec}", policy.codec
        )
        decision = islands.decide_commit(policy, before.islands, at)
        found = record.contributors, record.dropped
        if decision is not None and found == (decision.contributors, decision.dropped):
            return
        # A restart may change when a step is committed, and the bound on the norm. A share that
        # was offered is dropped only for its norm.
        bound = max(each.norm for each in record.contributors)
        relaxed = replace(policy, quorum=1, grace_s=0.0, max_norm=bound)
        decision = islands.decide_commit(relaxed, replace(before.islands, quorum_since=0.0), at)
        if decision is not None and record.contributors == decision.contributors:
            self._report.notes.append(
                f"row {row}: step {record.step} was committed at a time at which the present "
                "learner.islands would not commit it; its shares were all offered"
            )
            return
        names = [each.island for each in record.contributors]
        expected = "no record yet" if decision is None else decision.contributors
        self._report.add(row, "commit", f"contributors {', '.join(names)}", expected)
