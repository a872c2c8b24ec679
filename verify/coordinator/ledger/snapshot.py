"""Reads the rows of a ledger at one moment, without a lock, and the losses that they record."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import quote

from runspec.core.errors import UserError
from runspec.core.run_files import STATE_FILE
from runspec.core.spec.schema import RunSpec
from verify.coordinator.ledger.ledger import BadRow, decode_event, import_postgres_store
from verify.coordinator.ledger.store import NoLedger, Row
from verify.coordinator.machine.events import Event, SubmissionJudged, SubmissionSetAside

E = TypeVar("E", bound=Event)
_BUSY_TIMEOUT_S = 10.0
# As bytes, because a damaged row may not be text.
_ROWS = (
    "SELECT seq, CAST(kind AS BLOB), CAST(body AS BLOB), CAST(chain AS BLOB) "
    "FROM ledger WHERE seq > :after AND (:kind IS NULL OR kind = :kind) ORDER BY seq"
)
_DROPPED = b'"outcome":"dropped"'
"""Part of the row of a verdict with a dropped group; other rows are not decoded."""


class Snapshot(Protocol):
    """The rows of a run at one moment.

    Raises:
        UserError: from every method, if they cannot be read as a ledger.
    """

    def rows(self, kind: str | None = None, *, after: int = 0) -> Iterator[Row]:
        """Yield the rows of a kind (None: of all) later than the `after`-th, in order."""

    def close(self) -> None: ...


def open_snapshot(run_dir: Path, spec: RunSpec) -> Snapshot:
    """Open the ledger of a run as it stands now."""
    if spec.verify.ledger is None:
        return SqliteSnapshot(run_dir / STATE_FILE)
    import_postgres_store()  # says what to install
    from verify.coordinator.ledger.postgres_store import PostgresSnapshot

    return PostgresSnapshot(spec.verify.ledger, spec.name)


class SqliteSnapshot:
    """One read transaction on a run's state.db.

    Raises:
        NoLedger: there is none.
        UserError: from every method, if the file cannot be read as a ledger.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        if not path.is_file():
            raise NoLedger(str(path))
        try:
            self._database = _open(path)
        except sqlite3.Error as error:
            if "no such table" in str(error):
                raise NoLedger(str(path)) from error
            raise self._unreadable(error) from error

    def close(self) -> None:
        self._database.close()

    def rows(self, kind: str | None = None, *, after: int = 0) -> Iterator[Row]:
        try:
            for seq, *texts in self._database.execute(_ROWS, {"kind": kind, "after": after}):
                yield Row(seq, *(text or b"" for text in texts))
                self._read += 1
        except sqlite3.Error as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: sqlite3.Error) -> UserError:
        return UserError(
            f"the ledger cannot be read: {error} (after {self._read} rows)",
            place=str(self._path),
            remedy="the file is damaged or no run's database: restore it from a copy; if a -wal "
            "file is beside it and you may not write the folder, copy both to a folder of yours",
        )


def _open(path: Path) -> sqlite3.Connection:
    """Open a database for reading only.

    A copy without a write-ahead log may lie in a folder that cannot be written, where SQLite cannot
    make one. It is read as a file that nobody changes.
    """
    name = f"file:{quote(str(path.resolve()))}"
    try:
        return _begin(f"{name}?mode=ro")
    except sqlite3.OperationalError:
        if path.with_name(f"{path.name}-wal").exists():
            raise
        return _begin(f"{name}?mode=ro&immutable=1")


def _begin(uri: str) -> sqlite3.Connection:
    database = sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
    try:
        database.execute("BEGIN")
        database.execute("SELECT max(seq) FROM ledger").fetchone()
    except sqlite3.Error:
        database.close()
        raise
    return database


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
    with closing(open_snapshot(run_dir, spec)) as snapshot:
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
