"""Rollouts that others have handed in before.

The coordinator alone sees what every validator judged. Validators put hashes of runs of tokens into
their verdicts, runs that no two honest rollouts share (`verify.checks.duplicates` has the bound).
What was accepted and may still train is remembered; a submission that shares a run with it is
rejected, though its verdict said nothing against it.

The one that is judged first stays. Outputs are seen by coordinator and validators alone, so that
whoever holds another's before it is judged shares them with its owner; and nobody can be framed by
a guess, which would have to carry 48 nats of what the other then samples.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from verify.coordinator.gap_history import is_fault
from verify.coordinator.state import State
from verify.formats.layout import submission_files
from verify.formats.tables import MalformedTable
from verify.formats.verdict import RolloutVerdict, read_fingerprints

_log = logging.getLogger(__name__)
_REASON = re.compile(
    r"duplicates: row \d+: \d+ runs of tokens of submission (?P<submission>[0-9a-f]{64}), "
    r"which was judged before"
)


def repeated_submission(reason: str) -> str | None:
    """The submission that `Seen.fault` named; None for a rejection of another kind."""
    found = _REASON.fullmatch(reason)
    return found["submission"] if found else None


def by_coordinator(reason: str) -> bool:
    """Whether the coordinator alone rejects for that: what no validator sees of one submission."""
    return repeated_submission(reason) is not None or is_fault(reason)


class Seen:
    """Fingerprints of accepted rollouts, at most `MAX_FINGERPRINTS` of each."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, str]] = {}
        """Of each step the submission that each fingerprint was first seen in."""

    @classmethod
    def of(cls, run_dir: Path, state: State) -> Seen:
        """What a coordinator before this one has accepted, from the verdict files that are left."""
        seen = cls()
        for record in state.leases.values():
            if record.status != "accepted" or record.submission is None:
                continue
            step = record.lease.step
            path = submission_files(run_dir, step, record.submission).verdict
            try:
                seen.add(step, record.submission, read_fingerprints(path))
            except (OSError, MalformedTable) as error:
                _log.warning("new rollouts are not compared with those of %s: %s", path, error)
        return seen

    def add(self, step: int, submission: str, prints: Sequence[Sequence[int]]) -> None:
        """Remembers the rows of an accepted submission."""
        known = self._steps.setdefault(step, {})
        for row in prints:
            for fingerprint in row:
                known.setdefault(fingerprint, submission)

    def fault(self, rows: Sequence[RolloutVerdict]) -> str:
        """The first row that shares a run of tokens with what was accepted; empty where none."""
        for number, row in enumerate(rows):
            for known in self._steps.values():
                shared = [known[f] for f in row.fingerprints if f in known]
                if shared:
                    return (
                        f"duplicates: row {number}: {len(shared)} runs of tokens of submission "
                        f"{shared[0]}, which was judged before"
                    )
        return ""

    def forget(self, oldest: int) -> None:
        """Lets go of steps below one; nothing of theirs can train any more."""
        for step in [step for step in self._steps if step < oldest]:
            del self._steps[step]
