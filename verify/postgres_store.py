"""A ledger's rows in PostgreSQL: one table for all runs, one writer a run.

The coordinator holds an advisory lock of its run for as long as its connection lasts. Where the
connection breaks, nobody can say whether the last transaction was committed; so every append looks
at the newest row first, and a ledger that went on without this process is an error that ends it:
the next start folds what is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from verify.ledger_store import StoredRow, StoreError, another_writes, must_follow

_CONNECT_TIMEOUT_S = 10
# A server that hears nothing of a dead coordinator's machine gives its lock up within a minute.
_OPTIONS = (
    "-c statement_timeout=10s -c synchronous_commit=on "
    "-c tcp_keepalives_idle=30 -c tcp_keepalives_interval=10 -c tcp_keepalives_count=3"
)
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
_BATCH = 1000
"""Rows fetched at once."""


def connect(url: str) -> psycopg.Connection[Any]:
    """A connection whose every statement has a deadline."""
    return psycopg.connect(
        url,
        autocommit=True,
        connect_timeout=_CONNECT_TIMEOUT_S,
        options=_OPTIONS,
    )


class PostgresStore:
    """The writer's.

    Args:
        url: `postgresql://HOST/DATABASE`; the password comes from PGPASSWORD or a pgpass file.
        run: the run's name.

    Raises:
        StoreError: from every method; no server, or another coordinator writes this run's ledger.
    """

    def __init__(self, url: str, run: str) -> None:
        self._url, self._run = url, run
        self._connection = self._open()

    @property
    def place(self) -> str:
        return place(self._url, self._run)

    def close(self) -> None:
        self._connection.close()

    def last(self) -> StoredRow | None:
        try:
            row: StoredRow | None = self._connection.execute(_LAST, (self._run,)).fetchone()
        except psycopg.Error as error:
            raise store_error(error) from error
        return row

    def append(self, rows: Sequence[StoredRow]) -> None:
        if not rows:
            return
        if self._connection.closed:
            self._connection = self._open()
        try:
            with self._connection.transaction(), self._connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
                newest = cursor.execute(_LAST, (self._run,)).fetchone()
                must_follow(newest, rows[0])
                cursor.executemany(
                    "INSERT INTO ledger (run, seq, kind, body, chain) VALUES (%s, %s, %s, %s, %s)",
                    [(self._run, *row) for row in rows],
                )
        except psycopg.Error as error:
            raise store_error(error) from error

    def rows(self) -> Iterator[StoredRow]:
        try:
            with self._connection.transaction(), self._connection.cursor("ledger") as cursor:
                cursor.itersize = _BATCH
                yield from cursor.execute(_ALL, (self._run,))
        except psycopg.Error as error:
            raise store_error(error) from error

    def _open(self) -> psycopg.Connection[Any]:
        try:
            connection = connect(self._url)
        except psycopg.Error as error:
            raise store_error(error) from error
        try:
            mine = connection.execute(
                "SELECT pg_try_advisory_lock(hashtextextended(%s, 0))",
                (f"runspec ledger {self._run}",),
            ).fetchone()
            if mine is None or not mine[0]:
                raise another_writes()
            connection.execute(_CREATE)
        except (psycopg.Error, StoreError) as error:
            connection.close()
            raise (store_error(error) if isinstance(error, psycopg.Error) else error) from error
        return connection


def place(url: str, run: str) -> str:
    """A ledger's place for people, without what a URL may hold besides."""
    parts = conninfo_to_dict(url)
    return f"postgresql://{parts.get('host', '')}/{parts.get('dbname', '')}, run {run}"


def store_error(error: psycopg.Error) -> StoreError:
    """What went wrong; a server that is away, or has no room, may come back."""
    passing = isinstance(error, psycopg.OperationalError)
    return StoreError(
        str(error).strip() or type(error).__name__,
        passing=passing,
        remedy="see that the PostgreSQL server answers, has room, and knows this user",
    )
