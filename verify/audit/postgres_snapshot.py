"""The rows of a ledger in PostgreSQL as they stand at one moment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg

from runspec.core.errors import UserError
from verify.audit.snapshot import NoLedger, Row
from verify.postgres_connection import EXCHANGE_S, connect, within
from verify.postgres_store import place

_ROLLBACKS = "SELECT seq FROM ledger WHERE run = %s AND kind = 'RolledBack' ORDER BY seq"
_LAST = "SELECT body FROM ledger WHERE run = %s ORDER BY seq DESC LIMIT 1"
_OF_KIND = "SELECT count(*), max(seq) FROM ledger WHERE run = %s AND kind = %s"
_BODY = "SELECT convert_to(body, 'UTF8') FROM ledger WHERE run = %s AND seq = %s"
_ALL = (
    "SELECT seq, convert_to(kind, 'UTF8'), convert_to(body, 'UTF8'), convert_to(chain, 'UTF8') "
    "FROM ledger WHERE run = %s ORDER BY seq"
)
_BATCH = 1000
"""Rows fetched at once."""


class PostgresSnapshot:
    """One read transaction; the coordinator's lock does not keep it out.

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

    def rollbacks(self) -> list[int]:
        return [seq for (seq,) in self._select(_ROLLBACKS)]

    def last_written(self) -> float:
        for (body,) in self._select(_LAST):
            try:
                return float(json.loads(body)["at"])
            except (ValueError, KeyError, TypeError):
                return 0.0
        return 0.0

    def of_kind(self, kind: str) -> tuple[int, bytes | None]:
        ((count, newest),) = self._select(_OF_KIND, kind)
        return count, None if newest is None else bytes(self._select(_BODY, newest)[0][0])

    def rows(self) -> Iterator[Row]:
        try:
            with self._connection.cursor("audit") as cursor:
                with within(EXCHANGE_S, self._connection):
                    cursor.execute(_ALL, (self._run,))
                while True:
                    with within(EXCHANGE_S, self._connection):
                        batch = cursor.fetchmany(_BATCH)
                    if not batch:
                        return
                    for seq, kind, body, chain in batch:
                        yield Row(seq, bytes(kind), bytes(body), bytes(chain))
                        self._read += 1
        except psycopg.Error as error:
            raise self._unreadable(error) from error

    def _select(self, statement: str, *of: Any) -> list[Any]:
        try:
            with within(EXCHANGE_S, self._connection):
                return self._connection.execute(statement, (self._run, *of)).fetchall()
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
