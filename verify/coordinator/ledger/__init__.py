"""The ledger of a run: an append-only table of events, chained by hashes.

A row holds one event: {seq, kind, body (JSON), chain}, where chain = BLAKE3(previous chain, seq,
kind, body), each length-prefixed. The rows of one call are one transaction, synced to disk before
the call returns. So an answer that was sent stays true after `kill -9` and a loss of power. The
table is in the run's `state.db`, beside the tables of others (`store`), or in the PostgreSQL
database that the spec names (`verify.ledger`, `postgres`). Both execute the same statements.

Here are the one writer's side and the readers'. Readers of a run, which may be live, see the rows
of one moment and need no lock.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from runspec.core.canonical import hash_parts
from runspec.core.entry_points import install_command
from runspec.core.errors import NotNow, UserError
from runspec.core.run_files import STATE_FILE
from runspec.core.schema import RunSpec
from verify.coordinator.ledger import store
from verify.coordinator.machine.events import (
    Event,
    RolledBack,
    SubmissionJudged,
    SubmissionSetAside,
)
from verify.coordinator.machine.state import Policy
from verify.coordinator.machine.transitions import replay

FIRST_CHAIN = bytes(32).hex()
_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}
E = TypeVar("E", bound=Event)
_SQLITE_REMEDY = (
    "the file is damaged or no run's database: restore it from a copy; if a -wal file is beside it "
    "and you may not write the folder, copy both to a folder of yours"
)
_POSTGRES_REMEDY = "check verify.ledger, PGPASSWORD and that the server runs"
_DROPPED = b'"outcome":"dropped"'
"""Part of the row of a verdict with a dropped group; other rows are not decoded."""


class BadRow(ValueError):
    """Raised for a row that holds no event."""


@cache
def _codec(kind: str) -> TypeAdapter[Event]:
    """Return the codec of a kind; made when first asked for: commands import this and read none."""
    return TypeAdapter(_KINDS[kind])


def decode_event(kind: bytes, body: bytes) -> Event:
    """Return the event of a row.

    Raises:
        BadRow: the kind is unknown, or the body does not fit it.
    """
    name = kind.decode("utf-8", "replace")
    if name not in _KINDS:
        raise BadRow(f"kind {kind[:40]!r}")
    try:
        return _codec(name).validate_json(body)
    except ValidationError as error:
        raise BadRow(f"not a {kind.decode()}: {error.errors()[0]['msg']}") from error


def store_of(run_dir: Path, spec: RunSpec) -> tuple[Callable[..., store.Store], str]:
    """Return what opens the store of a run's ledger, and its location for messages.

    Raises:
        UserError: the driver of PostgreSQL is not installed.
    """
    url = spec.verify.ledger
    if url is None:
        path = run_dir / STATE_FILE
        return partial(store.SqliteStore, path), str(path)
    try:
        postgres = importlib.import_module("verify.coordinator.ledger.postgres")
    except ImportError as error:
        raise UserError(
            f"PostgreSQL cannot be used: {error}",
            place="verify.ledger",
            remedy=install_command("postgres"),
        ) from error
    return partial(postgres.PostgresStore, url, spec.name), postgres.place(url, spec.name)


def open_ledger(run_dir: Path, spec: RunSpec) -> Ledger:
    """Open the ledger of a run, for its one writer.

    Raises:
        UserError: it cannot be read, or the driver of PostgreSQL is not installed.
    """
    make, place = store_of(run_dir, spec)
    with _usable(place):
        return Ledger(make())


class Ledger:
    """The ledger of a run. The coordinator is its only writer; other processes may read the store.

    Args:
        place: path of a run's state.db, or another store.

    Raises:
        UserError: from every method, if the store cannot be read or written (a full disk).
    """

    def __init__(self, place: Path | store.Store) -> None:
        with _usable(str(place) if isinstance(place, Path) else place.place):
            self._store = store.SqliteStore(place) if isinstance(place, Path) else place
            self._seq, self._chain = self._store.last() or (0, FIRST_CHAIN)
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
                store.must_follow(self._store.last(), self._seq + 1)
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
            body = _codec(kind).dump_json(event).decode()
            seq += 1
            chain = _link(chain, seq, kind, body)
            rows.append((seq, kind, body, chain))
        doubted, self.in_doubt = self.in_doubt, True  # until the store reports the result
        with _usable(self.place):
            try:
                self._store.append(rows)
            except store.StoreError as error:
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
            for position, row in enumerate(self._store.rows(), start=1):
                chain = _link(chain, position, row.kind, row.body)
                if row.seq != position or row.chain != chain.encode():
                    words = f"ledger row {row.seq} does not follow from the rows before it"
                    raise self._changed(words)
                try:
                    yield decode_event(row.kind, row.body)
                except BadRow as error:
                    raise self._changed(f"ledger row {row.seq} holds no event: {error}") from error

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
    except store.StoreError as error:
        raise (NotNow if error.passing else UserError)(
            f"the ledger cannot be used: {error}",
            place=place,
            remedy=f"{error.remedy}, then start again",
        ) from error


def _link(chain: str, seq: int, kind: str | bytes, body: str | bytes) -> str:
    return hash_parts(bytes.fromhex(chain), seq, kind, body).hex()


# -- Readers ---------------------------------------------------------------------------------------


class LedgerSnapshot:
    """The rows of a run at one moment, read in one transaction.

    Args:
        run_dir: the run directory.
        spec: the run's resolved spec.

    Raises:
        NoLedger: there is none.
        UserError: from every method, if the rows cannot be read as a ledger.
    """

    def __init__(self, run_dir: Path, spec: RunSpec) -> None:
        make, self._place = store_of(run_dir, spec)
        self._remedy = _SQLITE_REMEDY if spec.verify.ledger is None else _POSTGRES_REMEDY
        self._read = 0
        with self._readable():
            self._store = make(read_only=True)

    def close(self) -> None:
        self._store.close()

    def rows(self, kind: str | None = None, *, after: int = 0) -> Iterator[store.Row]:
        """Yield the rows of a kind (None: of all) later than the `after`-th, in order."""
        with self._readable():
            for row in self._store.rows(kind, after=after):
                yield row
                self._read += 1

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except store.StoreError as error:
            raise UserError(
                f"the ledger cannot be read: {error} (after {self._read} rows)",
                place=self._place,
                remedy=self._remedy,
            ) from error


def read_events(
    run_dir: Path, spec: RunSpec, kind: type[E], *, containing: bytes = b""
) -> Iterator[E]:
    """Yield the events of a kind from the ledger of a run, which may be live.

    Args:
        run_dir: the run directory.
        spec: the run's resolved spec.
        kind: class of the events; `Event` for all.
        containing: bytes that the row's body must contain.

    Raises:
        NoLedger: there is none.
        UserError: it cannot be read.
    """
    with closing(LedgerSnapshot(run_dir, spec)) as snapshot:
        for row in snapshot.rows(None if kind is Event else kind.__name__):
            if containing in row.body:
                try:
                    event = decode_event(row.kind, row.body)
                except BadRow as error:
                    raise damaged(run_dir, f"row {row.seq} cannot be read: {error}") from error
                if isinstance(event, kind):
                    yield event


def damaged(run_dir: Path, words: str) -> UserError:
    """Return the error of a ledger whose rows are not those of a run."""
    return UserError(
        f"the ledger is damaged: {words}",
        place=str(run_dir),
        remedy=f"`python -m verify audit {run_dir}` says what is wrong with it",
    )


@dataclass(frozen=True)
class Dropped:
    """Groups that a run lost without a worker's fault (`docs/coordinator.md`).

    Times are in seconds since the epoch.
    """

    set_aside: int = 0
    """Submissions that were set aside, because validators failed at them."""
    set_aside_at: float | None = None
    """When the last submission was set aside."""
    by_grader: int = 0
    """Groups at which the grader failed."""
    fault: str = ""
    """The grader's error at the newest of these groups."""
    by_grader_at: float | None = None
    """When the newest of these groups was judged."""


