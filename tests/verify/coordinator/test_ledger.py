"""The same promises from every store that a ledger may lie in, and PostgreSQL when it fails."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from runspec.core.errors import NotNow, UserError
from runspec.core.files import write_atomic
from runspec.core.schema import RunSpec
from runspec.core.schema.load import dump_resolved, load_resolved
from runspec.local.run_view import Condition, look_at
from tests.verify.audit.tampering import work
from tests.verify.coordinator.deployment import DEADLINE_S, Site, tiny_spec
from tests.verify.coordinator.filled import Filled, digest, key, policy
from tests.waiting import eventually
from verify.audit import audit
from verify.coordinator.ledger import Dropped, Ledger, open_ledger, read_dropped, read_events
from verify.coordinator.ledger.store import StoreError
from verify.coordinator.machine import events
from verify.coordinator.machine.events import CoordinatorStarted, Event
from verify.coordinator.machine.transitions import replay

SERVER_S = 1200.0
NO_GOLD = "p7: KeyError: 'gold'"


# -- A PostgreSQL server of the tests' own, where one is installed ---------------------------------


@pytest.fixture(scope="module")
def store() -> Iterator[Any]:
    """The store's module, with deadlines that a slow server meets; skips where no driver is."""
    pytest.importorskip("psycopg", reason="no driver: the extra postgres")
    from verify.coordinator.ledger import postgres

    defaults = {"read_only": False, "connect_s": SERVER_S, "exchange_s": SERVER_S}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(postgres.PostgresStore.__init__, "__kwdefaults__", defaults)
        patch.setattr(postgres, "EXCHANGE_S", SERVER_S)
        patch.setattr(postgres, "_CONNECT_ADDRESS_S", int(SERVER_S))
        patch.setattr(postgres, "_OPTIONS", postgres._OPTIONS.replace("timeout=10s", "timeout=0"))
        yield postgres


class Server:
    """At work; `url` names its database.

    Args:
        folder: with its data, its log and its socket.
        control: `pg_ctl` and whose data it is to control.
    """

    def __init__(self, folder: str, control: list[str]) -> None:
        self.url = f"postgresql://postgres@/postgres?host={folder}"
        self._folder, self._control = folder, control

    def start(self) -> None:
        options = f"-k {self._folder} -h ''"
        _run([*self._control, "-l", f"{self._folder}/log", "-o", options, "start"], self._folder)

    def kill(self) -> None:
        """Ends it as a loss of power would: no transaction that is open is finished."""
        _run([*self._control, "-m", "immediate", "stop"], self._folder)


@pytest.fixture(scope="module")
def postgres(store: Any) -> Iterator[Server]:
    """A server on a socket in a folder that goes with it; skips where none is installed."""
    tools = Path(shutil.which("pg_ctl") or "/").resolve().parent
    if not (tools / "initdb").exists():
        pytest.skip("no PostgreSQL server is installed")
    with tempfile.TemporaryDirectory(prefix="pg") as folder:
        data = Path(folder) / "data"
        user = _own(Path(folder))
        run = [*user, str(tools / "initdb"), "-D", str(data), "-A", "trust", "-U", "postgres", "-N"]
        _run(run, folder)
        control = [*user, str(tools / "pg_ctl"), "-D", str(data), "-w"]
        server = Server(folder, control)
        server.start()
        try:
            yield server
        finally:
            server.kill()


def _own(folder: Path) -> list[str]:
    """The server refuses to be root: then another owns the folder, and its commands run as that."""
    if os.geteuid() != 0:
        return []
    try:
        other = pwd.getpwnam("postgres")
    except KeyError:
        pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
    os.chown(folder, other.pw_uid, other.pw_gid)
    return ["setpriv", f"--reuid={other.pw_uid}", f"--regid={other.pw_gid}", "--clear-groups"]


def _run(command: list[str], folder: str) -> None:
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=SERVER_S
    )
    assert done.returncode == 0, done.stderr.decode()


def connected(url: str) -> Any:
    """A connection of the driver, which may not be installed."""
    import psycopg

    return psycopg.connect(url, autocommit=True)


