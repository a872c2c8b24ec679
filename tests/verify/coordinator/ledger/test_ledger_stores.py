"""The same promises from every store that a ledger may lie in."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from runspec.core.errors import NotNow, UserError
from runspec.core.hashing import digest_bytes
from runspec.core.spec.resolved import load_resolved
from runspec.core.spec.schema import RunSpec
from tests.verify.audit.tampering import work
from tests.verify.coordinator.deployment import DEADLINE_S, Site, tiny_spec, verdict
from tests.verify.coordinator.filled import POLICY
from tests.verify.coordinator.ledger.test_ledger import eventful
from tests.verify.postgres import Server, postgres_server
from tests.waiting import eventually
from verify.audit.replay import audit
from verify.coordinator.ledger.ledger import Ledger, decode_event, open_ledger
from verify.coordinator.ledger.store import LedgerStore, SqliteStore, StoreError
from verify.coordinator.machine.events import (
    CoordinatorStarted,
    Event,
)
from verify.coordinator.machine.transitions import replay
from verify.formats.lease import open_lease

Open = Callable[[], LedgerStore]


@pytest.fixture(scope="module")
def postgres() -> Iterator[Server]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: Server) -> str:
    return postgres.url


@pytest.fixture(params=["sqlite", "postgres"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the store of one run, again and again."""
    if request.param == "sqlite":
        return lambda: SqliteStore(tmp_path / "state.db")
    url = request.getfixturevalue("postgres_url")
    from verify.coordinator.ledger.postgres_store import PostgresStore

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


def test_a_ledger_that_is_cleared_begins_again(opened: Open):
    with closing(Ledger(opened())) as ledger:
        ledger.append([CoordinatorStarted(1.0)])
        ledger.clear()
        ledger.append([CoordinatorStarted(2.0)])

    with closing(Ledger(opened())) as reopened:
        assert list(reopened.events()) == [CoordinatorStarted(2.0)]


def test_all_or_nothing_of_one_call_is_kept(opened: Open):
    with closing(opened()) as store:
        store.append([(1, "A", "{}", "a")])
        with pytest.raises(StoreError):
            store.append([(2, "B", "{}", "b"), (2, "C", "{}", "c")])

        assert store.last() == (1, "A", "{}", "a")
        store.append([(2, "D", "{}", "d"), (3, "E", "{}", "e")])
        assert [row[1] for row in store.rows()] == ["A", "D", "E"]


def test_a_second_writer_is_refused_until_the_first_is_gone_and_readers_are_not(opened: Open):
    first = opened()
    first.append([(1, "A", "{}", "a")])
    with (
        pytest.raises(StoreError, match="another process writes this run's ledger") as refused,
        closing(opened()) as second,  # PostgreSQL's is refused here
    ):
        assert second.last() == (1, "A", "{}", "a")
        second.append([(2, "B", "{}", "b")])
    assert not refused.value.passing
    first.append([(2, "C", "{}", "c")])
    first.close()
    with closing(opened()) as third:
        third.append([(3, "D", "{}", "d")])
        assert [row[1] for row in third.rows()] == ["A", "C", "D"]


# -- PostgreSQL alone ------------------------------------------------------------------------------


@pytest.fixture
def encoded(postgres: Server) -> Callable[[str], str]:
    """Makes a database of an encoding; its address."""
    psycopg = pytest.importorskip("psycopg")

    def made(encoding: str) -> str:
        name = encoding.lower()
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            connection.execute(
                f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0 "
                "LC_COLLATE 'C' LC_CTYPE 'C'"
            )
        return postgres.url.replace("/postgres?", f"/{name}?")

    return made


def test_a_server_that_only_reads_is_waited_for(encoded: Callable[[str], str]):
    """As a standby does until it is promoted, which a name may lead to meanwhile."""
    psycopg = pytest.importorskip("psycopg")
    from verify.coordinator.ledger.postgres_store import PostgresStore

    url = encoded("UTF8")

    def reads_only(on: str) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET default_transaction_read_only = off")
            connection.execute(f"ALTER DATABASE utf8 SET default_transaction_read_only = {on}")

    store = PostgresStore(url, "tiny")
    with closing(Ledger(store)) as ledger:
        ledger.append([CoordinatorStarted(1.0)])
        store._connection.execute("SET default_transaction_read_only = on")
        with pytest.raises(NotNow, match="read-only"):
            ledger.append([CoordinatorStarted(2.0)])
        assert not ledger.in_doubt and store._connection.closed  # another may write by now
        reads_only("on")
        with pytest.raises(NotNow, match="read-only"):
            for _ in range(100):
                with while_it_is_made():
                    ledger.append([CoordinatorStarted(2.0)])
        reads_only("off")
        append_in_time(ledger, CoordinatorStarted(2.0))


