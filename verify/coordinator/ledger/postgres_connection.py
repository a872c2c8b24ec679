"""Connections to a PostgreSQL server; every wait has a deadline.

libpq limits the time to connect to one address, but not to look up a name or to try all addresses.
The server's own timeouts do not work if the server is down. So each connection is made in a thread
of its own, and the socket is shut down if an exchange takes too long.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from typing import Any, LiteralString, TypeAlias

import psycopg
from psycopg.conninfo import conninfo_to_dict

CONNECT_S = 10.0
"""Seconds until a connection can be used, with the look-up of the server's name."""
EXCHANGE_S = 30.0
"""Deadline of a transaction in seconds. It is long, because a transaction that is cut off may have
been committed, and then the coordinator must start again."""
_CONNECT_ADDRESS_S = 4
"""Deadline for one of a name's addresses in seconds, so that time is left for another."""
_BATCH = 1000
"""Rows fetched at once."""
# The server releases the lock within a minute if the coordinator's machine is dead.
_OPTIONS = (
    "-c statement_timeout=10s -c synchronous_commit=on "
    "-c tcp_keepalives_idle=30 -c tcp_keepalives_interval=10 -c tcp_keepalives_count=3"
)

Connection: TypeAlias = psycopg.Connection[Any]


class Connecting:
    """A connection that a thread is making.

    Args:
        make: returns the connection, or raises an error.
    """

    def __init__(self, make: Callable[[], Connection]) -> None:
        self._make = make
        self.made: Future[Connection] = Future()
        """Future of the connection; `result` raises what `make` raised."""
        # Not a thread of a pool, because a process joins those when it ends.
        threading.Thread(target=self._run, name="connecting", daemon=True).start()

    def wait(self, url: str, deadline_s: float) -> Connection:
        """Wait for the connection and return it, or raise what `make` raised.

        Raises:
            psycopg.OperationalError: it took too long; a late connection is closed.
        """
        try:
            return self.made.result(deadline_s)
        except TimeoutError:
            self.forget()
            words = f"no connection to {server(url)} within {deadline_s:g} s"
            raise psycopg.OperationalError(words) from None

    def forget(self) -> None:
        """Close the connection when it is made."""
        self.made.add_done_callback(_close)

    def _run(self) -> None:
        try:
            connection = self._make()
        except Exception as error:  # noqa: BLE001  # `made` raises it
            self.made.set_exception(error)
        else:
            self.made.set_result(connection)


def connect(url: str, deadline_s: float = CONNECT_S) -> Connection:
    """Return a connection with a deadline for each statement.

    Raises:
        psycopg.Error: the server is down, refuses, or takes longer than `deadline_s`.
    """
    return Connecting(lambda: connect_unbounded(url)).wait(url, deadline_s)


def connect_unbounded(url: str) -> Connection:
    """Return the same, but without a deadline for the look-up of a name."""
    return psycopg.connect(
        url,
        autocommit=True,
        connect_timeout=_CONNECT_ADDRESS_S,
        options=_OPTIONS,
        client_encoding="UTF8",  # the database's own encoding may lack characters
    )


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
        timer = threading.Timer(deadline_s, _cut, [line])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def fetched(
    connection: Connection, statement: LiteralString, values: Sequence[Any], exchange_s: float
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a query, fetched in batches within a transaction.

    Args:
        connection: a connection in a transaction.
        statement: the query.
        values: values of its parameters.
        exchange_s: deadline of each batch in seconds.

    Raises:
        psycopg.Error: the connection broke, or a batch took too long.
    """
    with connection.cursor("ledger") as cursor:
        with within(exchange_s, connection):
            cursor.execute(statement, values)
        while True:
            with within(exchange_s, connection):
                batch = cursor.fetchmany(_BATCH)
            if not batch:
                return
            yield from batch


def server(url: str) -> str:
    """Return host and port of a URL, for messages."""
    parts = conninfo_to_dict(url)
    return f"{parts.get('host', 'the local server')}:{parts.get('port', 5432)}"


def _cut(line: socket.socket) -> None:
    with suppress(OSError):  # the connection has ended meanwhile
        line.shutdown(socket.SHUT_RDWR)


def _close(made: Future[Connection]) -> None:
    if made.exception() is None:
        made.result().close()
