"""The rows of a ledger in PostgreSQL as they stand at one moment."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg

from runspec.core.errors import UserError
from verify.audit.ledger_rows import NoLedger, Row
from verify.postgres_connection import EXCHANGE_S, connect, fetched, within
from verify.postgres_store import place

_ROWS = (
    "SELECT seq, convert_to(kind, 'UTF8'), convert_to(body, 'UTF8'), convert_to(chain, 'UTF8') "
    "FROM ledger WHERE run = %s AND kind = coalesce(%s, kind) ORDER BY seq"
)


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

    def rows(self, kind: str | None = None) -> Iterator[Row]:
        try:
            for seq, *texts in fetched(self._connection, _ROWS, (self._run, kind), EXCHANGE_S):
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
