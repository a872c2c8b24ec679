"""The ledger's rows in PostgreSQL: one table for all runs, one writer for each run.

The coordinator holds an advisory lock of its run for as long as its connection lasts. If the
connection breaks, nobody knows whether the last transaction was committed. So every append reads
the newest row first. If the ledger went on without this process, the append fails and the process
ends; the next start reads what is there.

A broken connection is made again in a thread, because the caller's event loop serves others. An
append without a connection starts the thread and fails at once with an error that may pass.

Every wait has a deadline. libpq limits the time to connect to one address, but not to look up a
name or to try all addresses. The server's own timeouts do not work if the server is down. So each
connection is made in a thread of its own, and the socket is shut down if an exchange takes too
long.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from typing import Any, ClassVar, TypeAlias

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus

from verify.coordinator.ledger.store import CREATE, NoLedger, Store, StoreError, another_writes

CONNECT_S = 10.0
"""Seconds until a connection can be used, with the look-up of the server's name."""
EXCHANGE_S = 30.0
"""Deadline of a transaction in seconds. It is long, because a transaction that is cut off may have
been committed, and then the coordinator must start again."""
_CONNECT_ADDRESS_S = 4
"""Deadline for one of a name's addresses in seconds, so that time is left for another."""
_AGAIN_S = 1.0
"""Seconds between two attempts to connect."""
_BATCH = 1000
"""Rows fetched at once."""
# The server releases the lock within a minute if the coordinator's machine is dead.
_OPTIONS = (
    "-c statement_timeout=10s -c synchronous_commit=on "
    "-c tcp_keepalives_idle=30 -c tcp_keepalives_interval=10 -c tcp_keepalives_count=3"
)
_REMEDY = "check that the PostgreSQL server answers, has room, and knows this user"

Connection: TypeAlias = psycopg.Connection[Any]


