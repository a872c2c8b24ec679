"""The same promises from every store that a ledger may lie in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from runspec.common.errors import UserError
from tests.verify.audit.tampering import work
from tests.verify.coordinator.deployment import Site, tiny_spec
from tests.verify.coordinator.filled import POLICY, key
from tests.verify.postgres import postgres_server
from tests.verify.test_ledger import eventful
from verify.audit.replay import audit
from verify.coordinator.events import CoordinatorStarted, WorkerRegistered
from verify.coordinator.state import replay
from verify.ledger import Ledger, NotNow, open_ledger
from verify.ledger_store import LedgerStore, SqliteStore, StoreError

Open = Callable[[], LedgerStore]


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    with postgres_server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the store of one run, again and again."""
    if request.param == "sqlite":
        return lambda: SqliteStore(tmp_path / "state.db")
    url = request.getfixturevalue("postgres_url")
    from verify.postgres_store import PostgresStore

    return lambda: PostgresStore(url, tmp_path.name)


def test_what_goes_in_comes_out(opened: Open):
    run = eventful()
    with closing(Ledger(opened())) as ledger:
        for event in run.events:
            ledger.append([event])
        head = ledger.head

    with closing(Ledger(opened())) as reopened:
        events = list(reopened.events())

        assert events == run.events
        assert reopened.head == head
        assert replay(POLICY, events) == run.state


def test_all_or_nothing_of_one_call_is_kept(opened: Open):
    with closing(opened()) as store:
        store.append([(1, "A", "{}", "a")])
        with pytest.raises(StoreError):
            store.append([(2, "B", "{}", "b"), (2, "C", "{}", "c")])

        assert store.last() == (1, "A", "{}", "a")
        store.append([(2, "D", "{}", "d"), (3, "E", "{}", "e")])
        assert [row[1] for row in store.rows()] == ["A", "D", "E"]


def test_what_json_may_hold_comes_back(opened: Open):
    words = WorkerRegistered(1.5, key("x"), 'a\x00b\u2028"\\ä😀')
    with closing(Ledger(opened())) as ledger:
        ledger.append([words])
        assert list(ledger.events()) == [words]


# -- PostgreSQL alone ------------------------------------------------------------------------------


def test_one_process_at_a_time_writes_a_run(postgres_url: str):
    from verify.postgres_store import PostgresStore

    with closing(PostgresStore(postgres_url, "one")):
        with pytest.raises(StoreError, match="another process writes this run's ledger"):
            PostgresStore(postgres_url, "one")
        with closing(Ledger(PostgresStore(postgres_url, "two"))) as other:
            other.append([CoordinatorStarted(1.0)])
    with closing(PostgresStore(postgres_url, "one")) as store:
        assert store.last() is None


def test_a_lost_connection_is_opened_again_and_a_ledger_that_went_on_is_refused(postgres_url: str):
    from verify.postgres_store import PostgresStore, connect

    def cut() -> None:
        with closing(connect(postgres_url)) as other:
            other.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )

    with closing(Ledger(PostgresStore(postgres_url, "cut"))) as ledger:
        ledger.append([CoordinatorStarted(1.0)])
        cut()
        with pytest.raises(NotNow):
            ledger.append([CoordinatorStarted(2.0)])
        ledger.append([CoordinatorStarted(2.0)])
        assert [event.at for event in ledger.events()] == [1.0, 2.0]

        cut()
        with pytest.raises(NotNow):
            ledger.append([CoordinatorStarted(3.0)])
        with closing(Ledger(PostgresStore(postgres_url, "cut"))) as other:
            other.append([CoordinatorStarted(9.0)])
        with pytest.raises(UserError, match="another process wrote") as raised:
            ledger.append([CoordinatorStarted(3.0)])
        assert not isinstance(raised.value, NotNow)


def test_a_run_with_its_ledger_in_postgres_restarts_and_is_audited(
    postgres_url: str, tmp_path: Path
):
    spec = tiny_spec(steps=2)
    values: dict[str, Any] = spec.model_dump(mode="json", by_alias=True)
    values["verify"]["ledger"] = postgres_url
    spec = type(spec).model_validate(values)
    site = Site(tmp_path, spec)
    site.publish(0)
    with site.origin():
        for step in range(2):
            with site.serving():
                worker = site.worker()
                work(site, worker)
                work(site, worker)
                site.batch(step)
                site.publish(step + 1)
    assert not (site.run_dir / "state.db").exists()

    report = audit(site.run_dir, root_key=site.root.public_hex)
    assert report.findings == []
    assert report.steps_closed == 2

    with closing(open_ledger(site.run_dir, spec)) as ledger:
        assert ledger.head == (report.rows, report.head)
        ledger._store._connection.execute(  # type: ignore[attr-defined]
            "UPDATE ledger SET body = replace(body, 'true', 'false') WHERE run = %s", ("tiny",)
        )
    findings = audit(site.run_dir, root_key=site.root.public_hex).findings
    assert "chain" in {finding.what for finding in findings}


def test_a_server_that_is_not_there_is_named(tmp_path: Path):
    pytest.importorskip("psycopg")
    values = tiny_spec().model_dump(mode="json", by_alias=True)
    values["verify"]["ledger"] = f"postgresql://me@/runs?host={tmp_path}"

    with pytest.raises(NotNow, match=r"postgresql://.*/runs, run tiny: the ledger cannot be used"):
        open_ledger(tmp_path, type(tiny_spec()).model_validate(values))
