"""The coordinator's parts without HTTP, over a real ledger and a clock of the test's choice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runspec.core.keys import SigningKey
from runspec.core.roles import Roles
from runspec.core.spec.schema import Backlog as BacklogLimits
from runspec.core.spec.schema import RunSpec
from tests.verify.coordinator.deployment import RUN
from tests.verify.coordinator.filled import Filled
from verify.coordinator.edge.backlog import Backlog
from verify.coordinator.edge.limits import Limiter, NewKeys
from verify.coordinator.journal import Journal
from verify.coordinator.ledger.store import SqliteStore, StoredRow, StoreError
from verify.coordinator.services.leasing import Admission, Leasing

NOBODY = frozenset[str]()


@dataclass(frozen=True)
class Edge:
    """What limits the services of a run."""

    new_keys: NewKeys
    backlog: Backlog


def roles_of(*, coordinator: Iterable[str] = (), validator: Iterable[str] = ()) -> Roles:
    """Roles without an end."""
    return Roles(RUN, 0.0, 1e12, NOBODY, frozenset(coordinator), frozenset(validator))


def journal_of(run: Filled, folder: Path, clock: Callable[[], float] | None = None) -> Journal:
    """A journal that holds the events of a pure run; its clock is the run's, if none is given."""
    journal = Journal(folder, run.state.policy, clock=clock or (lambda: run.now))
    for event in run.events:
        journal.record(event)
    return journal


def edge_of(
    journal: Journal,
    spec: RunSpec,
    *,
    limits: BacklogLimits | None = None,
    free_bytes: Callable[[], int] = lambda: 1 << 50,
) -> Edge:
    """The limits of a run, on a disk of this size."""
    limits = limits or spec.verify.backlog
    backlog = Backlog(journal, limits, free_bytes=lambda _: free_bytes())
    return Edge(NewKeys(Limiter()), backlog)


def leasing_of(
    journal: Journal, spec: RunSpec, key: SigningKey, roles: Roles, edge: Edge
) -> Leasing:
    """The workers' service of a run without workers of its own."""
    admission = Admission(spec, roles, (), edge.new_keys)
    return Leasing(journal, spec, key, roles, admission, edge.backlog)


async def chunks(body: bytes) -> AsyncIterator[bytes]:
    """A body as the server gives it."""
    yield body


class Killed(BaseException):
    """The process, in the middle of an append."""


class Breaking(SqliteStore):
    """A store whose next append fails as `how` says: full, broken, killed, and `unwritten`."""

    how = ""

    def append(self, rows: Sequence[StoredRow]) -> None:
        how, self.how = self.how, ""
        if how == "full":
            raise StoreError("the disk is full", passing=True)
        if "unwritten" not in how:
            super().append(rows)
        if "broken" in how:
            raise StoreError("the connection broke", passing=True, in_doubt=True)
        if "killed" in how:
            raise Killed
