"""The ledger's rows in PostgreSQL: one table for all runs, one writer for each run.

The coordinator holds an advisory lock of its run for as long as its connection lasts. If the
connection breaks, nobody knows whether the last transaction was committed. So every append reads
the newest row first. If the ledger went on without this process, the append fails and the process
ends; the next start reads what is there.

A broken connection is made again in a thread, because the caller's event loop serves others. An
append without a connection starts the thread and fails at once with an error that may pass.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psycopg
from psycopg.conninfo import conninfo_to_dict

from runspec.core.errors import UserError
from verify.coordinator.ledger.postgres_connection import (
    CONNECT_S,
    EXCHANGE_S,
    Connecting,
    Connection,
    connect,
    connect_unbounded,
    fetched,
    server,
    within,
)
from verify.coordinator.ledger.store import (
    NoLedger,
    Row,
    StoredRow,
    StoreError,
    another_writes,
    must_follow,
)

_AGAIN_S = 1.0
"""Seconds between two attempts to connect."""
_CREATE = """
CREATE TABLE IF NOT EXISTS ledger (
    run TEXT NOT NULL,
    seq BIGINT NOT NULL,
    kind TEXT NOT NULL,
    body TEXT NOT NULL,
    chain TEXT NOT NULL,
    PRIMARY KEY (run, seq)
)
"""
_LAST = "SELECT seq, kind, body, chain FROM ledger WHERE run = %s ORDER BY seq DESC LIMIT 1"
_ALL = "SELECT seq, kind, body, chain FROM ledger WHERE run = %s ORDER BY seq"
_CLEAR = "DELETE FROM ledger WHERE run = %s"
_REMEDY = "check that the PostgreSQL server answers, has room, and knows this user"


class PostgresStore:
    """Store of the process that writes the ledger.

    Args:
        url: `postgresql://HOST/DATABASE`; the password comes from PGPASSWORD or a pgpass file.
        run: the run's name.
        connect_s: deadline of the first connection.
        exchange_s: deadline of a transaction; after it the connection counts as broken.

    Raises:
        StoreError: from every method; no server, or another coordinator writes this run's ledger.
    """

    def __init__(
        self,
        url: str,
        run: str,
        *,
        connect_s: float = CONNECT_S,
        exchange_s: float = EXCHANGE_S,
    ) -> None:
        self._url, self._run, self._exchange_s = url, run, exchange_s
        self._connecting: Connecting | None = None
        self._not_before, self._failed = 0.0, ""
        """When a connection may be tried again, and why the last attempt failed."""
        with _store_errors():
            self._connection = Connecting(self._open).wait(url, connect_s)

    @property
    def place(self) -> str:
        return place(self._url, self._run)

    def close(self) -> None:
        # The server notices the end of a connection late, and the next writer needs the lock.
        with suppress(psycopg.Error), within(self._exchange_s, self._connection):
            self._connection.execute("SELECT pg_advisory_unlock_all()")
        self._connection.close()
        if self._connecting is not None:
            self._connecting.forget()

    def last(self) -> StoredRow | None:
        if self._connection.closed:
            self._reconnect()
        with _store_errors(), within(self._exchange_s, self._connection):
            row: StoredRow | None = self._connection.execute(_LAST, (self._run,)).fetchone()
        return row

    def own(self) -> None:
        """Do nothing: the store has had the lock since it was opened."""

    def append(self, rows: Sequence[StoredRow]) -> None:
        if not rows:
            return
        if self._connection.closed:
            self._reconnect()
        try:
            with (
                within(self._exchange_s, self._connection),
                self._connection.transaction(),
                self._connection.cursor() as cursor,
            ):
                cursor.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
                newest = cursor.execute(_LAST, (self._run,)).fetchone()
                must_follow(newest, rows[0])
                cursor.executemany(
                    "INSERT INTO ledger (run, seq, kind, body, chain) VALUES (%s, %s, %s, %s, %s)",
                    [(self._run, *row) for row in rows],
                )
        except psycopg.Error as error:
            # The connection may have broken after the server had committed.
            in_doubt = self._connection.closed
            if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
                self._connection.close()  # another server may be the primary by now
            raise store_error(error, in_doubt=in_doubt) from error

    def clear(self) -> None:
        with _store_errors(), within(self._exchange_s, self._connection):
            self._connection.execute(_CLEAR, (self._run,))

    def rows(self) -> Iterator[StoredRow]:
        with _store_errors(), self._connection.transaction():
            yield from fetched(self._connection, _ALL, (self._run,), self._exchange_s)

    def _reconnect(self) -> None:
        """Use the connection that is being made, once it is made.

        Raises:
            StoreError: it is not made yet, or could not be made; the next call tries again.
        """
        now = time.monotonic()
        if self._connecting is None:
            if now < self._not_before:
                raise self._not_there(f"is tried again in a moment: {self._failed}")
            self._not_before = now + _AGAIN_S
            self._connecting = Connecting(self._open)
        if not self._connecting.made.done():
            raise self._not_there("is being made")
        done, self._connecting = self._connecting, None
        try:
            self._connection = done.made.result()
        except psycopg.Error as error:
            self._failed = str(error).strip()
            raise store_error(error) from error
        except StoreError as error:
            # The lock may be this process's own, of a connection whose end the server has not
            # noticed. If another process has it, its rows will show that.
            self._failed = error.words
            raise StoreError(error.words, passing=True, remedy=error.remedy) from error

    def _not_there(self, what: str) -> StoreError:
        return StoreError(
            f"the connection to {server(self._url)} {what}", passing=True, remedy=_REMEDY
        )

    def _open(self) -> Connection:
        connection = connect_unbounded(self._url)
        try:
            _require_unicode(connection)
            with within(EXCHANGE_S, connection):
                mine = connection.execute(
                    "SELECT pg_try_advisory_lock(hashtextextended(%s, 0))",
                    (f"runspec ledger {self._run}",),
                ).fetchone()
                if mine is None or not mine[0]:
                    raise another_writes()
                connection.execute(_CREATE)
        except BaseException:
            connection.close()
            raise
        return connection


def _require_unicode(connection: Connection) -> None:
    encoding = connection.info.parameter_status("server_encoding")
    if encoding not in ("UTF8", "SQL_ASCII"):  # SQL_ASCII stores bytes unchanged
        raise StoreError(
            f"the database is encoded as {encoding}, which lacks some characters",
            passing=False,
            remedy="make a database WITH ENCODING 'UTF8' TEMPLATE template0",
        )


def place(url: str, run: str) -> str:
    """Return a ledger's location for messages, without the user or options of its URL."""
    parts = conninfo_to_dict(url)
    return f"postgresql://{parts.get('host', '')}/{parts.get('dbname', '')}, run {run}"