@pytest.fixture
def database(postgres: Server, tmp_path: Path) -> str:
    """A new database on the server; its address."""
    name = f"of_{digest(str(tmp_path))[:16]}"
    with closing(connected(postgres.url)) as admin:
        encoding = "ENCODING 'UTF8' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
        admin.execute(f"CREATE DATABASE {name} {encoding}")
    return postgres.url.replace("/postgres?", f"/{name}?")


def with_ledger(url: str, name: str = "tiny") -> RunSpec:
    return tiny_spec(steps=2, verify={"ledger": url}, name=name)


@pytest.fixture(params=["sqlite", "postgres"])
def spec(request: pytest.FixtureRequest) -> RunSpec:
    """A run whose ledger lies in each kind of store."""
    if request.param == "sqlite":
        return tiny_spec()
    return with_ledger(request.getfixturevalue("database"))


def eventful() -> Filled:
    """A history with nearly every kind of event."""
    run = Filled(policy(groups=6))
    run.register("x"), run.register("y"), run.publish(0)
    run.work("x"), run.work("y", "rejected")
    record = run.lease("y")
    assert record is not None
    run.record(events.SubmissionDeferred(run.now, record.digest, digest("s"), run.now + 35.0))
    run.now += 40.0
    run.advance()
    run.set_aside(run.submitted("x"))
    run.judge(run.submitted("x"), ["usable", "dropped"], fault=NO_GOLD)
    while not run.advance():
        run.work("x")
    for event in (
        events.KeyBanned(run.now, key("y"), "edited tokens", events.BY_OPERATOR),
        events.BanLifted(run.now, key("y"), "an appeal", events.BY_OPERATOR),
        events.QuarantineEnded(run.now, key("y")),
        events.WorkerQuarantined(run.now, key("x"), "format: no rows"),
        events.InviteRevoked(run.now, key("invite"), "published", events.BY_OPERATOR),
    ):
        run.record(event)
    return run


def told(run_dir: Path, spec: RunSpec) -> Condition:
    """What the status of a run says of submissions that were set aside."""
    write_atomic(run_dir / "spec.json", dump_resolved(spec))
    return look_at(run_dir).conditions["SetAside"]


# -- Every store ---------------------------------------------------------------------------------


def test_what_goes_in_comes_out_to_its_writer_and_to_readers_beside_it(tmp_path, spec):
    run = eventful()
    # before a coordinator has written there is nothing to tell
    assert read_dropped(tmp_path, spec) == Dropped()
    with closing(open_ledger(tmp_path, spec)) as ledger:
        ledger.append(run.events[:1])
        assert told(tmp_path, spec).status == "False"
        for event in run.events[1:]:
            ledger.append([event])
        status = told(tmp_path, spec)
        lost = Dropped(1, run.now, by_grader=1, fault=NO_GOLD, by_grader_at=run.now)
        assert read_dropped(tmp_path, spec) == lost
        assert list(read_events(tmp_path, spec, Event)) == run.events
        head = ledger.head
    assert (status.status, status.since) == ("True", run.now)
    assert "failed at 1 submissions" in status.message
    with closing(open_ledger(tmp_path, spec)) as reopened:
        found = list(reopened.events())
        assert (found, reopened.head) == (run.events, head)
        assert replay(run.state.policy, found) == run.state
        # and a ledger that is cleared begins again
        reopened.clear()
        reopened.append([CoordinatorStarted(2.0)])
    assert list(read_events(tmp_path, spec, Event)) == [CoordinatorStarted(2.0)]


def test_all_or_nothing_of_one_call_is_kept(tmp_path: Path, spec: RunSpec) -> None:
    with closing(open_ledger(tmp_path, spec)._store) as store:
        store.append([(1, "A", "{}", "a")])
        with pytest.raises(StoreError):
            store.append([(2, "B", "{}", "b"), (2, "C", "{}", "c")])
        assert store.last() == (1, "a")
        store.append([(2, "D", "{}", "d"), (3, "E", "{}", "e")])
        assert [row.kind for row in store.rows()] == [b"A", b"D", b"E"]


