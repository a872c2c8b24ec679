"""The rows of a ledger: one set of statements for every database, and the store in SQLite.

A store does not interpret events and chains. It stores rows of text, in order; each call appends
all of its rows or none.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar
from urllib.parse import quote

from runspec.core.errors import UserError
from runspec.core.files import open_lock

LOCK_SUFFIX = ".lock"
_BUSY_TIMEOUT_S = 10.0
_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
_PRIMARY = 0xFF
"""The part of an extended result code that is the primary one."""
CREATE = (
    "CREATE TABLE IF NOT EXISTS ledger "
    "({key}, kind TEXT NOT NULL, body TEXT NOT NULL, chain TEXT NOT NULL{end}"
)
_LAST = "SELECT seq, chain FROM ledger WHERE {mine} ORDER BY seq DESC LIMIT 1"
_APPEND = "INSERT INTO ledger ({run}seq, kind, body, chain) VALUES ({run_value}?, ?, ?, ?)"
_CLEAR = "DELETE FROM ledger WHERE {mine}"
# As bytes, because a damaged row may not be text.
_ROWS = (
    "SELECT seq, {text}kind{as_bytes}, {text}body{as_bytes}, {text}chain{as_bytes} FROM ledger "
    "WHERE {mine} AND seq > ? AND (CAST(? AS TEXT) IS NULL OR kind = ?) ORDER BY seq"
)
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


@dataclass(eq=False)
class StoreError(Exception):
    """Raised if a store cannot be read or written."""

    words: str
    _: KW_ONLY
    passing: bool
    """Whether a later try may succeed."""
    remedy: str = "free disk space or correct the permissions"
    """What a person can do."""
    in_doubt: bool = False
    """Whether the rows may have been written despite the error."""


class Store(ABC):
    """The rows of one run in the table `ledger`; one process at a time writes them.

    Args:
        place: location of the store, for messages.
        mine: values of the parameters by which a statement selects the run's rows.

    Raises:
        StoreError: from every method.
    """

    dialect: ClassVar[dict[str, str]]
    """The parts of the statements in which the databases differ."""

    def __init__(self, place: str, mine: tuple[str, ...] = ()) -> None:
        self.place, self._mine = place, mine

    def last(self) -> tuple[int, str] | None:
        """Return number and chain of the newest row."""
        found = list(self._ask(self._sql(_LAST), self._mine))
        return found[0] if found else None

    def append(self, rows: Sequence[StoredRow]) -> None:
        """Add rows that follow the newest, all or none, durably."""
        if not rows:
            return
        with self._writing() as cursor:
            cursor.execute(self._sql(_LAST), self._mine)
            must_follow(cursor.fetchone(), rows[0][0])
            cursor.executemany(self._sql(_APPEND), [(*self._mine, *row) for row in rows])

    def clear(self) -> None:
        """Remove all rows of the run, durably."""
        with self._writing() as cursor:
            cursor.execute(self._sql(_CLEAR), self._mine)

    def rows(self, kind: str | None = None, *, after: int = 0) -> Iterator[Row]:
        """Yield the rows of a kind (None: of all) later than the `after`-th, in order."""
        for seq, *texts in self._ask(self._sql(_ROWS), (*self._mine, after, kind, kind)):
            yield Row(seq, *(bytes(text or b"") for text in texts))

    def _sql(self, statement: str) -> str:
        return statement.format(**self.dialect)

    @abstractmethod
    def own(self) -> None:
        """Take the writer's lock; `append` takes it too."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _ask(self, statement: str, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query, which are all of one moment."""

    @abstractmethod
    def _writing(self) -> AbstractContextManager[Any]:
        """Yield a cursor in a transaction, which is committed durably at the end of the block."""


class SqliteStore(Store):
    """A table in a run's state.db, in WAL mode, synced at every commit.

    A writer holds the lock `state.db.lock` beside it, from `own` or its first row on. The kernel
    releases the lock when the writer dies. Readers need no lock.

    Args:
        path: the file.
        read_only: whether to read the rows as they are now, in one transaction.

    Raises:
        NoLedger: there is no ledger to read.
    """

    dialect: ClassVar = {
        "key": "seq INTEGER PRIMARY KEY",
        "end": ") STRICT",
        "mine": "TRUE",
        "run": "",
        "run_value": "",
        "text": "CAST(",
        "as_bytes": " AS BLOB)",
    }

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        super().__init__(str(path))
        self._path = path
        self._lock: BinaryIO | None = None
        with _store_errors():
            if read_only:
                self._database = _open_reader(path)
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.execute(self._sql(CREATE))

    def close(self) -> None:
        self._database.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

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

    def _ask(self, statement: str, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        with _store_errors():
            yield from self._database.execute(statement, values)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Cursor]:
        self.own()
        with _store_errors(), self._database:  # commits, or rolls back after an error
            yield self._database.execute("BEGIN IMMEDIATE")


def _open_reader(path: Path) -> sqlite3.Connection:
    """Open a database for reading only.

    A copy without a write-ahead log may lie in a folder that cannot be written, where SQLite cannot
    make one. It is read as a file that nobody changes.
    """
    if not path.is_file():
        raise NoLedger(str(path))
    name = f"file:{quote(str(path.resolve()))}"
    try:
        try:
            return _begin(f"{name}?mode=ro")
        except sqlite3.OperationalError:
            if path.with_name(f"{path.name}-wal").exists():
                raise
            return _begin(f"{name}?mode=ro&immutable=1")
    except sqlite3.Error as error:
        if "no such table" in str(error):
            raise NoLedger(str(path)) from error
        raise


def _begin(uri: str) -> sqlite3.Connection:
    database = sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
    try:
        database.execute("BEGIN")
        database.execute("SELECT max(seq) FROM ledger").fetchone()
    except sqlite3.Error:
        database.close()
        raise
    return database


def must_follow(newest: tuple[int, str] | None, seq: int) -> None:
    """Require that a row follows the newest.

    Raises:
        StoreError: it does not; another process has written.
    """
    last = newest[0] if newest else 0
    if last != seq - 1:
        raise StoreError(
            f"row {seq} cannot follow row {last}: another process wrote",
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
