"""The rows of a ledger as they stand at one moment, read without a lock on whoever writes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from runspec.core.errors import UserError
from runspec.core.run_files import STATE_FILE
from runspec.core.spec.schema import RunSpec
from verify.audit.ledger_rows import NoLedger, Row, Snapshot
from verify.ledger import import_postgres_store

_BUSY_TIMEOUT_S = 10.0
# As bytes: a damaged row need not be text.
_ROWS = (
    "SELECT seq, CAST(kind AS BLOB), CAST(body AS BLOB), CAST(chain AS BLOB) "
    "FROM ledger WHERE :kind IS NULL OR kind = :kind ORDER BY seq"
)


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

    def rows(self, kind: str | None = None) -> Iterator[Row]:
        try:
            for seq, *texts in self._database.execute(_ROWS, {"kind": kind}):
                yield Row(seq, *(text or b"" for text in texts))
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
