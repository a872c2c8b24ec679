"""Stores of a ledger's rows: the interface, and the store in SQLite.

A store does not interpret events and chains. It stores rows of text, in order; each call appends
all of its rows or none.
"""

from __future__ import annotations

import fcntl
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

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
"""Its number, the event's kind, the event as JSON, the chain."""


class StoreError(Exception):
    """A store cannot be read or written.

    Args:
        words: why.
        passing: whether a later try may do.
        remedy: what a person can do.
        in_doubt: whether what was to be written may be there all the same.
    """

    def __init__(
        self,
        words: str,
        *,
        passing: bool,
        remedy: str = "free disk space or mend the permissions",
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
        """For people."""
        ...

    def last(self) -> StoredRow | None:
        """The newest row."""
        ...

    def own(self) -> None:
        """Refuses another writer from now on, as the first `append` does at the latest."""
        ...

    def append(self, rows: Sequence[StoredRow]) -> None:
        """Adds rows that follow the newest, all or none, durably."""
        ...

    def clear(self) -> None:
        """Removes all rows of the run, durably."""
        ...

    def rows(self) -> Iterator[StoredRow]:
        """All rows, in order."""
        ...

    def close(self) -> None: ...


class SqliteStore:
    """A table in a run's state.db, in WAL mode, synced at every commit.

    From `own` or its first row on a writer holds the lock `state.db.lock` beside it, which the
    kernel lets go when the writer dies. Readers need no lock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: BinaryIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise _store_error(error) from error

    @property
    def place(self) -> str:
        return str(self._path)

    def close(self) -> None:
        self._database.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def last(self) -> StoredRow | None:
        try:
            row: StoredRow | None = self._database.execute(
                "SELECT seq, kind, body, chain FROM ledger ORDER BY seq DESC LIMIT 1"
            ).fetchone()
        except sqlite3.Error as error:
            raise _store_error(error) from error
        return row

    def append(self, rows: Sequence[StoredRow]) -> None:
        if not rows:
            return
        self.own()
        try:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                must_follow(self.last(), rows[0])
                self._database.executemany("INSERT INTO ledger VALUES (?, ?, ?, ?)", rows)
                self._database.execute("COMMIT")
            except (sqlite3.Error, StoreError):
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise _store_error(error) from error

    def clear(self) -> None:
        self.own()
        try:
            self._database.execute("DELETE FROM ledger")
        except sqlite3.Error as error:
            raise _store_error(error) from error

    def rows(self) -> Iterator[StoredRow]:
        try:
            yield from self._database.execute(
                "SELECT seq, kind, body, chain FROM ledger ORDER BY seq"
            )
        except sqlite3.Error as error:
            raise _store_error(error) from error

    def own(self) -> None:
        if self._lock is not None:
            return
        try:
            lock = self._path.with_name(self._path.name + LOCK_SUFFIX).open("ab")
        except OSError as error:
            raise _store_error(error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise another_writes() from error
        self._lock = lock


def must_follow(newest: StoredRow | None, row: StoredRow) -> None:
    """Refuses a row that does not follow the newest: somebody else wrote since it was read.

    Raises:
        StoreError: it does not.
    """
    last = newest[0] if newest else 0
    if last != row[0] - 1:
        raise StoreError(
            f"row {row[0]} cannot follow row {last}: another process wrote",
            passing=False,
            remedy="see that no other coordinator of this run is up",
        )


def another_writes() -> StoreError:
    """A second writer is refused."""
    return StoreError(
        "another process writes this run's ledger",
        passing=False,
        remedy="end the other coordinator of this run",
    )


def is_passing(error: OSError | sqlite3.Error) -> bool:
    """Whether a later try may do: the disk is full, or another process is writing."""
    return _code(error) & _PRIMARY in _PASSING


def _store_error(error: OSError | sqlite3.Error) -> StoreError:
    # The log has the row then, and recovery after a crash may read it from there.
    in_doubt = _code(error) == sqlite3.SQLITE_IOERR_FSYNC
    return StoreError(str(error), passing=is_passing(error), in_doubt=in_doubt)


def _code(error: OSError | sqlite3.Error) -> int:
    return error.sqlite_errorcode if isinstance(error, sqlite3.Error) else sqlite3.SQLITE_OK
