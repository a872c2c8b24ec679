"""What a run's status says of submissions that were set aside, wherever the ledger lies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.spec.resolved import dump_resolved
from runspec.core.spec.schema import RunSpec
from runspec.local.conditions import Condition, condition, conditions
from runspec.local.snapshot import look_at
from tests.verify.coordinator.deployment import tiny_spec
from tests.verify.coordinator.filled import digest, key
from tests.verify.postgres import postgres_server
from verify.coordinator.ledger.ledger import open_ledger
from verify.coordinator.ledger.snapshot import Dropped, read_dropped
from verify.coordinator.machine.events import (
    CoordinatorStarted,
    Event,
    FailedAttempt,
    SubmissionSetAside,
    WorkerRegistered,
)

ATTEMPTS = (FailedAttempt(1.0, "ab" * 32, "the validator's process ended"),)


def with_ledger(url: str) -> RunSpec:
    values = tiny_spec().model_dump(mode="json", by_alias=True)
    values["verify"]["ledger"] = url
    return RunSpec.model_validate(values)


@pytest.fixture(params=["sqlite", "postgres"])
def spec(request: pytest.FixtureRequest) -> Iterator[RunSpec]:
    if request.param == "sqlite":
        yield tiny_spec()
    else:
        with postgres_server() as server:
            yield with_ledger(server.url)


def set_aside(at: float) -> Event:
    return SubmissionSetAside(at, digest("lease", str(at)), digest("submission", str(at)), ATTEMPTS)


def told(run_dir: Path, spec: RunSpec) -> Condition:
    write_atomic(run_dir / "spec.json", dump_resolved(spec))
    return condition(conditions(look_at(run_dir)), "SetAside")


def test_they_are_counted_beside_a_coordinator_at_work(tmp_path: Path, spec: RunSpec) -> None:
    # before a coordinator has written there is nothing to tell
    assert read_dropped(tmp_path, spec) == Dropped()
    with closing(open_ledger(tmp_path, spec)) as ledger:
        ledger.append([CoordinatorStarted(1.0), WorkerRegistered(2.0, key("x"), "near")])
        assert read_dropped(tmp_path, spec) == Dropped()
        assert told(tmp_path, spec).status == "False"

        ledger.append([set_aside(3.0), set_aside(5.0), CoordinatorStarted(9.0)])

        assert read_dropped(tmp_path, spec) == Dropped(2, 5.0)
        found = told(tmp_path, spec)
    assert (found.status, found.since) == ("True", 5.0)
    assert "failed at 2 submissions" in found.message


def test_another_runs_in_the_same_database_are_not_counted(tmp_path: Path) -> None:
    with postgres_server() as server:
        spec = with_ledger(server.url)
        other = spec.model_copy(update={"name": "other"})
        with closing(open_ledger(tmp_path, other)) as ledger:
            ledger.append([set_aside(3.0)])

        assert read_dropped(tmp_path, spec) == Dropped()
        assert read_dropped(tmp_path, other) == Dropped(1, 3.0)


def test_a_ledger_that_cannot_be_read_is_named_and_the_rest_is_told(tmp_path: Path) -> None:
    pytest.importorskip("psycopg", reason="no driver: the extra postgres")
    spec = with_ledger(f"postgresql://me@/runs?host={tmp_path}")
    with pytest.raises(UserError):
        read_dropped(tmp_path, spec)

    found = told(tmp_path, spec)

    assert (found.status, found.reason) == ("Unknown", "LedgerNotRead")
    assert f"postgresql://{tmp_path}/runs, run tiny: the ledger cannot be read" in found.message