class PostgresStore(Store):
    """Rows of a run in the table that all runs of a database share.

    Args:
        url: `postgresql://HOST/DATABASE`; the password comes from PGPASSWORD or a pgpass file.
        run: the run's name.
        read_only: whether to read the rows as they are now, in one transaction, without the lock.
        connect_s: deadline of the first connection.
        exchange_s: deadline of a transaction; after it the connection counts as broken.

    Raises:
        StoreError: from every method; no server, or another coordinator writes this run's ledger.
    """

    dialect: ClassVar = {
        "key": "run TEXT NOT NULL, seq BIGINT NOT NULL",
        "end": ", PRIMARY KEY (run, seq))",
        "mine": "run = ?",
        "run": "run, ",
        "run_value": "?, ",
        "text": "convert_to(",
        "as_bytes": ", 'UTF8')",
    }

    def __init__(
        self,
        url: str,
        run: str,
        *,
        read_only: bool = False,
        connect_s: float = CONNECT_S,
        exchange_s: float = EXCHANGE_S,
    ) -> None:
        super().__init__(place(url, run), (run,))
        self._url, self._read_only, self._exchange_s = url, read_only, exchange_s
        self._connecting: Future[Connection] | None = None
        self._not_before, self._failed = 0.0, ""
        """When a connection may be tried again, and why the last attempt failed."""
        made = connecting(self._open)
        try:
            self._connection = made.result(connect_s)
        except TimeoutError:
            made.add_done_callback(_close)  # a late connection
            words = f"no connection to {server(url)} within {connect_s:g} s"
            raise StoreError(words, passing=True, remedy=_REMEDY) from None
        except psycopg.Error as error:
            raise store_error(error) from error

    def close(self) -> None:
        # The server notices the end of a connection late, and the next writer needs the lock.
        with suppress(psycopg.Error), within(self._exchange_s, self._connection):
            self._connection.execute("SELECT pg_advisory_unlock_all()")
        self._connection.close()
        if self._connecting is not None:
            self._connecting.add_done_callback(_close)

    def own(self) -> None:
        """Do nothing: the store has had the lock since it was opened."""

    def _sql(self, statement: str) -> str:
        return super()._sql(statement).replace("?", "%s")

    def _ask(self, statement: str, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        if self._connection.closed:
            self._reconnect()
        try:
            yield from self._fetched(statement.encode(), values)
        except psycopg.errors.UndefinedTable as error:
            raise NoLedger(self.place) from error
        except psycopg.Error as error:
            raise store_error(error) from error

    def _fetched(self, statement: bytes, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query, fetched in batches; each batch has the deadline."""
        connection, exchange_s = self._connection, self._exchange_s
        alone = connection.info.transaction_status is TransactionStatus.IDLE
        if alone:  # rows are fetched in a transaction
            with within(exchange_s, connection):
                connection.execute("BEGIN")
        try:
            with connection.cursor("ledger") as cursor:
                with within(exchange_s, connection):
                    cursor.execute(statement, values)
                batch = [()]
                while batch:
                    with within(exchange_s, connection):
                        batch = cursor.fetchmany(_BATCH)
                    yield from batch
        finally:
            if alone and not connection.closed:
                with within(exchange_s, connection):
                    connection.execute("ROLLBACK")

    @contextmanager
    def _writing(self) -> Iterator[psycopg.Cursor[Any]]:
        if self._connection.closed:
            self._reconnect()
        try:
            with (
                within(self._exchange_s, self._connection),
                self._connection.transaction(),
                self._connection.cursor() as cursor,
            ):
                cursor.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
                yield cursor
        except psycopg.Error as error:
            # The connection may have broken after the server had committed.
            in_doubt = self._connection.closed
            if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
                self._connection.close()  # another server may be the primary by now
            raise store_error(error, in_doubt=in_doubt) from error

    def _reconnect(self) -> None:
        """Use the connection that is being made, once it is made.

        Raises:
            StoreError: it is not made yet, or could not be made; the next call tries again. Or it
                had the one moment that is read.
        """
        now = time.monotonic()
        if self._read_only:
            raise self._not_there("has ended")
        if self._connecting is None:
            if now < self._not_before:
                raise self._not_there(f"is tried again in a moment: {self._failed}")
            self._not_before = now + _AGAIN_S
            self._connecting = connecting(self._open)
        if not self._connecting.done():
            raise self._not_there("is being made")
        done, self._connecting = self._connecting, None
        try:
            self._connection = done.result()
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
        connection: Connection = psycopg.connect(
            self._url,
            autocommit=True,
            connect_timeout=_CONNECT_ADDRESS_S,
            options=_OPTIONS,
            client_encoding="UTF8",  # the database's own encoding may lack characters
        )
        try:
            with within(EXCHANGE_S, connection):
                if self._read_only:
                    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                else:
                    self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: Connection) -> None:
        """Take the writer's lock, and make the table if there is none."""
        encoding = connection.info.parameter_status("server_encoding")
        if encoding not in ("UTF8", "SQL_ASCII"):  # SQL_ASCII stores bytes unchanged
            raise StoreError(
                f"the database is encoded as {encoding}, which lacks some characters",
                passing=False,
                remedy="make a database WITH ENCODING 'UTF8' TEMPLATE template0",
            )
        mine = connection.execute(
            "SELECT pg_try_advisory_lock(hashtextextended(%s, 0))",
            (f"runspec ledger {self._mine[0]}",),
        ).fetchone()
        if mine is None or not mine[0]:
            raise another_writes()
        connection.execute(self._sql(CREATE).encode())


def place(url: str, run: str) -> str:
    """Return a ledger's location for messages, without the user or options of its URL."""
    parts = conninfo_to_dict(url)
    return f"postgresql://{parts.get('host', '')}/{parts.get('dbname', '')}, run {run}"


def server(url: str) -> str:
    """Return host and port of a URL, for messages."""
    parts = conninfo_to_dict(url)
    return f"{parts.get('host', 'the local server')}:{parts.get('port', 5432)}"


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


# -- Connections -----------------------------------------------------------------------------------


def connecting(make: Callable[[], Connection]) -> Future[Connection]:
    """Return a connection that a thread is making; its `result` raises what `make` raises."""
    made: Future[Connection] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:  # noqa: BLE001  # `made` raises it
            made.set_exception(error)

    # Not a thread of a pool, because a process joins those when it ends.
    threading.Thread(target=run, name="connecting", daemon=True).start()
    return made


@contextmanager
def within(deadline_s: float, connection: Connection) -> Iterator[None]:
    """End an exchange with the server by a `psycopg.Error` if it takes longer than a deadline.

    The connection ends too.
    """
    try:  # a duplicate, because the number of a closed descriptor may be reused
        duplicate = os.dup(connection.fileno())
    except OSError as error:  # no files left
        raise psycopg.OperationalError(str(error)) from error
    with closing(socket.socket(fileno=duplicate)) as line:

        def cut() -> None:
            with suppress(OSError):  # the connection has ended meanwhile
                line.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(deadline_s, cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def _close(made: Future[Connection]) -> None:
    if made.exception() is None:
        made.result().close()
