"""The ledger: an append-only table of events, chained by hashes.

A row holds one event: {seq, kind, body (JSON), chain}, where chain = BLAKE3(previous chain, seq,
kind, body), each length-prefixed. The rows of one call are one transaction, synced to disk before
the call returns. So an answer that was sent stays true after `kill -9` and a loss of power. The
table is in the run's `state.db`, beside the tables of others, or in the PostgreSQL database that
the spec names (`verify.ledger`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from pydantic import TypeAdapter, ValidationError

from runspec.core.distribution import install_command
from runspec.core.errors import NotNow, UserError
from runspec.core.hashing import hash_parts
from runspec.core.run_files import STATE_FILE
from runspec.core.spec.schema import RunSpec
from verify.coordinator.ledger.store import (
    LedgerStore,
    SqliteStore,
    StoreError,
    must_follow,
)
from verify.coordinator.machine.events import Event

FIRST_CHAIN = bytes(32).hex()
_CODECS: dict[str, TypeAdapter[Event]] = {
    kind.__name__: TypeAdapter(kind) for kind in Event.__subclasses__()
}


class BadRow(ValueError):
    """Raised for a row that holds no event."""


def decode_event(kind: bytes, body: bytes) -> Event:
    """Return the event of a row.

    Raises:
        BadRow: the kind is unknown, or the body does not fit it.
    """
    codec = _CODECS.get(kind.decode("utf-8", "replace"))
    if codec is None:
        raise BadRow(f"kind {kind[:40]!r}")
    try:
        return codec.validate_json(body)
    except ValidationError as error:
        raise BadRow(f"not a {kind.decode()}: {error.errors()[0]['msg']}") from error


def open_ledger(run_dir: Path, spec: RunSpec) -> Ledger:
    """Open the ledger of a run, for its one writer.

    Raises:
        UserError: it cannot be read, or the driver of PostgreSQL is not installed.
    """
    url = spec.verify.ledger
    if url is None:
        return Ledger(run_dir / STATE_FILE)
    postgres = import_postgres_store()
    with _usable(postgres.place(url, spec.name)):
        return Ledger(postgres.PostgresStore(url, spec.name))


def import_postgres_store() -> ModuleType:
    """Import `verify.coordinator.ledger.postgres_store`, which needs the driver of PostgreSQL.

    Raises:
        UserError: the driver is not installed.
    """
    try:
        return importlib.import_module("verify.coordinator.ledger.postgres_store")
    except ImportError as error:
        raise UserError(
            f"PostgreSQL cannot be used: {error}",
            place="verify.ledger",
            remedy=install_command("postgres"),
        ) from error


class Ledger:
    """The ledger of a run. The coordinator is its only writer; other processes may read the store.

    Args:
        place: path of a run's state.db, or another store.

    Raises:
        UserError: from every method, if the store cannot be read or written (a full disk).
    """

    def __init__(self, place: Path | LedgerStore) -> None:
        with _usable(str(place) if isinstance(place, Path) else place.place):
            self._store = SqliteStore(place) if isinstance(place, Path) else place
            last = self._store.last()
        self._seq: int = last[0] if last else 0
        self._chain: str = last[3] if last else FIRST_CHAIN
        self.in_doubt = False
        """Whether the store may have rows of an `append` that failed; see `settle`."""

    @property
    def head(self) -> tuple[int, str]:
        """Number of rows, and the chain of the last."""
        return self._seq, self._chain

    @property
    def place(self) -> str:
        """Location of the ledger, for messages."""
        return self._store.place

    def close(self) -> None:
        self._store.close()

    def own(self) -> None:
        """Take the lock that keeps other processes from writing.

        Raises:
            UserError: another process has it.
        """
        with _usable(self.place):
            self._store.own()

    def settle(self) -> None:
        """Make sure that a failed `append` left no row.

        Raises:
            NotNow: the store cannot be read now.
            UserError: it left one; the next start reads it.
        """
        if self.in_doubt:
            with _usable(self.place):
                must_follow(self._store.last(), (self._seq + 1, "", "", ""))
            self.in_doubt = False

    def append(self, events: Sequence[Event]) -> None:
        """Store events, all or none, durably.

        Raises:
            NotNow: the disk is full or the database locked; a later try may succeed.
            UserError: the store cannot be written.
        """
        rows, seq, chain = [], self._seq, self._chain
        for event in events:
            kind = type(event).__name__
            body = _CODECS[kind].dump_json(event).decode()
            seq += 1
            chain = _link(chain, seq, kind, body)
            rows.append((seq, kind, body, chain))
        doubted, self.in_doubt = self.in_doubt, True  # until the store reports the result
        with _usable(self.place):
            try:
                self._store.append(rows)
            except StoreError as error:
                self.in_doubt = doubted or error.in_doubt or not error.passing
                raise
        self._seq, self._chain, self.in_doubt = seq, chain, False

    def clear(self) -> None:
        """Remove every row, durably: the run starts anew.

        Raises:
            UserError: the store cannot be written, or another process writes.
        """
        with _usable(self.place):
            self._store.clear()
        self._seq, self._chain = 0, FIRST_CHAIN

    def events(self) -> Iterator[Event]:
        """Yield all events from the first, each checked against the chain."""
        chain = FIRST_CHAIN
        with _usable(self.place):
            for position, (seq, kind, body, linked) in enumerate(self._store.rows(), start=1):
                chain = _link(chain, position, kind, body)
                if seq != position or linked != chain:
                    raise self._changed(f"ledger row {seq} does not follow from the rows before it")
                try:
                    yield decode_event(kind.encode(), body.encode())
                except BadRow as error:
                    raise self._changed(f"ledger row {seq} holds no event: {error}") from error

    def _changed(self, thing: str) -> UserError:
        return UserError(
            thing,
            place=self.place,
            remedy="it was changed or damaged: `python -m verify audit` says where; restore it, or "
            "delete the run",
        )


@contextmanager
def _usable(place: str) -> Iterator[None]:
    """Raise a `StoreError` of the block as the error that the coordinator handles."""
    try:
        yield
    except StoreError as error:
        raise (NotNow if error.passing else UserError)(
            f"the ledger cannot be used: {error}",
            place=place,
            remedy=f"{error.remedy}, then start again",
        ) from error


def _link(chain: str, seq: int, kind: str, body: str) -> str:
    return hash_parts(bytes.fromhex(chain), seq, kind, body).hex()