def read_dropped(run_dir: Path, spec: RunSpec) -> Dropped:
    """Return the losses that the ledger of a run records; the run may be live.

    Raises:
        UserError: it cannot be read.
    """
    try:
        set_aside = list(read_events(run_dir, spec, SubmissionSetAside))
        judged = list(read_events(run_dir, spec, SubmissionJudged, containing=_DROPPED))
    except store.NoLedger:  # no coordinator was started
        return Dropped()
    groups = [grade for event in judged for grade in event.groups]
    return Dropped(
        set_aside=len(set_aside),
        set_aside_at=set_aside[-1].at if set_aside else None,
        by_grader=sum(grade.outcome == "dropped" for grade in groups),
        fault=judged[-1].fault if judged else "",
        by_grader_at=judged[-1].at if judged else None,
    )


def closed_steps(run_dir: Path, spec: RunSpec) -> int:
    """Return the number of steps that the ledger of a stopped run has closed.

    Raises:
        UserError: the ledger cannot be read, or another process writes it.
    """
    with closing(open_ledger(run_dir, spec)) as ledger:
        ledger.own()
        return replay(Policy.of(spec), ledger.events()).next_close


def record_rollback(run_dir: Path, spec: RunSpec, version: int) -> None:
    """Record in the ledger of a stopped run that it goes on from an earlier version."""
    with closing(open_ledger(run_dir, spec)) as ledger:
        ledger.append([RolledBack(time.time(), version)])
