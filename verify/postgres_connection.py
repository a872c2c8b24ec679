"""Connections to a PostgreSQL server; every wait has a deadline.

libpq bounds the way to one address, but neither the look-up of a name nor all addresses together,
and the server's own timeouts end with the server. So whoever connects is a thread of its own, and
an exchange that takes too long is cut off at the socket.
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
"""Until a connection can be used, the look-up of the server's name included."""
EXCHANGE_S = 30.0
"""Deadline of one transaction. It is long, because a transaction that is cut off may have been
committed, and then the coordinator has to start again."""
_CONNECT_ADDRESS_S = 4
"""Deadline of one of a name's addresses, so that there is time for another."""
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
        make: returns it, or raises why there is none.
    """

    def __init__(self, make: Callable[[], Connection]) -> None:
        self._make = make
        self._made: Future[Connection] = Future()
        # No thread of a pool's: those are joined when the process ends.
        threading.Thread(target=self._run, name="connecting", daemon=True).start()

    @property
    def over(self) -> bool:
        return self._made.done()

    def result(self) -> Connection:
        """The connection, once it is over; or raises what `make` raised."""
        return self._made.result(0.0)

    def wait(self, url: str, deadline_s: float) -> Connection:
        """The connection, or raises what `make` raised.

        Raises:
            psycopg.OperationalError: it took too long; a late one is closed.
        """
        try:
            return self._made.result(deadline_s)
        except TimeoutError:
            self.forget()
            words = f"no connection to {server(url)} within {deadline_s:g} s"
            raise psycopg.OperationalError(words) from None

    def forget(self) -> None:
        """Nobody wants it any more."""
        self._made.add_done_callback(_close)

    def _run(self) -> None:
        try:
            connection = self._make()
        except Exception as error:  # noqa: BLE001  # raised to whoever asks for the result
            self._made.set_exception(error)
        else:
            self._made.set_result(connection)


def connect(url: str, deadline_s: float = CONNECT_S) -> Connection:
    """A connection whose every statement has a deadline.

    Raises:
        psycopg.Error: no server, it refuses, or it takes longer than `deadline_s`.
    """
    return Connecting(lambda: connect_unbounded(url)).wait(url, deadline_s)


def connect_unbounded(url: str) -> Connection:
    """The same, but the look-up of a name takes as long as the resolver lets it."""
    return psycopg.connect(
        url,
        autocommit=True,
        connect_timeout=_CONNECT_ADDRESS_S,
        options=_OPTIONS,
        client_encoding="UTF8",  # the database's own encoding may lack characters
    )


@contextmanager
def within(deadline_s: float, connection: Connection) -> Iterator[None]:
    """Around an exchange with the server: one that takes longer ends in a `psycopg.Error`, and the
    connection with it."""
    try:  # a duplicate: the number of a descriptor that was closed may be another's by then
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
    """The rows of a query, fetched in batches within a transaction.

    Args:
        connection: in a transaction.
        statement: the query.
        values: of its parameters.
        exchange_s: deadline of each batch.

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
    """Where a URL leads, for people."""
    parts = conninfo_to_dict(url)
    return f"{parts.get('host', 'the local server')}:{parts.get('port', 5432)}"


def _cut(line: socket.socket) -> None:
    with suppress(OSError):  # it has gone meanwhile
        line.shutdown(socket.SHUT_RDWR)


def _close(made: Future[Connection]) -> None:
    if made.exception() is None:
        made.result().close()