@contextmanager
def while_it_is_made() -> Iterator[None]:
    """An append that finds the connection being made; then a moment."""
    try:
        yield
    except NotNow as error:
        if "is being made" not in error.thing:
            raise
        time.sleep(0.05)


def test_a_lost_connection_is_opened_again_and_a_ledger_that_went_on_is_refused(postgres_url: str):
    from verify.coordinator.ledger.postgres_connection import connect
    from verify.coordinator.ledger.postgres_store import PostgresStore

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
        append_in_time(ledger, CoordinatorStarted(2.0))
        assert [event.at for event in ledger.events()] == [1.0, 2.0]

        cut()
        with pytest.raises(NotNow):
            ledger.append([CoordinatorStarted(3.0)])
        with closing(Ledger(PostgresStore(postgres_url, "cut"))) as other:
            other.append([CoordinatorStarted(9.0)])
        with pytest.raises(UserError, match="another process wrote") as raised:
            append_in_time(ledger, CoordinatorStarted(3.0))
        assert not isinstance(raised.value, NotNow)


def append_in_time(ledger: Ledger, *events: Event) -> None:
    in_time(lambda: ledger.append(events))


def in_time(act: Callable[[], None]) -> None:
    """As clients do: again until the connection is there again."""

    def done() -> bool:
        try:
            act()
        except NotNow:
            return False
        return True

    eventually(done, "a connection")


