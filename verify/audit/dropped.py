"""Groups that a run lost and no worker is to blame for, by its ledger, wherever it lies."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.spec.schema import RunSpec
from verify.audit.ledger_rows import NoLedger, Row, Snapshot
from verify.audit.snapshot import open_snapshot
from verify.coordinator.machine.events import Event, SubmissionJudged, SubmissionSetAside
from verify.ledger import BadRow, decode_event

_DROPPED = b'"outcome":"dropped"'
"""Part of the row of a verdict with such a group: the other rows need not be decoded."""


@dataclass(frozen=True)
class Dropped:
    """What validators and graders failed at (`docs/coordinator.md`); times in seconds since the
    epoch."""

    set_aside: int = 0
    """Submissions that were set aside."""
    set_aside_at: float | None = None
    """When the last of them was."""
    by_grader: int = 0
    """Groups at which the grader failed."""
    fault: str = ""
    """What it failed with at the newest of them."""
    by_grader_at: float | None = None
    """When that was judged."""


def read_dropped(run_dir: Path, spec: RunSpec) -> Dropped:
    """Reads the ledger of a run, which may be at work.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with closing(open_snapshot(run_dir, spec)) as snapshot:
            return _read(snapshot)
    except NoLedger:  # nobody has started a coordinator
        return Dropped()
    except BadRow as error:
        raise UserError(
            f"a row of the ledger cannot be read: {error}",
            place=str(run_dir),
            remedy=f"`python -m verify audit {run_dir}` says what is wrong with it",
        ) from error


def _read(snapshot: Snapshot) -> Dropped:
    set_aside = [_event(row) for row in snapshot.rows(SubmissionSetAside.__name__)]
    rows = (row for row in snapshot.rows(SubmissionJudged.__name__) if _DROPPED in row.body)
    judged = [event for row in rows if isinstance(event := _event(row), SubmissionJudged)]
    groups = [grade for event in judged for grade in event.groups]
    return Dropped(
        set_aside=len(set_aside),
        set_aside_at=set_aside[-1].at if set_aside else None,
        by_grader=sum(grade.outcome == "dropped" for grade in groups),
        fault=judged[-1].fault if judged else "",
        by_grader_at=judged[-1].at if judged else None,
    )


def _event(row: Row) -> Event:
    return decode_event(row.kind, row.body)
