"""Checks what makes the steps of a ledger: batch manifests, and islands' offers and commit records.

There is one manifest a step, signed, anchored, with the right groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.run_files import step_folder
from runspec.core.signed import BadSignature
from verify.audit.files import Report, Signers
from verify.coordinator.machine import events, filling, islands
from verify.coordinator.machine.islands import IslandPolicy
from verify.coordinator.machine.stalls import Stalled
from verify.coordinator.machine.state import State, Tally
from verify.coordinator.machine.verdicts import batch_stats
from verify.formats import batch

_OF_HEARTBEATS = "sampler_busy_fraction"
"""Name of the statistic that comes from heartbeats, which the ledger does not have."""


def batches_on_disk(run_dir: Path) -> dict[int, Path]:
    """Return the batch manifests in the run directory, by step."""
    found = {}
    for path in (run_dir / "rollouts").glob(f"step_*/{batch.FILE_NAME}"):
        number = path.parent.name.removeprefix("step_")
        if number.isascii() and number.isdigit():
            found[int(number)] = path
    return found


class BatchAudit:
    """Checks the closings of steps, one after the other.

    Args:
        run_dir: the run directory.
        run: name of the run.
        rows_per_step: of a run that trains on documents; 0: it samples.
        islands: names of the learner islands, in the order of the spec.
        report: receives the findings.
    """

    def __init__(
        self,
        run_dir: Path,
        run: str,
        rows_per_step: int,
        islands: Sequence[str],
        report: Report,
    ) -> None:
        self._run_dir, self._run, self._report = run_dir, run, report
        self._rows_per_step, self._islands = rows_per_step, list(islands)
        self._closed: dict[int, tuple[int, str]] = {}
        """For each step the row and the document of its first closing."""

    def rolled_back(self, version: int) -> None:
        """Record that the steps from `version` on are open again."""
        self._closed = {s: closed for s, closed in self._closed.items() if s < version}

    def closed(
        self,
        row: int,
        event: events.StepClosed,
        chain_before: str,
        groups: list[batch.BatchGroup] | None,
        signers: Signers,
    ) -> batch.BatchManifest | batch.RangeManifest | None:
        """Check what does not depend on the state.

        Args:
            row: number of the closing's row.
            event: the closing.
            chain_before: chain of the row before.
            groups: the event's groups, from the leases; None if one is unknown.
            signers: keys that may sign the manifest.

        Returns:
            The manifest; None if it cannot be trusted.
        """
        require = self._report.require
        first, _ = self._closed.setdefault(event.step, (row, event.document))
        require(first == row, row, "batch", f"a second one of step {event.step}", f"row {first}'s")
        data = event.document.encode("utf-8", "replace")
        try:
            manifest = self._open(data, signers, event.step)
        except (BadSignature, ValueError, TypeError) as error:
            self._report.add(row, "batch signature", error, "the coordinator's signature")
            return None
        found = f"{manifest.ledger_rows}:{manifest.ledger_chain}"
        expected = f"{row - 1}:{chain_before}"
        if require(found == expected, row, "anchor", expected, f"{found}, as signed"):
            self._report.anchored_rows = row - 1
        shares = [share.island for share in manifest.shares]
        require(shares == self._islands, row, "batch shares", shares, self._islands)
        if isinstance(manifest, batch.RangeManifest):
            require(not event.trained, row, "batch groups", event.trained, "none: it names rows")
        elif groups is None:
            self._report.add(row, "batch groups", "a group of no lease", "leases of this ledger")
        else:
            require(manifest.groups == groups, row, "batch groups", manifest.groups, groups)
        return manifest

    def follows(
        self,
        row: int,
        event: events.StepClosed,
        manifest: batch.BatchManifest | batch.RangeManifest,
        before: State,
        counted: dict[str, Any],
    ) -> None:
        """Check that the closing is the one that the coordinator's rules give.

        Args:
            row: number of the closing's row.
            event: the closing.
            manifest: the signed manifest.
            before: the state before the closing.
            counted: the statistics that follow from the events before it.
        """
        require = self._report.require
        decision = filling.decide_close(before, event.at)
        if not _is_that(decision, event):
            # A restart may change algorithm.fill and publish_every: when a step closes, but not the
            # order of groups, or the rows.
            relaxed = replace(before.policy, deadline_s=0.0, min_groups=1)
            if self._rows_per_step:
                relaxed = replace(before.policy, async_level=before.policy.steps)
            decision = filling.decide_close(replace(before, policy=relaxed), event.at)
            if _is_that(decision, event):
                self._report.notes.append(
                    f"row {row}: step {event.step} closed at a time at which the present "
                    "algorithm.fill or publish_every would not close it; its contents are right"
                )
        if not isinstance(decision, filling.Close):
            self._report.add(row, "filling", f"step {event.step} closed", "no batch yet")
            return
        require(_is_that(decision, event), row, "filling", event.trained, decision.groups)
        if isinstance(manifest, batch.RangeManifest):
            return
        found, complete = manifest.complete, decision.complete
        require(found == complete, row, "batch complete", found, complete)
        stats = counted | batch_stats(
            before.tallies.get(event.step, Tally()),
            opened=before.steps[event.step].opened,
            closed=event.at,
            busy_fraction=None,
        )
        for name, expected in stats.items():
            if name in manifest.stats and name != _OF_HEARTBEATS:
                value = manifest.stats[name]
                require(value == expected, row, f"stats.{name}", value, expected)

    def _open(
        self, data: bytes, signers: Signers, step: int
    ) -> batch.BatchManifest | batch.RangeManifest:
        keys = signers.coordinators(data)
        if not self._rows_per_step:
            return batch.open_batch(data, coordinators=keys, run=self._run, step=step)
        rows = self._rows_per_step
        return batch.open_ranges(
            data, coordinators=keys, run=self._run, step=step, rows_per_step=rows
        )

    def check_files(self, on_disk: dict[int, Path]) -> None:
        """Compare the manifests that the learner reads with those of the ledger.

        Args:
            on_disk: manifests that were there before the ledger was read.
        """
        for step, path in sorted(on_disk.items()):
            if step not in self._closed:
                self._report.add(
                    None, "batch file", f"{path} of step {step}", "a row that closes the step"
                )
        for step, (row, document) in self._closed.items():
            path = step_folder(self._run_dir, step) / batch.FILE_NAME
            try:
                data = read_bounded(path, batch.MAX_BYTES)
            except FileNotFoundError:
                # The newest manifest is written after its row. A coordinator that was killed
                # between the two writes it when it starts again.
                if step == max(self._closed):
                    self._report.notes.append(f"{path} is not written yet")
                else:
                    self._report.add(row, "batch file", f"{path} is gone", "manifests are kept")
            except (OSError, UserError) as error:
                self._report.add(row, "batch file", f"{path}: {error}", "a readable file")
            else:
                same = data == document.encode("utf-8", "replace")
                self._report.require(same, row, "batch file", f"{path} differs", "the row's bytes")


def _is_that(decision: filling.Close | Stalled | None, event: events.StepClosed) -> bool:
    if not isinstance(decision, filling.Close):
        return False
    return (decision.step, decision.groups) == (event.step, event.trained)


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
        self._offers: dict[tuple[int, str], batch.ShareOffered] = {}
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

    def offered(self, row: int, event: events.OfferReceived, signers: Signers) -> None:
        data, offer = event.document.encode("utf-8", "replace"), event.offer
        try:
            keys = signers.islands(offer.island, data)
            signed = batch.open_offer(data, keys=keys, run=self._run)
        except BadSignature as error:
            self._report.add(row, "offer signature", error, f"island {offer.island}'s signature")
            return
        self._report.require(signed == offer, row, "offer", offer, f"as it was signed, {signed}")
        self._offers[signed.step, signed.island] = signed

    def committed(
        self,
        row: int,
        event: events.IslandsCommitted,
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
        first, _ = self._records.setdefault(step, (row, digest_bytes(data)))
        require(first == row, row, "commit", f"a second record of step {step}", f"row {first}'s")
        try:
            keys = signers.coordinators(data)
            record = batch.open_commit(data, coordinators=keys, run=self._run, step=step)
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
            same = offer is not None and batch.Contribution.of(offer) == each
            require(same, row, "contribution", each, f"its signed offer, {offer}")
            base = record.base if offer is None else offer.base
            require(base == record.base, row, "contribution", f"base {base}", record.base)
        if step - 1 in self._results:
            base, _ = self._results[step - 1]
            require(record.base == base, row, "commit", f"base {record.base}", f"{base}, reported")
        if before is not None:
            self._follows(row, event.at, record, before)

    def lost(self, row: int, event: events.ShareLost) -> None:
        """Record that a step is open again: a share of its record could not be fetched."""
        require, step = self._report.require, event.step
        found = f"step {step} open again"
        require(step in self._records, row, "lost share", found, "a committed step")
        require(step + 1 not in self._records, row, "lost share", found, "the newest step")
        self._records.pop(step, None)
        self._results.pop(step, None)

    def reported(self, row: int, event: events.OuterResult) -> None:
        require, step = self._report.require, event.step
        digest, reporters = self._results.get(step, (event.digest, frozenset()))
        second = event.digest != digest or event.island in reporters
        require(not second, row, "outer state", f"a second of step {step}", digest)
        self._results[step] = digest, reporters | {event.island}
        require(step in self._records, row, "outer state", f"of step {step}", "a committed step")

    def _follows(self, row: int, at: float, record: batch.CommitRecord, before: State) -> None:
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