def test_a_second_writer_is_refused_until_the_first_is_gone_and_readers_are_not(tmp_path, spec):
    with closing(open_ledger(tmp_path, spec)) as first:
        first.append([CoordinatorStarted(1.0)])
        with (
            pytest.raises(UserError, match="another process writes this run's ledger") as refused,
            closing(open_ledger(tmp_path, spec)) as second,  # PostgreSQL's is refused here
        ):
            assert [event.at for event in second.events()] == [1.0]
            second.append([CoordinatorStarted(9.0)])
        assert not isinstance(refused.value, NotNow)
        first.append([CoordinatorStarted(2.0)])
    with closing(open_ledger(tmp_path, spec)) as third:
        third.append([CoordinatorStarted(3.0)])
        assert [event.at for event in third.events()] == [1.0, 2.0, 3.0]


def test_a_ledger_that_was_changed_is_refused(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "state.db")) as ledger:
        ledger.append(eventful().events)
        with closing(sqlite3.connect(tmp_path / "state.db")) as other, other:
            other.execute("UPDATE ledger SET kind = 'Nothing' WHERE seq = 2")
        with pytest.raises(UserError, match="does not follow from the rows before it"):
            list(ledger.events())


# -- PostgreSQL alone ----------------------------------------------------------------------------


def in_time(act: Callable[[], None]) -> None:
    """As clients do: again until the connection is there again."""

    def done() -> bool:
        with suppress(NotNow):
            act()
            return True
        return False

    eventually(done, "a connection")


def ledger_at(tmp_path: Path, url: str) -> Ledger:
    return open_ledger(tmp_path, with_ledger(url))


def refused_as(ledger: Ledger, words: str) -> NotNow:
    """The refusal of an append that says so, once the connection has been made."""
    found: list[NotNow] = []

    def refused() -> bool:
        with pytest.raises(NotNow) as raised:
            ledger.append([CoordinatorStarted(2.0)] * 2)
        found.append(raised.value)
        return words in raised.value.thing

    eventually(refused, f"a refusal with {words!r}")
    return found[-1]


def test_a_ledger_that_cannot_be_read_is_named_and_the_rest_is_told(tmp_path, store) -> None:
    spec = with_ledger(f"postgresql://me@/runs?host={tmp_path}")
    with pytest.raises(UserError):
        read_dropped(tmp_path, spec)
    found = told(tmp_path, spec)
    assert (found.status, found.reason) == ("Unknown", "LedgerNotRead")
    assert f"postgresql://{tmp_path}/runs, run tiny: the ledger cannot be read" in found.message


def test_a_lost_connection_is_opened_again_and_a_ledger_that_went_on_is_refused(tmp_path, database):
    def cut() -> None:
        with closing(connected(database)) as other:
            other.execute(
                "SELECT pg_terminate_backend(pid, 600000) FROM pg_stat_activity WHERE datname = "
                "current_database() AND pid <> pg_backend_pid()"
            )

    with closing(ledger_at(tmp_path, database)) as ledger:
        ledger.append([CoordinatorStarted(1.0)])
        cut()
        with pytest.raises(NotNow):
            ledger.append([CoordinatorStarted(2.0)])
        in_time(lambda: ledger.append([CoordinatorStarted(2.0)]))
        assert [event.at for event in ledger.events()] == [1.0, 2.0]
        cut()
        with pytest.raises(NotNow):
            ledger.append([CoordinatorStarted(3.0)])
        with closing(ledger_at(tmp_path, database)) as other:
            other.append([CoordinatorStarted(9.0)])
        with pytest.raises(UserError, match="another process wrote") as raised:
            in_time(lambda: ledger.append([CoordinatorStarted(3.0)]))
        assert not isinstance(raised.value, NotNow)