def store_error(error: psycopg.Error, *, in_doubt: bool = False) -> StoreError:
    """Return the error of a store; the error of a server that is away or full may pass."""
    # A standby is read-only. It may be promoted, or its name may be given to another server.
    passing = isinstance(error, psycopg.OperationalError | psycopg.errors.ReadOnlySqlTransaction)
    return StoreError(
        str(error).strip() or type(error).__name__,
        passing=passing,
        remedy=_REMEDY,
        in_doubt=in_doubt,
    )


@contextmanager
def _store_errors() -> Iterator[None]:
    """Raise what the driver raises in the block as a `StoreError`."""
    try:
        yield
    except psycopg.Error as error:
        raise store_error(error) from error


_ROWS = (
    "SELECT seq, convert_to(kind, 'UTF8'), convert_to(body, 'UTF8'), convert_to(chain, 'UTF8') "
    "FROM ledger WHERE run = %s AND kind = coalesce(%s, kind) AND seq > %s ORDER BY seq"
)


class PostgresSnapshot:
    """One read transaction; it needs no lock.

    Args:
        url: of the database.
        run: the run's name.

    Raises:
        UserError: from every method, when the database cannot be read as a ledger.
    """

    def __init__(self, url: str, run: str) -> None:
        self._place, self._run, self._read = place(url, run), run, 0
        try:
            self._connection = connect(url)
            with within(EXCHANGE_S, self._connection):
                self._connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        except psycopg.Error as error:
            raise self._unreadable(error) from error

    def close(self) -> None:
        self._connection.close()

    def rows(self, kind: str | None = None, *, after: int = 0) -> Iterator[Row]:
        wanted = (self._run, kind, after)
        try:
            for seq, *texts in fetched(self._connection, _ROWS, wanted, EXCHANGE_S):
                yield Row(seq, *map(bytes, texts))
                self._read += 1
        except psycopg.errors.UndefinedTable as error:
            raise NoLedger(self._place) from error
        except psycopg.Error as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: psycopg.Error) -> UserError:
        return UserError(
            f"the ledger cannot be read: {str(error).strip()} (after {self._read} rows)",
            place=self._place,
            remedy="check verify.ledger, PGPASSWORD and that the server runs",
        )
