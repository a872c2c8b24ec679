"""The ledger: an append-only table of events, chained by hashes.

One row an event: {seq, kind, body (JSON), chain}, where chain = BLAKE3(previous chain, seq, kind,
body), each length-prefixed. What is appended in one call is one transaction, synced to disk before
the call returns, so that an answer once given holds over `kill -9` and a loss of power. The table
lives in the run's `state.db` beside the tables of others, or in the PostgreSQL database that the
spec names (`verify.ledger`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from pydantic import TypeAdapter, ValidationError

from runspec.core.distribution import install_command
from runspec.core.errors import NotNow, UserError
from runspec.core.hashing import hash_parts
from runspec.core.run_files import STATE_FILE
from runspec.core.spec.schema import RunSpec
from verify.coordinator.machine.events import Event
from verify.ledger_store import LedgerStore, SqliteStore, StoredRow, StoreError, must_follow

FIRST_CHAIN = bytes(32).hex()
_CODECS: dict[str, TypeAdapter[Event]] = {
    kind.__name__: TypeAdapter(kind) for kind in Event.__subclasses__()
}


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


def open_ledger(run_dir: Path, spec: RunSpec) -> Ledger:
    """The ledger of a run, for its one writer.

    Raises:
        UserError: it cannot be read, or the driver of PostgreSQL is not installed.
    """
    url = spec.verify.ledger
    if url is None:
        return Ledger(run_dir / STATE_FILE)
    postgres = import_postgres_store()
    try:
        return Ledger(postgres.PostgresStore(url, spec.name))
    except StoreError as error:
        raise _unusable(postgres.place(url, spec.name), error) from error


def import_postgres_store() -> ModuleType:
    """`verify.postgres_store`, whose driver few need.

    Raises:
        UserError: the driver is not installed.
    """
    try:
        return importlib.import_module("verify.postgres_store")
    except ImportError as error:
        raise UserError(
            f"PostgreSQL cannot be used: {error}",
            place="verify.ledger",
            remedy=install_command("postgres"),
        ) from error


class Ledger:
    """Single writer: the coordinator process. Others may read.

    Args:
        place: path of a run's state.db, or another store.

    Raises:
        UserError: from every method, when the store cannot be read or written (a full disk).
    """

    def __init__(self, place: Path | LedgerStore) -> None:
        try:
            self._store = SqliteStore(place) if isinstance(place, Path) else place
            last = self._store.last()
        except StoreError as error:
            name = str(place) if isinstance(place, Path) else place.place
            raise _unusable(name, error) from error
        self._seq: int = last[0] if last else 0
        self._chain: str = last[3] if last else FIRST_CHAIN
        self.in_doubt = False
        """Whether there may be rows that `append` could not vouch for; see `settle`."""

    @property
    def head(self) -> tuple[int, str]:
        """How many rows there are, and the chain of the last."""
        return self._seq, self._chain

    @property
    def place(self) -> str:
        """Where it lies, for people."""
        return self._store.place

    def close(self) -> None:
        self._store.close()

    def own(self) -> None:
        """Sees to it that no other process writes from now on.

        Raises:
            UserError: another does.
        """
        try:
            self._store.own()
        except StoreError as error:
            raise _unusable(self.place, error) from error

    def settle(self) -> None:
        """Ends a doubt: no row came after the newest that this process knows of.

        Raises:
            NotNow: that cannot be seen just now.
            UserError: one did; the next start reads it.
        """
        if not self.in_doubt:
            return
        try:
            must_follow(self._store.last(), (self._seq + 1, "", "", ""))
        except StoreError as error:
            raise _unusable(self.place, error) from error
        self.in_doubt = False

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
        doubted, self.in_doubt = self.in_doubt, True  # until the store says what became of it
        try:
            self._store.append(rows)
        except StoreError as error:
            self.in_doubt = doubted or error.in_doubt or not error.passing
            raise _unusable(self.place, error) from error
        self._seq, self._chain, self.in_doubt = seq, chain, False

    def clear(self) -> None:
        """Removes every row, durably: the run starts anew.

        Raises:
            UserError: it cannot be written, or another process writes.
        """
        try:
            self._store.clear()
        except StoreError as error:
            raise _unusable(self.place, error) from error
        self._seq, self._chain = 0, FIRST_CHAIN

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

    def _rows(self) -> Iterator[StoredRow]:
        try:
            yield from self._store.rows()
        except StoreError as error:
            raise _unusable(self.place, error) from error

    def _changed(self, thing: str) -> UserError:
        return UserError(
            thing,
            place=self.place,
            remedy="the file was changed or damaged: `python -m verify audit` says where; restore "
            "it, or delete the run",
        )


def _unusable(place: str, error: StoreError) -> UserError:
    return (NotNow if error.passing else UserError)(
        f"the ledger cannot be used: {error}",
        place=place,
        remedy=f"{error.remedy}, then start again",
    )


def _link(chain: str, seq: int, kind: str, body: str) -> str:
    return hash_parts(bytes.fromhex(chain), seq, kind, body).hex()
