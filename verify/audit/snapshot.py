"""The rows of a ledger as they stand at one moment, read without a lock on whoever writes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from runspec.core.errors import UserError
from runspec.core.spec.schema import RunSpec
from verify.formats.layout import STATE_FILE
from verify.ledger import import_postgres_store

_BUSY_TIMEOUT_S = 10.0
# As bytes: a damaged row need not be text.
_ALL_ROWS = (
    "SELECT seq, CAST(kind AS BLOB), CAST(body AS BLOB), CAST(chain AS BLOB) "
    "FROM ledger ORDER BY seq"
)


@dataclass(frozen=True)
class Row:
    """As stored, nothing checked."""

    seq: int
    kind: bytes
    body: bytes
    chain: bytes


class NoLedger(UserError):
    """Nothing was written yet, or not here."""

    def __init__(self, place: str) -> None:
        super().__init__(
            "there is no ledger", place=place, remedy="name the run directory that has it"
        )


class Snapshot(Protocol):
    """The rows of a run at one moment.

    Raises:
        UserError: from every method, when they cannot be read as a ledger.
    """

    def rollbacks(self) -> list[int]:
        """The rows that say that the run was taken back, in order."""
        ...

    def last_written(self) -> float:
        """When the last row was written, seconds since the epoch; 0 where none says."""
        ...

    def of_kind(self, kind: str) -> tuple[int, bytes | None]:
        """How many rows of a kind there are, and the body of the newest."""
        ...

    def rows(self) -> Iterator[Row]:
        """All rows, in order."""
        ...

    def close(self) -> None: ...


def open_snapshot(run_dir: Path, spec: RunSpec) -> Snapshot:
    """The ledger of a run as it stands now."""
    if spec.verify.ledger is None:
        return SqliteSnapshot(run_dir / STATE_FILE)
    import_postgres_store()  # says what to install
    from verify.audit.postgres_snapshot import PostgresSnapshot

    return PostgresSnapshot(spec.verify.ledger, spec.name)


class SqliteSnapshot:
    """One read transaction on a run's state.db.

    Raises:
        NoLedger: there is none.
        UserError: from every method, when the file cannot be read as a ledger.
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

    def rollbacks(self) -> list[int]:
        try:
            found = self._database.execute(
                "SELECT seq FROM ledger WHERE kind = 'RolledBack' ORDER BY seq"
            ).fetchall()
        except sqlite3.Error as error:
            raise self._unreadable(error) from error
        return [seq for (seq,) in found]

    def last_written(self) -> float:
        try:
            found = self._database.execute(
                "SELECT CAST(json_extract(body, '$.at') AS REAL) FROM ledger "
                "WHERE json_valid(body) ORDER BY seq DESC LIMIT 1"
            ).fetchone()
        except sqlite3.Error as error:
            raise self._unreadable(error) from error
        return 0.0 if found is None or found[0] is None else float(found[0])

    def of_kind(self, kind: str) -> tuple[int, bytes | None]:
        try:
            count, newest = self._database.execute(
                "SELECT count(*), max(seq) FROM ledger WHERE kind = ?", (kind,)
            ).fetchone()
            found = self._database.execute(
                "SELECT CAST(body AS BLOB) FROM ledger WHERE seq = ?", (newest,)
            ).fetchone()
        except sqlite3.Error as error:
            raise self._unreadable(error) from error
        return count, None if found is None else found[0]

    def rows(self) -> Iterator[Row]:
        try:
            for seq, kind, body, chain in self._database.execute(_ALL_ROWS):
                yield Row(seq, kind or b"", body or b"", chain or b"")
                self._read += 1
        except sqlite3.Error as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: sqlite3.Error) -> UserError:
        return UserError(
            f"the ledger cannot be read: {error} (after {self._read} rows)",
            place=str(self._path),
            remedy="the file is damaged or no run's database: restore it from a copy; where it has "
            "a -wal beside it in a folder that you may not write, copy both to one that you may",
        )


def _open(path: Path) -> sqlite3.Connection:
    """Opens for reading alone. A copy without a write-ahead log, where none can be made beside it
    (a folder that is not ours to write), is read as a file that nobody changes."""
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
