"""Rejects rollouts that another submission contained before.

Only the coordinator sees what every validator judged. Validators put hashes of runs of tokens into
their verdicts, runs that no two honest rollouts share (`verify.checks.duplicates` has the bound).
The hashes of accepted rollouts that may still train are remembered. A submission that shares a run
with one of them is rejected, even if its own verdict accepts it.

The submission that is judged first stays. Only the coordinator and the validators see outputs, so
a worker that holds another's output got it from that worker. Nobody can be framed by a guess: it
would have to contain 48 nats of what the other worker samples later.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from runspec.core.run_files import submission_files
from verify.coordinator.machine.gap_history import is_fault
from verify.coordinator.machine.state import State
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
    """Whether only the coordinator rejects for this reason: no validator sees it."""
    return repeated_submission(reason) is not None or is_fault(reason)


class Seen:
    """Fingerprints of accepted rollouts, at most `MAX_FINGERPRINTS` of each."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, str]] = {}
        """For each step and fingerprint, the submission that contained it first."""

    @classmethod
    def of(cls, run_dir: Path, state: State) -> Seen:
        """Read the fingerprints of accepted submissions from the verdict files, after a restart."""
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
        """Forgets steps below `oldest`, which can train no more."""
        for step in [step for step in self._steps if step < oldest]:
            del self._steps[step]
