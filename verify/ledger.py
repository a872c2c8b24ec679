"""The ledger: an append-only table of events, chained by hashes, in SQLite.

One row an event: {seq, kind, body (JSON), chain}, where chain = BLAKE3(previous chain, seq, kind,
body), each length-prefixed. What is appended in one call is one transaction, synced to disk before
the call returns, so that an answer once given holds over `kill -9` and a loss of power. The table
lives in the run's `state.db` beside the tables of others.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from runspec.common.errors import UserError
from runspec.common.hashing import hash_parts
from verify.coordinator.events import (
    BanLifted,
    CoordinatorStarted,
    Event,
    KeyBanned,
    LeaseExpired,
    LeaseGranted,
    LeaseReleased,
    LeaseResumed,
    NonceDrawn,
    QuarantineEnded,
    RolledBack,
    StepClosed,
    SubmissionDeferred,
    SubmissionJudged,
    SubmissionReceived,
    VersionPublished,
    WorkerQuarantined,
    WorkerRegistered,
)

_BUSY_TIMEOUT_S = 10.0
_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
_PRIMARY = 0xFF
"""The part of an extended result code that is the primary one."""
FIRST_CHAIN = bytes(32).hex()
_SCHEMA = """
CREATE TABLE IF NOT EXISTS ledger (
    seq INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    body TEXT NOT NULL,
    chain TEXT NOT NULL
) STRICT;
"""
_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        CoordinatorStarted,
        WorkerRegistered,
        WorkerQuarantined,
        QuarantineEnded,
        KeyBanned,
        BanLifted,
        VersionPublished,
        NonceDrawn,
        LeaseGranted,
        LeaseExpired,
        LeaseReleased,
        LeaseResumed,
        SubmissionDeferred,
        SubmissionReceived,
        SubmissionJudged,
        StepClosed,
        RolledBack,
    )
}
_CODECS: dict[str, TypeAdapter[Event]] = {name: TypeAdapter(kind) for name, kind in _KINDS.items()}


class NotNow(UserError):
    """Nothing could be written just now (the disk is full, say), and nothing has changed."""


class BadRow(ValueError):
    """A row that holds no event."""


def decode_event(kind: bytes, body: bytes) -> Event:
    """The event of a row.

    Raises:
        BadRow: there is no such kind, or the body is not of it.
    """
    codec = _CODECS.get(kind.decode("utf-8", "replace"))
    if codec is None:
        raise BadRow(f"kind {kind[:40]!r}")
    try:
        return codec.validate_json(body)
    except ValidationError as error:
        raise BadRow(f"not a {kind.decode()}: {error.errors()[0]['msg']}") from error


class Ledger:
    """Single writer: the coordinator process. Others may read.

    Raises:
        UserError: from every method, when the database cannot be read or written (a full disk).
    """

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
            last = self._database.execute(
                "SELECT seq, chain FROM ledger ORDER BY seq DESC LIMIT 1"
            ).fetchone()
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error
        self._seq: int = last[0] if last else 0
        self._chain: str = last[1] if last else FIRST_CHAIN

    @property
    def head(self) -> tuple[int, str]:
        """How many rows there are, and the chain of the last."""
        return self._seq, self._chain

    def close(self) -> None:
        self._database.close()

    def append(self, events: Sequence[Event]) -> None:
        """Stores events, all or none, durably.

        Raises:
            NotNow: the disk is full or the database locked; a later try may do.
            UserError: it cannot be written at all.
        """
        rows, seq, chain = [], self._seq, self._chain
        for event in events:
            kind = type(event).__name__
            body = _CODECS[kind].dump_json(event).decode()
            seq += 1
            chain = _link(chain, seq, kind, body)
            rows.append((seq, kind, body, chain))
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
            raise self._unusable(error) from error
        self._seq, self._chain = seq, chain

    def events(self) -> Iterator[Event]:
        """All events from the first, each checked against the chain."""
        chain = FIRST_CHAIN
        for position, row in enumerate(self._rows(), start=1):
            seq, kind, body, linked = row
            chain = _link(chain, position, kind, body)
            if seq != position or linked != chain:
                raise self._changed(
                    f"the ledger's row {seq} does not follow from the rows before it"
                )
            try:
                yield decode_event(kind.encode(), body.encode())
            except BadRow as error:
                raise self._changed(f"the ledger's row {seq} holds no event: {error}") from error

    def _rows(self) -> Iterable[tuple[int, str, str, str]]:
        try:
            yield from self._database.execute(
                "SELECT seq, kind, body, chain FROM ledger ORDER BY seq"
            )
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _changed(self, thing: str) -> UserError:
        return UserError(
            thing,
            place=str(self._path),
            remedy="the file was changed or damaged: `python -m verify audit` says where; restore "
            "it, or delete the run",
        )

    def _unusable(self, error: Exception) -> UserError:
        code = error.sqlite_errorcode if isinstance(error, sqlite3.Error) else sqlite3.SQLITE_OK
        return (NotNow if code & _PRIMARY in _PASSING else UserError)(
            f"the ledger cannot be used: {error}",
            place=str(self._path),
            remedy="free disk space or mend the permissions, then start again",
        )


def _link(chain: str, seq: int, kind: str, body: str) -> str:
    return hash_parts(bytes.fromhex(chain), seq, kind, body).hex()