class Silent:
    """A server that takes connections and says nothing; `url` leads there."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.url = f"postgresql://me@{self.place}/runs?sslmode=disable&gssencmode=disable"

    def close(self) -> None:
        self._socket.close()


def test_a_server_that_says_nothing_is_waited_for_within_a_deadline_and_named():
    pytest.importorskip("psycopg")
    from verify.coordinator.ledger.postgres_store import PostgresStore

    with (
        closing(Silent()) as silent,
        pytest.raises(StoreError, match=f"no connection to {silent.place} within 0.2 s") as raised,
    ):
        PostgresStore(silent.url, "run", connect_s=0.2)
    assert raised.value.passing


def test_an_append_that_takes_too_long_is_cut_off_and_counts_as_lost(postgres_url: str):
    from verify.coordinator.ledger.postgres_connection import connect
    from verify.coordinator.ledger.postgres_store import PostgresStore

    with (
        closing(connect(postgres_url)) as other,
        closing(PostgresStore(postgres_url, "late", exchange_s=0.2)) as store,
    ):
        other.autocommit = False
        other.execute("LOCK TABLE ledger IN EXCLUSIVE MODE")
        with pytest.raises(StoreError) as raised:
            store.append([(1, "A", "{}", "a")])
        assert raised.value.passing and raised.value.in_doubt
        assert store._connection.closed
    assert read_ledger(postgres_url, "late") == []


def test_a_server_that_dies_in_a_transaction_has_all_or_nothing_of_it(postgres: Server):
    from verify.coordinator.ledger.postgres_connection import connect
    from verify.coordinator.ledger.postgres_store import PostgresStore

    with closing(Ledger(PostgresStore(postgres.url, "died"))) as ledger:
        ledger.append([CoordinatorStarted(1.0)])
        with closing(connect(postgres.url)) as other, ThreadPoolExecutor(1) as pool:
            # given a transaction that cannot get on
            other.autocommit = False
            other.execute("LOCK TABLE ledger IN EXCLUSIVE MODE")
            appending = pool.submit(ledger.append, [CoordinatorStarted(2.0)] * 2)
            with closing(connect(postgres.url)) as third:
                blocked = "SELECT count(*) FROM pg_locks WHERE NOT granted"
                eventually(
                    lambda: third.execute(blocked).fetchone() == (1,), "the append waits in it"
                )
            # when the server dies and comes again
            postgres.kill()
            with pytest.raises(NotNow, match="the ledger cannot be used"):
                appending.result(DEADLINE_S)
            away: list[NotNow] = []

            def refused() -> bool:
                with pytest.raises(NotNow) as raised:
                    ledger.append([CoordinatorStarted(2.0)] * 2)
                away.append(raised.value)
                return "failed" in raised.value.thing

            eventually(refused, "that it cannot be had")
            assert all("PostgreSQL server answers" in (each.remedy or "") for each in away)
            postgres.start()
        # then there is a doubt, which ends once it can be seen that nothing of it is there
        assert ledger.in_doubt
        in_time(ledger.settle)
        assert not ledger.in_doubt
        # and it can be tried again
        assert [event.at for event in read_ledger(postgres.url, "died")] == [1.0]
        append_in_time(ledger, *[CoordinatorStarted(2.0)] * 2)
        assert [event.at for event in ledger.events()] == [1.0, 2.0, 2.0]


def read_ledger(url: str, run: str) -> list[Any]:
    """As an auditor reads it, beside the writer."""
    from verify.coordinator.ledger.postgres_connection import connect

    with closing(connect(url)) as reader:
        rows = reader.execute(
            "SELECT kind, body FROM ledger WHERE run = %s ORDER BY seq", (run,)
        ).fetchall()
    return [decode_event(kind.encode(), body.encode()) for kind, body in rows]


@pytest.fixture
def site(postgres: Server, tmp_path: Path) -> Iterator[Site]:
    """A run of two steps whose ledger is in PostgreSQL, in a database of its own."""
    from verify.coordinator.ledger.postgres_connection import connect

    name = f"of_{digest_bytes(str(tmp_path).encode())[:16]}"
    with closing(connect(postgres.url)) as admin:
        admin.execute(f"CREATE DATABASE {name}")  # type: ignore[call-overload]
    values: dict[str, Any] = tiny_spec(steps=2).model_dump(mode="json", by_alias=True)
    values["verify"]["ledger"] = postgres.url.replace("/postgres?", f"/{name}?")
    site = Site(tmp_path, RunSpec.model_validate(values))
    site.publish(0)
    with site.origin():
        yield site


def test_a_second_coordinator_of_a_run_is_refused_and_the_first_goes_on(site: Site):
    with site.serving():
        worker, first = site.worker(), site.url
        with pytest.raises(UserError, match="another process writes this run's ledger") as refused:
            site.serving().__enter__()
        assert refused.value.place == f"{ledger_place(site)}"
        assert "end the other coordinator" in (refused.value.remedy or "")
        assert site.url == first
        work(site, worker)


def ledger_place(site: Site) -> str:
    from verify.coordinator.ledger.postgres_store import place

    spec = load_resolved(site.run_dir)
    assert spec.verify.ledger is not None
    return place(spec.verify.ledger, spec.name)


@pytest.mark.slow
def test_a_run_goes_on_when_its_server_was_started_again(
    postgres: Server, site: Site, caplog: pytest.LogCaptureFixture
):
    with site.serving(), caplog.at_level(logging.INFO, logger="verify"):
        worker = site.worker()
        work(site, worker, judged=False)
        # given a server that dies while a worker wants a lease
        postgres.kill()
        with ThreadPoolExecutor(1) as pool:
            leasing = pool.submit(work, site, worker, judged=False)
            eventually(lambda: "to be written: " in caplog.text, "the coordinator says so")
            assert f"waiting for {ledger_place(site)} to be written" in caplog.text
            # when it is there again, then the lease is granted, answered and judged
            postgres.start()
            leasing.result(DEADLINE_S)
        assert f"{ledger_place(site)} can be written again" in caplog.text
        validator = site.client(site.validator)
        for _ in range(2):
            item = validator.next_submission(DEADLINE_S)
            assert item is not None
            lease = open_lease(item.lease, coordinators=validator.roles().coordinator)
            validator.verdict(*verdict(item.submission, lease, site.validator))
        site.batch(0)
    # and nothing is lost, nothing there twice
    report = audit(site.run_dir, root_key=site.root.public_hex)
    assert (report.findings, report.steps_closed) == ([], 1)


def test_a_run_with_its_ledger_in_postgres_restarts_and_is_audited(site: Site):
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

    with closing(open_ledger(site.run_dir, load_resolved(site.run_dir))) as ledger:
        assert ledger.head == (report.rows, report.head)
        ledger._store._connection.execute(  # type: ignore[attr-defined]
            "UPDATE ledger SET body = replace(body, 'true', 'false') WHERE run = %s", ("tiny",)
        )
    findings = audit(site.run_dir, root_key=site.root.public_hex).findings
    assert "chain" in {finding.what for finding in findings}
