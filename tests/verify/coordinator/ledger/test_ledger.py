"""The ledger: what goes in comes out, whole, in order, and nothing else does."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from tests.verify.coordinator.filled import Filled, key
from verify.coordinator.ledger.ledger import Ledger
from verify.coordinator.machine.events import (
    BY_OPERATOR,
    BanLifted,
    CoordinatorStarted,
    InviteRevoked,
    KeyBanned,
    QuarantineEnded,
    WorkerQuarantined,
)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "state.db")
    yield ledger
    ledger.close()


def eventful() -> Filled:
    """A history with every kind of event."""
    run = Filled()
    run.register("x")
    run.register("y")
    run.publish(0)
    run.work("x"), run.work("y", "rejected")
    run.lease("y")
    run.now += 40.0
    run.advance()
    run.work("x", "filtered")
    run.work("x")
    run.advance()
    run.record(KeyBanned(run.now, key("y"), "edited tokens", BY_OPERATOR))
    run.record(BanLifted(run.now, key("y"), "an appeal", BY_OPERATOR))
    run.record(QuarantineEnded(run.now, key("y")))
    run.record(WorkerQuarantined(run.now, key("x"), "format: no rows"))
    run.record(InviteRevoked(run.now, key("invite"), "published", BY_OPERATOR))
    return run


def rewrite(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(statement)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE ledger SET body = replace(body, 'true', 'false') WHERE kind = 'SubmissionJudged'",
        "DELETE FROM ledger WHERE seq = 3",
        "UPDATE ledger SET kind = 'Nothing' WHERE seq = 2",
        "INSERT INTO ledger SELECT max(seq) + 1, kind, body, chain FROM ledger",
    ],
)
def test_a_ledger_that_was_changed_is_refused(ledger: Ledger, tmp_path: Path, statement: str):
    ledger.append(eventful().events)
    rewrite(tmp_path / "state.db", statement)

    with pytest.raises(UserError, match="does not follow from the rows before it"):
        list(ledger.events())


def test_what_cannot_be_stored_changes_nothing(ledger: Ledger, tmp_path: Path):
    ledger.append([CoordinatorStarted(1.0)])
    rewrite(
        tmp_path / "state.db",
        "CREATE TRIGGER full BEFORE INSERT ON ledger WHEN NEW.seq = 3 "
        "BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END",
    )

    with pytest.raises(UserError, match=r"state\.db: the ledger cannot be used.*disk is full"):
        ledger.append([CoordinatorStarted(2.0), CoordinatorStarted(3.0)])

    assert [event.at for event in ledger.events()] == [1.0]
    rewrite(tmp_path / "state.db", "DROP TRIGGER full")
    ledger.append([CoordinatorStarted(2.0)])
    assert [event.at for event in ledger.events()] == [1.0, 2.0]
