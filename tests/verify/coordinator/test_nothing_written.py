"""A full disk, a locked database: state and files stay as they were, and all goes on after it."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from runspec.core.errors import NotNow, UserError
from runspec.core.hashing import digest_bytes
from runspec.core.keys import SigningKey
from tests.verify.coordinator.deployment import DEADLINE_S, Site, submission, verdict
from tests.verify.coordinator.filled import Filled, started
from tests.verify.coordinator.in_process import journal_of
from tests.verify.coordinator.over_http import granted, post
from tests.waiting import eventually
from verify.audit.replay import audit
from verify.coordinator.journal import Journal
from verify.coordinator.ledger import store as ledger_store
from verify.coordinator.machine.events import CoordinatorStarted, StepClosed
from verify.coordinator.services import closing as closing_module
from verify.coordinator.services.activity import Activity
from verify.coordinator.services.closing import Closing
from verify.timeouts import STORAGE_S


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_store, "_BUSY_TIMEOUT_S", 0.01)
    monkeypatch.setattr(closing_module, "_AGAIN_S", 0.01)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Somebody else writes to the database, for long."""
    with closing(sqlite3.connect(run_dir / "state.db", isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        yield
        database.execute("ROLLBACK")


@pytest.fixture
def full(tmp_path: Path) -> Iterator[tuple[Filled, Journal]]:
    """A run whose first step is full and not closed yet, and a disk where no folder can be made."""
    run = started()
    run.work("x"), run.work("x")
    with closing(journal_of(run, tmp_path)) as journal:
        (tmp_path / "rollouts").write_bytes(b"")
        yield run, journal


def test_an_event_that_cannot_be_written_did_not_happen(full: tuple[Filled, Journal]):
    run, journal = full
    state, head = journal.state, journal.ledger.head
    with locked(journal.run_dir):
        with pytest.raises(NotNow, match="locked"):
            journal.record(CoordinatorStarted(run.now))
        assert (journal.state, journal.ledger.head) == (state, head)

        # and for ever is too long
        run.now += STORAGE_S + 1.0
        with pytest.raises(UserError) as raised:
            journal.record(CoordinatorStarted(run.now))
        assert not isinstance(raised.value, NotNow)

    journal.record(CoordinatorStarted(run.now))
    assert len(list(journal.ledger.events())) == head[0] + 1


async def test_a_step_closes_once_it_can_be_written(full: tuple[Filled, Journal]):
    _, journal = full
    clockwork = Closing(journal, "run", SigningKey.generate(), Activity())
    with locked(journal.run_dir):
        keeping = asyncio.create_task(clockwork.keep_time())
        await asyncio.sleep(0.05)
        assert journal.state.next_close == 0 and not keeping.done()
    while journal.state.next_close == 0:
        await asyncio.sleep(0.01)
    assert not keeping.done()

    # given that the ledger has it and the file cannot be written, when it can, then it is
    (journal.run_dir / "rollouts").unlink()
    while not journal.batch_path(0).exists():
        await asyncio.sleep(0.01)
    (closed,) = (e for e in journal.ledger.events() if isinstance(e, StepClosed))
    assert journal.batch_path(0).read_bytes() == closed.document.encode()
    journal.stop()
    await keeping


async def test_a_batch_that_cannot_be_written_is_not_waited_for_without_end(
    full: tuple[Filled, Journal],
):
    """Though the ledger can, and all others go on: the learner waits for it."""
    run, journal = full
    key = SigningKey.generate()
    clockwork = Closing(journal, "run", key, Activity(), steady=lambda: run.now)
    keeping = asyncio.create_task(clockwork.keep_time())
    while journal.state.next_close == 0:
        await asyncio.sleep(0.01)
    async with asyncio.timeout(DEADLINE_S):
        while not keeping.done():
            run.now += STORAGE_S / 2 + 1.0
            journal.record(CoordinatorStarted(run.now))  # any event
            await asyncio.sleep(0.01)
    with pytest.raises(UserError, match="cannot write") as raised:
        await keeping
    assert raised.value.place == str(journal.batch_path(0))


def limit(process: subprocess.Popen[str], size: int) -> None:
    """The largest file that a process may write from now on."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.parametrize("room", ["none", "for the file and not for its row"])
def test_a_full_disk_leaves_nothing_behind_and_ends_nothing(site: Site, free_port: int, room: str):
    process = site.process(free_port)
    try:
        key, worker = site.worker()
        data, lease = granted(site, worker)
        envelope, table = submission(data, lease, key)
        log = site.run_dir / "state.db-wal"
        assert log.stat().st_size > 2 * len(table)

        limit(process, 100 if room == "none" else log.stat().st_size)
        answer = post(site, key, "/v1/submissions", table, envelope=envelope)
        assert answer.status_code == (507 if room == "none" else 503), answer.text
        folder = site.run_dir / "rollouts" / "step_0"
        assert list(folder.iterdir()) == []
        assert httpx.get(f"{site.url}/healthz", trust_env=False).status_code == 200

        limit(process, resource.RLIM_INFINITY)
        worker.submit(envelope, table)
        assert len(list(folder.iterdir())) == 2

        # the same for its verdict
        validator = site.client(site.validator)
        assert validator.next_submission(DEADLINE_S) is not None
        judged, findings = verdict(digest_bytes(table), lease, site.validator)
        limit(process, 100 if room == "none" else log.stat().st_size)
        answer = post(site, site.validator, "/v1/verdicts", findings, envelope=judged)
        assert answer.status_code == (507 if room == "none" else 503), answer.text
        assert len(list(folder.iterdir())) == 2
        limit(process, resource.RLIM_INFINITY)
        validator.verdict(judged, findings)
        eventually(lambda: len(list(folder.iterdir())) == 4, "the verdict's files")
        assert process.poll() is None
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE_S)

    report = audit(site.run_dir, root_key=site.root.public_hex)
    assert report.findings == []
    assert report.files_read == 4
