"""Checks the batch manifests of a ledger: one a step, signed, anchored, with the right groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.run_files import step_folder
from runspec.core.signed import BadSignature
from verify.audit.findings import Report
from verify.audit.signers import Signers
from verify.coordinator.machine import filling
from verify.coordinator.machine.events import StepClosed
from verify.coordinator.machine.stalls import Stalled
from verify.coordinator.machine.state import State, Tally
from verify.coordinator.machine.verdicts import batch_stats
from verify.formats.batch import FILE_NAME, MAX_BYTES, BatchGroup, BatchManifest, open_batch
from verify.formats.ranges import RangeManifest, open_ranges

_OF_HEARTBEATS = "sampler_busy_fraction"
"""Name of the statistic that comes from heartbeats, which the ledger does not have."""


def batches_on_disk(run_dir: Path) -> dict[int, Path]:
    """Return the batch manifests in the run directory, by step."""
    found = {}
    for path in (run_dir / "rollouts").glob(f"step_*/{FILE_NAME}"):
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
        event: StepClosed,
        chain_before: str,
        groups: list[BatchGroup] | None,
        signers: Signers,
    ) -> BatchManifest | RangeManifest | None:
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
        if isinstance(manifest, RangeManifest):
            require(not event.trained, row, "batch groups", event.trained, "none: it names rows")
        elif groups is None:
            self._report.add(row, "batch groups", "a group of no lease", "leases of this ledger")
        else:
            require(manifest.groups == groups, row, "batch groups", manifest.groups, groups)
        return manifest

    def follows(
        self,
        row: int,
        event: StepClosed,
        manifest: BatchManifest | RangeManifest,
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
        if isinstance(manifest, RangeManifest):
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

    def _open(self, data: bytes, signers: Signers, step: int) -> BatchManifest | RangeManifest:
        keys = signers.coordinators(data)
        if not self._rows_per_step:
            return open_batch(data, coordinators=keys, run=self._run, step=step)
        rows = self._rows_per_step
        return open_ranges(data, coordinators=keys, run=self._run, step=step, rows_per_step=rows)

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
            path = step_folder(self._run_dir, step) / FILE_NAME
            try:
                data = read_bounded(path, MAX_BYTES)
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


def _is_that(decision: filling.Close | Stalled | None, event: StepClosed) -> bool:
    if not isinstance(decision, filling.Close):
        return False
    return (decision.step, decision.groups) == (event.step, event.trained)
