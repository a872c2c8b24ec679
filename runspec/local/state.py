"""What `status` knows of a run: tables of its state.db, which the coordinator's ledger shares.

The supervisor alone writes these tables, on changes only; WAL lets anyone read meanwhile.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from runspec.common.errors import UserError
from verify.formats.layout import STATE_FILE

BUSY_S = 10.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (
  name TEXT PRIMARY KEY, spec_digest TEXT NOT NULL, steps INTEGER NOT NULL,
  state TEXT NOT NULL, reason TEXT NOT NULL, started REAL NOT NULL, finished REAL);
CREATE TABLE IF NOT EXISTS session (
  id INTEGER PRIMARY KEY, started REAL NOT NULL, seen REAL NOT NULL);
CREATE TABLE IF NOT EXISTS role (
  name TEXT PRIMARY KEY, state TEXT NOT NULL, restarts INTEGER NOT NULL,
  pid INTEGER, born INTEGER, since REAL NOT NULL);
CREATE TABLE IF NOT EXISTS event (
  id INTEGER PRIMARY KEY, time REAL NOT NULL, role TEXT NOT NULL, text TEXT NOT NULL);
"""


@dataclass(frozen=True)
class RunRow:
    """The run as a whole; times are seconds since the epoch."""

    name: str
    spec_digest: str
    steps: int
    state: str
    """starting, running, interrupted, failed or finished."""
    reason: str
    started: float
    finished: float | None


@dataclass(frozen=True)
class RoleRow:
    name: str
    state: str
    restarts: int
    pid: int | None
    born: int | None
    """Start time of the process in the kernel's ticks, which tells it from a later namesake."""
    since: float


@dataclass(frozen=True)
class EventRow:
    time: float
    role: str
    text: str


class RunState:
    """The supervisor's tables of one run directory.

    Raises:
        UserError: from every method, when the database cannot be read or written.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / STATE_FILE
        with self._errors():
            self._db = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    def begin(self, name: str, spec_digest: str, steps: int) -> None:
        """Opens a session of the run; the time of the first one stays the run's start."""
        now = time.time()
        self._write(
            "INSERT INTO run VALUES (?, ?, ?, 'starting', '', ?, NULL) ON CONFLICT (name) DO UPDATE"
            " SET spec_digest = excluded.spec_digest, steps = excluded.steps,"
            " state = 'starting', reason = '', finished = NULL",
            (name, spec_digest, steps, now),
        )
        self._write("INSERT INTO session (started, seen) VALUES (?, ?)", (now, now))
        self._write("DELETE FROM role")

    def set_run(self, state: str, reason: str = "") -> None:
        finished = time.time() if state == "finished" else None
        self._write("UPDATE run SET state = ?, reason = ?, finished = ?", (state, reason, finished))

    def seen(self) -> None:
        """Says that the session is alive: its time counts up to the last such word."""
        self._write(
            "UPDATE session SET seen = ? WHERE id = (SELECT max(id) FROM session)", (time.time(),)
        )

    def set_role(
        self, name: str, state: str, restarts: int, pid: int | None, born: int | None
    ) -> None:
        self._write(
            "INSERT OR REPLACE INTO role VALUES (?, ?, ?, ?, ?, ?)",
            (name, state, restarts, pid, born, time.time()),
        )

    def add_event(self, role: str, text: str) -> None:
        self._write(
            "INSERT INTO event (time, role, text) VALUES (?, ?, ?)", (time.time(), role, text)
        )

    def run(self) -> RunRow | None:
        rows = self._read(
            "SELECT name, spec_digest, steps, state, reason, started, finished FROM run"
        )
        return RunRow(*rows[0]) if rows else None

    def roles(self) -> list[RoleRow]:
        rows = self._read("SELECT name, state, restarts, pid, born, since FROM role ORDER BY rowid")
        return [RoleRow(*row) for row in rows]

    def events(self, limit: int) -> list[EventRow]:
        """The newest events, oldest first."""
        rows = self._read("SELECT time, role, text FROM event ORDER BY id DESC LIMIT ?", (limit,))
        return [EventRow(*row) for row in reversed(rows)]

    def sessions(self) -> int:
        """How often the run was started."""
        return int(self._read("SELECT count(*) FROM session")[0][0])

    def wall_s(self) -> float:
        """Seconds that the run was up, over all its sessions."""
        return float(self._read("SELECT coalesce(sum(seen - started), 0) FROM session")[0][0])

    def _write(self, statement: str, values: tuple = ()) -> None:
        with self._errors():
            self._db.execute(statement, values)

    def _read(self, statement: str, values: tuple = ()) -> list[tuple]:
        with self._errors():
            return self._db.execute(statement, values).fetchall()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise UserError(
                f"cannot use the run's state: {error}",
                place=str(self._path),
                remedy="free disk space or mend the permissions, then apply again",
            ) from error
