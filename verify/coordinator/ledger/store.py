"""Stores of a ledger's rows: the interface, and the store in SQLite.

A store does not interpret events and chains. It stores rows of text, in order; each call appends
all of its rows or none.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from runspec.core.errors import UserError
from runspec.core.files import open_lock

LOCK_SUFFIX = ".lock"
_BUSY_TIMEOUT_S = 10.0
_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
_PRIMARY = 0xFF
"""The part of an extended result code that is the primary one."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS ledger (
    seq INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    body TEXT NOT NULL,
    chain TEXT NOT NULL
) STRICT;
"""
StoredRow = tuple[int, str, str, str]
"""Number of the row, kind of the event, the event as JSON, the chain."""


@dataclass(frozen=True)
class Row:
    """A row as stored, unchecked."""

    seq: int
    kind: bytes
    body: bytes
    chain: bytes


class NoLedger(UserError):
    """Raised if no ledger was written yet, or if it is elsewhere."""

    def __init__(self, place: str) -> None:
        super().__init__(
            "there is no ledger", place=place, remedy="name the run directory that has it"
        )


class StoreError(Exception):
    """Raised if a store cannot be read or written.

    Args:
        words: why.
        passing: whether a later try may succeed.
        remedy: what a person can do.
        in_doubt: whether the rows may have been written despite the error.
    """

    def __init__(
        self,
        words: str,
        *,
        passing: bool,
        remedy: str = "free disk space or correct the permissions",
        in_doubt: bool = False,
    ) -> None:
        self.words, self.passing, self.remedy = words, passing, remedy
        self.in_doubt = in_doubt
        super().__init__(words)


class LedgerStore(Protocol):
    """The rows of one run; one process at a time writes them.

    Raises:
        StoreError: from every method.
    """

    @property
    def place(self) -> str:
        """Location of the store, for messages."""

    def last(self) -> StoredRow | None:
        """Return the newest row."""

    def own(self) -> None:
        """Take the writer's lock; `append` takes it too."""

    def append(self, rows: Sequence[StoredRow]) -> None:
        """Add rows that follow the newest, all or none, durably."""

    def clear(self) -> None:
        """Remove all rows of the run, durably."""

    def rows(self) -> Iterator[StoredRow]:
        """Yield all rows, in order."""

    def close(self) -> None: ...


class SqliteStore:
    """A table in a run's state.db, in WAL mode, synced at every commit.

    A writer holds the lock `state.db.lock` beside it, from `own` or its first row on. The kernel
    releases the lock when the writer dies. Readers need no lock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: BinaryIO | None = None
        with _store_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.executescript(_SCHEMA)

    @property
    def place(self) -> str:
        return str(self._path)

    def close(self) -> None:
        self._database.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def last(self) -> StoredRow | None:
        with _store_errors():
            row: StoredRow | None = self._database.execute(
                "SELECT seq, kind, body, chain FROM ledger ORDER BY seq DESC LIMIT 1"
            ).fetchone()
        return row

    def append(self, rows: Sequence[StoredRow]) -> None:
        if not rows:
            return
        self.own()
        with _store_errors(), self._database:  # commits, or rolls back after an error
            self._database.execute("BEGIN IMMEDIATE")
            must_follow(self.last(), rows[0])
            self._database.executemany("INSERT INTO ledger VALUES (?, ?, ?, ?)", rows)

    def clear(self) -> None:
        self.own()
        with _store_errors():
            self._database.execute("DELETE FROM ledger")

    def rows(self) -> Iterator[StoredRow]:
        with _store_errors():
            yield from self._database.execute(
                "SELECT seq, kind, body, chain FROM ledger ORDER BY seq"
            )

    def own(self) -> None:
        if self._lock is not None:
            return
        with _store_errors():
            path = self._path.with_name(self._path.name + LOCK_SUFFIX)
            lock = os.fdopen(open_lock(path), "ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise another_writes() from error
        self._lock = lock


def must_follow(newest: StoredRow | None, row: StoredRow) -> None:
    """Require that a row follows the newest.

    Raises:
        StoreError: it does not; another process has written.
    """
    last = newest[0] if newest else 0
    if last != row[0] - 1:
        raise StoreError(
            f"row {row[0]} cannot follow row {last}: another process wrote",
            passing=False,
            remedy="make sure that no other coordinator of this run is up",
        )


def another_writes() -> StoreError:
    """Return the error of a second writer."""
    return StoreError(
        "another process writes this run's ledger",
        passing=False,
        remedy="end the other coordinator of this run",
    )


def is_passing(error: OSError | sqlite3.Error) -> bool:
    """Whether a later try may succeed: the disk is full, or another process is writing."""
    return _code(error) & _PRIMARY in _PASSING


@contextmanager
def _store_errors() -> Iterator[None]:
    """Raise what SQLite or the disk raises in the block as a `StoreError`."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        # After a failed sync the log has the row, and recovery after a crash may read it there.
        in_doubt = _code(error) == sqlite3.SQLITE_IOERR_FSYNC
        raise StoreError(str(error), passing=is_passing(error), in_doubt=in_doubt) from error


def _code(error: OSError | sqlite3.Error) -> int:
    return error.sqlite_errorcode if isinstance(error, sqlite3.Error) else sqlite3.SQLITE_OK
