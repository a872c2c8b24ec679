"""Where a ledger's rows lie: what a store must do, and the one in SQLite.

A store knows nothing of events and chains; it keeps rows of text, in order, all or none of what
one call brings.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

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
        passing: whether a later try may do; then nothing was changed.
        remedy: what a person can do.
    """

    def __init__(
        self, words: str, *, passing: bool, remedy: str = "free disk space or mend the permissions"
    ) -> None:
        self.words, self.passing, self.remedy = words, passing, remedy
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

    def append(self, rows: Sequence[StoredRow]) -> None:
        """Adds rows that follow the newest, all or none, durably."""
        ...

    def rows(self) -> Iterator[StoredRow]:
        """All rows, in order."""
        ...

    def close(self) -> None: ...


class SqliteStore:
    """A table in a run's state.db, in WAL mode, synced at every commit."""

    def __init__(self, path: Path) -> None:
        self._path = path
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

    def last(self) -> StoredRow | None:
        try:
            row: StoredRow | None = self._database.execute(
                "SELECT seq, kind, body, chain FROM ledger ORDER BY seq DESC LIMIT 1"
            ).fetchone()
        except sqlite3.Error as error:
            raise _store_error(error) from error
        return row

    def append(self, rows: Sequence[StoredRow]) -> None:
        try:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                self._database.executemany("INSERT INTO ledger VALUES (?, ?, ?, ?)", rows)
                self._database.execute("COMMIT")
            except sqlite3.Error:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise _store_error(error) from error

    def rows(self) -> Iterator[StoredRow]:
        try:
            yield from self._database.execute(
                "SELECT seq, kind, body, chain FROM ledger ORDER BY seq"
            )
        except sqlite3.Error as error:
            raise _store_error(error) from error


def _store_error(error: OSError | sqlite3.Error) -> StoreError:
    code = error.sqlite_errorcode if isinstance(error, sqlite3.Error) else sqlite3.SQLITE_OK
    return StoreError(str(error), passing=code & _PRIMARY in _PASSING)