def test_a_server_that_says_nothing_is_waited_for_within_a_deadline_and_named(store) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        url = f"postgresql://me@{place}/runs?sslmode=disable&gssencmode=disable"
        with pytest.raises(StoreError, match=f"no connection to {place} within 0.2 s") as raised:
            store.PostgresStore(url, "run", connect_s=0.2)
    assert raised.value.passing


def test_an_append_that_takes_too_long_is_cut_off_and_counts_as_lost(tmp_path, store, database):
    with (
        closing(store.PostgresStore(database, "tiny", exchange_s=0.2)) as rows,
        closing(connected(database)) as other,
    ):
        other.autocommit = False
        other.execute("LOCK TABLE ledger IN EXCLUSIVE MODE")
        with pytest.raises(StoreError) as raised:
            rows.append([(1, "A", "{}", "a")])
        assert raised.value.passing and raised.value.in_doubt
        assert rows._connection.closed
    assert list(read_events(tmp_path, with_ledger(database), Event)) == []


def test_a_server_that_dies_in_a_transaction_has_all_or_nothing_of_it(tmp_path, postgres, database):
    def written() -> list[float]:
        return [e.at for e in read_events(tmp_path, with_ledger(database), Event)]

    with closing(ledger_at(tmp_path, database)) as ledger:
        ledger.append([CoordinatorStarted(1.0)])
        with closing(connected(database)) as other, ThreadPoolExecutor(1) as pool:
            # given a transaction that cannot get on
            other.autocommit = False
            other.execute("LOCK TABLE ledger IN EXCLUSIVE MODE")
            appending = pool.submit(ledger.append, [CoordinatorStarted(2.0)] * 2)
            with closing(connected(database)) as third:
                blocked = "SELECT count(*) FROM pg_locks WHERE NOT granted"
                eventually(
                    lambda: third.execute(blocked).fetchone() == (1,), "the append waits in it"
                )
            # when the server dies and comes again
            postgres.kill()
            with pytest.raises(NotNow, match="the ledger cannot be used"):
                appending.result(DEADLINE_S)
            assert "PostgreSQL server answers" in (refused_as(ledger, "failed").remedy or "")
            postgres.start()
        # then there is a doubt, which ends once it can be seen that nothing of it is there
        assert ledger.in_doubt
        in_time(ledger.settle)
        assert not ledger.in_doubt and written() == [1.0]
        # and it can be tried again
        in_time(lambda: ledger.append([CoordinatorStarted(2.0)] * 2))
        assert written() == [1.0, 2.0, 2.0]


# -- A coordinator over PostgreSQL ---------------------------------------------------------------


@pytest.fixture
def site(database: str, tmp_path: Path) -> Iterator[Site]:
    """A run of two steps whose ledger is in PostgreSQL, in a database of its own."""
    site = Site(tmp_path, with_ledger(database))
    site.publish(0)
    with site.origin():
        yield site


def test_a_run_with_its_ledger_in_postgres_restarts_and_is_audited(site, store, database):
    for step in range(2):
        with site.serving():
            worker, first = site.worker(), site.url
            # when a second coordinator is started, then it is refused and the first goes on
            with pytest.raises(UserError, match="another process writes this run's") as refused:
                site.serving().__enter__()
            assert refused.value.place == store.place(
                str(with_ledger(database).verify.ledger), site.run
            )
            assert site.url == first
            assert "end the other coordinator" in (refused.value.remedy or "")
            work(site, worker), work(site, worker)
            site.batch(step)
            site.publish(step + 1)
    assert not (site.run_dir / "state.db").exists()

    report = audit(site.run_dir, root_key=site.root.public_hex)
    assert (report.findings, report.steps_closed) == ([], 2)
    with closing(open_ledger(site.run_dir, load_resolved(site.run_dir))) as ledger:
        assert ledger.head == (report.rows, report.head)
        ledger._store._connection.execute(  # type: ignore[attr-defined]
            "UPDATE ledger SET body = replace(body, 'true', 'false') WHERE run = %s", ("tiny",)
        )
    findings = audit(site.run_dir, root_key=site.root.public_hex).findings
    assert "chain" in {finding.what for finding in findings}
