"""State of a run: tables of its state.db, which the coordinator's ledger shares.

The supervisor alone writes these tables, on changes only; WAL lets anyone read meanwhile. Others
write one row: what they ask of the supervisor, which it answers in the same row (`requests`).
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from runspec.core.errors import NotNow, UserError
from runspec.core.run_files import STATE_FILE
from verify.coordinator.ledger.store import is_passing

_T = TypeVar("_T")
T = TypeVar("T", "RunRow", "RoleRow", "EventRow", "SessionRow", "AppliedRow", "RequestRow")
BUSY_S = 10.0
AGAIN_S = 1.0
"""Seconds between two attempts to write."""
_SCHEMA = Path(__file__).with_name("state.sql").read_text(encoding="utf-8")


class StorageWait:
    """Retries writes that fail because the disk is full or the database is locked.

    Args:
        timeout_s: seconds for which it retries; 0 tries once.
        tell: called with a line when a wait begins and when it ends.
        stop_requests: returns the number of stop requests; one ends the wait.
    """

    def __init__(
        self,
        timeout_s: float = 0.0,
        tell: Callable[[str], None] = lambda text: None,
        stop_requests: Callable[[], int] = lambda: 0,
    ) -> None:
        self._timeout_s, self._tell, self._stop_requests = timeout_s, tell, stop_requests
        self._since: float | None = None
        """When the first attempt failed after the last that did not."""

    def __call__(self, attempt: Callable[[], _T]) -> _T:
        """Return what `attempt` returns, once it does not fail.

        Raises:
            NotNow: the time is over or the run was asked to stop, and it failed again.
        """
        while True:
            try:
                done = attempt()
            except NotNow as error:
                if self._since is None:
                    self._since = time.monotonic()
                    self._tell(f"waits up to {self._timeout_s:.0f} s: {error.place}: {error.thing}")
                waited = time.monotonic() - self._since
                if self._stop_requests() or waited >= self._timeout_s:
                    raise
                time.sleep(AGAIN_S)
                continue
            if self._since is not None:
                self._tell(f"goes on after {time.monotonic() - self._since:.0f} s")
                self._since = None
            return done


@dataclass(frozen=True)
class RunRow:
    """The run as a whole; times are seconds since the epoch."""

    name: str
    spec_digest: str
    steps: int
    state: str
    """starting, running, paused, interrupted, failed or finished."""
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
    id: int
    """Grows with time."""
    kind: str = "state"
    """`state` of a role, `result` of an evaluation, `alarm`, `change` of the run, or `note`."""
    exit_code: int | None = None
    """Of a role that has ended; negative: the signal that ended it."""

    def __str__(self) -> str:
        """One line, for people."""
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))
        return f"{at}  {self.role}: {self.text}"


@dataclass(frozen=True)
class SessionRow:
    """One time that the run was up."""

    started: float
    seen: float
    """When its supervisor last recorded that it was alive."""


@dataclass(frozen=True)
class AppliedRow:
    """One state that the run was brought into: by `apply`, or by `rollback`."""

    serial: int
    """Counts from 1 and grows with every change of the run."""
    time: float
    spec_digest: str
    """Digest of the spec from then on."""
    what: Sequence[str]
    """The changes, a line each; empty for the start of the run."""


@dataclass(frozen=True)
class RequestRow:
    """Something asked of the supervisor."""

    id: int
    time: float
    kind: str
    payload: str
    """JSON, as whoever asked wrote it."""
    state: str
    """asked, taken (it is at it), done, or refused."""
    answer: str
    """Its stage, its outcome, or why it was refused."""


class RunState:
    """The supervisor's tables of one run directory; of another user's run they can be read.

    Raises:
        UserError: from every method, when the database cannot be read or written.
    """

    def __init__(self, run_dir: Path) -> None:
        self.storage = StorageWait()
        """Decides how often a statement is tried; once, unless the supervisor sets another."""
        self._path = run_dir / STATE_FILE
        with self._errors():
            if self._path.exists() and not os.access(run_dir, os.W_OK):
                self._db = sqlite3.connect(_read_only(self._path), timeout=BUSY_S, uri=True)
                return
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
        # Asked of a supervisor that was gone before it could answer.
        self._write(
            "UPDATE request SET state = 'refused', answer = 'no supervisor was there to take it'"
            " WHERE state IN ('asked', 'taken')"
        )

    def set_run(self, state: str, reason: str = "") -> None:
        finished = time.time() if state == "finished" else None
        self._write("UPDATE run SET state = ?, reason = ?, finished = ?", (state, reason, finished))

    def seen(self) -> None:
        """Records that the session is alive; its time counts up to the last such record."""
        self._write(
            "UPDATE session SET seen = ? WHERE id = (SELECT max(id) FROM session)", (time.time(),)
        )

    def set_role(self, role: RoleRow) -> None:
        """Records a role in the place of what was known of it."""
        self._write("INSERT OR REPLACE INTO role VALUES (?, ?, ?, ?, ?, ?)", astuple(role))

    def add_event(
        self, role: str, text: str, kind: str = "note", exit_code: int | None = None
    ) -> None:
        self._write(
            "INSERT INTO role_event VALUES (NULL, ?, ?, ?, ?, ?)",
            (time.time(), role, text, kind, exit_code),
        )

    def add_applied(self, spec_digest: str, what: Sequence[str]) -> int:
        """Records a change of the run; returns its serial."""
        serial = self._write(
            "INSERT INTO applied (time, spec_digest, what) VALUES (?, ?, ?)",
            (time.time(), spec_digest, json.dumps(list(what))),
        )
        self._write("UPDATE run SET spec_digest = ?", (spec_digest,))
        return serial

    def ask(self, kind: str, payload: Mapping[str, Any]) -> int:
        """Leaves a request for the supervisor; returns its id."""
        return self._write(
            "INSERT INTO request VALUES (NULL, ?, ?, ?, 'asked', '')",
            (time.time(), kind, json.dumps(payload)),
        )

    def answer(self, request: int, state: str, text: str) -> None:
        """Records the state of a request: taken, done or refused."""
        self._write("UPDATE request SET state = ?, answer = ? WHERE id = ?", (state, text, request))

    def asked(self) -> list[RequestRow]:
        """Requests that nobody has taken yet, oldest first."""
        return self._rows(RequestRow, "FROM request WHERE state = 'asked' ORDER BY id")

    def request(self, request: int) -> RequestRow | None:
        return self._row(RequestRow, "FROM request WHERE id = ?", request)

    def serial(self) -> int:
        """Return the serial of the newest change; 0 for a run that was never applied."""
        return int(self._number("SELECT coalesce(max(serial), 0) FROM applied"))

    def applied(self) -> list[AppliedRow]:
        """Every change of the run, oldest first."""
        rows = self._rows(AppliedRow, "FROM applied ORDER BY serial")
        return [replace(row, what=json.loads(str(row.what))) for row in rows]

    def run(self) -> RunRow | None:
        return self._row(RunRow, "FROM run")

    def roles(self) -> list[RoleRow]:
        return self._rows(RoleRow, "FROM role ORDER BY rowid")

    def events(self, limit: int | None = None, *, after: int = 0) -> list[EventRow]:
        """The newest `limit` events later than that of id `after`, oldest first."""
        most = -1 if limit is None else limit
        newest = "FROM role_event WHERE id > ? ORDER BY id DESC LIMIT ?"
        return self._rows(EventRow, newest, after, most)[::-1]

    def session(self) -> SessionRow | None:
        """The newest."""
        return self._row(SessionRow, "FROM session ORDER BY id DESC LIMIT 1")

    def sessions(self) -> int:
        """How often the run was started."""
        return int(self._number("SELECT count(*) FROM session"))

    def wall_s(self) -> float:
        """Seconds that the run was up, over all its sessions."""
        return self._number("SELECT coalesce(sum(seen - started), 0) FROM session")

    def _write(self, statement: str, values: tuple = ()) -> int:
        """Returns the id of the row that was inserted, if one was."""
        return self._execute(statement, values)[1]

    def _number(self, statement: str) -> float:
        return float(self._execute(statement)[0][0][0])

    def _row(self, kind: type[T], where: str, *values: object) -> T | None:
        return next(iter(self._rows(kind, where, *values)), None)

    def _rows(self, kind: type[T], where: str, *values: object) -> list[T]:
        """Rows as values of a dataclass, whose fields are columns."""
        columns = ", ".join(kind.__dataclass_fields__)
        return [kind(*row) for row in self._execute(f"SELECT {columns} {where}", values)[0]]

    def _execute(self, statement: str, values: tuple = ()) -> tuple[list[tuple], int]:
        """Returns the rows that were found, and the id of the row that was inserted, or 0."""

        def attempt() -> tuple[list[tuple], int]:
            with self._errors():
                cursor = self._db.execute(statement, values)
                return cursor.fetchall(), cursor.lastrowid or 0

        return self.storage(attempt)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            damaged = not isinstance(error, sqlite3.OperationalError)
            raise (NotNow if is_passing(error) else UserError)(
                f"cannot use the run's state: {error}",
                place=str(self._path),
                remedy="bring the file back from a copy, or `runspec delete` the run"
                if damaged
                else "free disk space or mend the permissions, then apply again",
            ) from error


def _read_only(path: Path) -> str:
    """The URI of a database that this process may not write.

    Beside a live supervisor the write-ahead log and its index are there to be read; without one
    SQLite would have to make them, and nothing changes.
    """
    alive = path.with_name(f"{path.name}-wal").exists()
    return f"{path.absolute().as_uri()}?mode=ro" + ("" if alive else "&immutable=1")
