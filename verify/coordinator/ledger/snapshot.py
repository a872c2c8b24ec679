"""Reads the rows of a ledger at one moment, without a lock, and the losses that they record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from runspec.core.errors import UserError
from runspec.core.spec.schema import RunSpec
from verify.coordinator.ledger.ledger import BadRow, decode_event, store_of
from verify.coordinator.ledger.store import NoLedger, Row, StoreError
from verify.coordinator.machine.events import Event, SubmissionJudged, SubmissionSetAside

E = TypeVar("E", bound=Event)
_SQLITE_REMEDY = (
    "the file is damaged or no run's database: restore it from a copy; if a -wal file is beside it "
    "and you may not write the folder, copy both to a folder of yours"
)
_POSTGRES_REMEDY = "check verify.ledger, PGPASSWORD and that the server runs"
_DROPPED = b'"outcome":"dropped"'
"""Part of the row of a verdict with a dropped group; other rows are not decoded."""


class LedgerSnapshot:
    """The rows of a run at one moment, read in one transaction.

    Args:
        run_dir: the run directory.
        spec: the run's resolved spec.

    Raises:
        NoLedger: there is none.
        UserError: from every method, if the rows cannot be read as a ledger.
    """

    def __init__(self, run_dir: Path, spec: RunSpec) -> None:
        make, self._place = store_of(run_dir, spec)
        self._remedy = _SQLITE_REMEDY if spec.verify.ledger is None else _POSTGRES_REMEDY
        self._read = 0
        with self._readable():
            self._store = make(read_only=True)

    def close(self) -> None:
        self._store.close()

    def rows(self, kind: str | None = None, *, after: int = 0) -> Iterator[Row]:
        """Yield the rows of a kind (None: of all) later than the `after`-th, in order."""
        with self._readable():
            for row in self._store.rows(kind, after=after):
                yield row
                self._read += 1

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            raise UserError(
                f"the ledger cannot be read: {error} (after {self._read} rows)",
                place=self._place,
                remedy=self._remedy,
            ) from error


def read_events(
    run_dir: Path, spec: RunSpec, kind: type[E], *, containing: bytes = b""
) -> Iterator[E]:
    """Yield the events of a kind from the ledger of a run, which may be live.

    Args:
        run_dir: the run directory.
        spec: the run's resolved spec.
        kind: class of the events; `Event` for all.
        containing: bytes that the row's body must contain.

    Raises:
        NoLedger: there is none.
        UserError: it cannot be read.
    """
    with closing(LedgerSnapshot(run_dir, spec)) as snapshot:
        for row in snapshot.rows(None if kind is Event else kind.__name__):
            if containing in row.body:
                try:
                    event = decode_event(row.kind, row.body)
                except BadRow as error:
                    raise damaged(run_dir, f"row {row.seq} cannot be read: {error}") from error
                if isinstance(event, kind):
                    yield event


def damaged(run_dir: Path, words: str) -> UserError:
    """Return the error of a ledger whose rows are not those of a run."""
    return UserError(
        f"the ledger is damaged: {words}",
        place=str(run_dir),
        remedy=f"`python -m verify audit {run_dir}` says what is wrong with it",
    )


@dataclass(frozen=True)
class Dropped:
    """Groups that a run lost without a worker's fault (`docs/coordinator.md`).

    Times are in seconds since the epoch.
    """

    set_aside: int = 0
    """Submissions that were set aside, because validators failed at them."""
    set_aside_at: float | None = None
    """When the last submission was set aside."""
    by_grader: int = 0
    """Groups at which the grader failed."""
    fault: str = ""
    """The grader's error at the newest of these groups."""
    by_grader_at: float | None = None
    """When the newest of these groups was judged."""


def read_dropped(run_dir: Path, spec: RunSpec) -> Dropped:
    """Return the losses that the ledger of a run records; the run may be live.

    Raises:
        UserError: it cannot be read.
    """
    try:
        set_aside = list(read_events(run_dir, spec, SubmissionSetAside))
        judged = list(read_events(run_dir, spec, SubmissionJudged, containing=_DROPPED))
    except NoLedger:  # no coordinator was started
        return Dropped()
    groups = [grade for event in judged for grade in event.groups]
    return Dropped(
        set_aside=len(set_aside),
        set_aside_at=set_aside[-1].at if set_aside else None,
        by_grader=sum(grade.outcome == "dropped" for grade in groups),
        fault=judged[-1].fault if judged else "",
        by_grader_at=judged[-1].at if judged else None,
    )
