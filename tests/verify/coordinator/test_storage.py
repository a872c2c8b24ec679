"""A coordinator that is killed, whose disk is full or whose database is locked: nothing is lost."""

from __future__ import annotations

import os
import random
import resource
import signal
import sqlite3
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from runspec.core.errors import NotNow, UserError
from runspec.core.files import write_atomic
from runspec.core.process import Endpoints, RunStopped
from runspec.core.roles import Latest
from runspec.core.run_files import step_folder, submission_files
from runspec.core.schema.load import load_resolved
from runspec.core.signed import SigningKey
from tests.role_folder import write_folder
from tests.verify.coordinator.deployment import RUN, Site, submission, tiny_spec, verdict
from tests.verify.coordinator.filled import (
    POLICY,
    chunks,
    context_of,
    digest,
    journal_of,
    registering_of,
    roles_of,
    started,
)
from tests.verify.coordinator.over_http import check, claimed, granted, post, sample
from verify import STORAGE_S
from verify.audit import audit
from verify.coordinator.handlers.judging import Judging
from verify.coordinator.handlers.leasing import Leasing
from verify.coordinator.handlers.operator import obey
from verify.coordinator.journal import Finished, Journal
from verify.coordinator.ledger import Ledger
from verify.coordinator.ledger import store as ledger_store
from verify.coordinator.ledger.store import SqliteStore, StoredRow, StoreError
from verify.coordinator.machine.events import CoordinatorStarted
from verify.coordinator.machine.state import Policy
from verify.coordinator.machine.transitions import replay
from verify.coordinator.requests import Refusal
from verify.coordinator.run import Closing
from verify.formats.lease import Lease, lease_digest, open_lease
from verify.formats.submission import open_submission
from verify.formats.verdict import open_verdict

# -- Its own process -----------------------------------------------------------------------------


@contextmanager
def running(site: Site) -> Iterator[Popen[str]]:
    """The coordinator in a process of its own."""
    spec, ends = load_resolved(site.run_dir), Endpoints(origin=site.weights)
    write_folder(site.run_dir, spec, ends, site.root.public_hex)
    words = ["coordinator", site.run_dir, "--listen", "127.0.0.1:0"]
    command = [sys.executable, "-m", "runspec.role", *words]
    process = Popen(command, stderr=PIPE, text=True)
    assert process.stderr is not None
    site.url = next(line for line in process.stderr if "listens on" in line).split()[-1]
    drain = threading.Thread(target=process.communicate)  # a full pipe would block it
    drain.start()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        drain.join()


@pytest.mark.slow
def test_kill_at_every_stage_of_a_step_loses_nothing(site: Site):
    # given a kill after the lease, when it is started again, then the lease is the same
    with running(site):
        key, worker = site.worker()
        first, lease = granted(site, worker)
    with running(site):
        assert granted(site, site.client(key))[0] == first
        envelope, table = submission(first, lease, key)
        site.client(key).submit(envelope, table)
    # given a kill after the submission, then it is there, and judged once
    with running(site):
        site.client(key).submit(envelope, table)  # sent again: harmless
        one = check(site, site.client(site.validator))
    # given a kill after the verdict and files that a killed process left, when the step is filled
    folder = step_folder(site.run_dir, 0)
    leftovers = [folder / name for name in (".tmp-1", f"{'0' * 64}.safetensors")]
    for path in leftovers:
        path.write_bytes(b"half")
    with running(site):
        two, other = sample(site, key, site.client(key))
        assert (other.step, other.index, other.nonce) == (0, 1, lease.nonce)
        assert check(site, site.client(site.validator)) == two
        assert [g.submission for g in site.batch(0).groups] == [one] * 2 + [two] * 2
        assert not any(path.exists() for path in leftovers)
        assert submission_files(site.run_dir, 0, one).verdict.exists()
    # given a kill between the ledger and the file, then the same file is written again
    signed = (folder / "batch.json").read_bytes()
    (folder / "batch.json").unlink()
    with running(site) as process:
        granted(site, site.client(key))
        assert (folder / "batch.json").read_bytes() == signed
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


@pytest.mark.parametrize("room", ["none", "for the file and not for its row"])
def test_a_full_disk_leaves_nothing_behind_and_ends_nothing(site: Site, room: str):
    with running(site) as process:
        folder, log = step_folder(site.run_dir, 0), site.run_dir / "state.db-wal"
        code = 507 if room == "none" else 503

        def limit(size: int) -> None:
            """The largest file that it may write from now on."""
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

        def refused(key: SigningKey, path: str, envelope: bytes, table: bytes) -> None:
            before = list(folder.iterdir())
            limit(100 if room == "none" else log.stat().st_size)
            answer = post(site, key, path, table, envelope=envelope)
            assert answer.status_code == code, answer.text
            limit(resource.RLIM_INFINITY)
            assert list(folder.iterdir()) == before

        key, worker = site.worker()
        data, lease = granted(site, worker)
        mine = submission(data, lease, key)
        assert log.stat().st_size > 2 * len(mine[1])
        folder.mkdir(parents=True)
        refused(key, "/v1/submissions", *mine)
        worker.submit(*mine)
        validator = site.client(site.validator)
        judged = verdict(claimed(validator).submission, lease, site.validator)
        refused(site.validator, "/v1/verdicts", *judged)
        validator.verdict(*judged)
        assert len(list(folder.iterdir())) == 4 and process.poll() is None
    report = audit(site.run_dir, root_key=site.root.public_hex)
    assert (report.findings, report.files_read) == ([], 4)


# -- Files and rows ------------------------------------------------------------------------------


def test_a_batch_that_the_ledger_does_not_know_stops_the_start(tmp_path: Path):
    path = step_folder(tmp_path, 0) / "batch.json"
    write_atomic(path, b"{}")
    words = "a batch of step 0, which the ledger has not closed"
    with (
        closing(Ledger(tmp_path / "state.db")) as ledger,
        pytest.raises(RunStopped, match=words) as stopped,
    ):
        Journal(tmp_path, POLICY, ledger=ledger)
    assert stopped.value.place == str(path)


def test_a_second_coordinator_touches_no_file_of_the_first(tmp_path: Path):
    # given a coordinator that has a body on its way, and a file whose row is about to be written
    run = started()
    run.lease("x")
    with closing(journal_of(run, tmp_path)):
        files = [step_folder(tmp_path, 0) / name for name in (".tmp-on-its-way", "new.safetensors")]
        for file in files:
            write_atomic(file, b"rollouts")
        # when somebody starts a second one
        with pytest.raises(UserError, match="another process writes this run's ledger"):
            Journal(tmp_path, POLICY)
        assert all(file.exists() for file in files)
        (step_folder(tmp_path, 0) / ".ipynb_checkpoints").mkdir()
    # then only one that is alone tidies up, and leaves folders alone
    with closing(Journal(tmp_path, POLICY)):
        assert not any(file.exists() for file in files)


def test_a_row_comes_after_its_files(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename is on the disk once its folder is synced, of which the ledger's log says nothing."""
    unsynced, found = set[Path](), dict[str, list[str]]()
    rename, fsync, append = Path.rename, os.fsync, SqliteStore.append

    def renamed(path: Path, target: Path) -> Path:
        unsynced.add(Path(target))
        return rename(path, target)

    def synced(file: int) -> None:
        folder = Path(f"/proc/self/fd/{file}").readlink()
        unsynced.difference_update([path for path in unsynced if path.parent == folder])
        fsync(file)

    def appended(store: SqliteStore, rows: Sequence[StoredRow]) -> None:
        found[rows[0][1]] = [path.name for path in sorted(unsynced)]
        append(store, rows)

    with site.serving():
        worker = site.worker()
        monkeypatch.setattr(Path, "rename", renamed)
        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(SqliteStore, "append", appended)
        sample(site, *worker)
        check(site, site.client(site.validator))
    assert found["SubmissionReceived"] == found["SubmissionJudged"] == []


# -- A disk that cannot be written for a while ---------------------------------------------------


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Somebody else writes to the database, for long."""
    with closing(sqlite3.connect(run_dir / "state.db", isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        yield
        database.execute("ROLLBACK")


def test_an_event_that_cannot_be_written_did_not_happen(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_store, "_BUSY_TIMEOUT_S", 0.0)
    run = started()
    with closing(journal_of(run, tmp_path)) as journal:
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


# -- Everything in any order ---------------------------------------------------------------------

HOW = ["full", "broken", "broken unwritten", "killed", "killed unwritten"]


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


class Coordinator:
    """Its handlers, and all who call them, by a clock that jumps."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random, self.now = random.Random(seed), 1e6
        algorithm = {"async_level": self.random.choice([0, 1, 2])}
        share, most = self.random.choice([0.25, 1.0]), self.random.choice([2, 50])
        verify = {"newcomer_share": share, "backlog": {"submissions": most}}
        self.spec = tiny_spec(steps=8, lease_timeout="30s", algorithm=algorithm, verify=verify)
        self.site = Site(folder, self.spec)
        self.workers = [SigningKey.generate() for _ in range(4)]
        self.validators = [self.site.validator, SigningKey.generate()]
        self.site.sign_roles(*self.validators)
        self.held: list[tuple[SigningKey, bytes, Lease]] = []
        self.start()

    def start(self) -> None:
        spec, site = self.spec, self.site
        validators = [key.public_hex for key in self.validators]
        roles = roles_of(coordinator=[site.coordinator.public_hex], validator=validators)
        self.store = Breaking(site.run_dir / "state.db")
        ledger = Ledger(self.store)
        self.journal = Journal(site.run_dir, Policy.of(spec), ledger=ledger, clock=self._tick)
        self.roles = roles
        run = context_of(self.journal, spec, site.coordinator, roles)
        self.judging, self.leasing, self.closing = Judging(run), Leasing(run), Closing(run)
        self.registering = registering_of(run)

    def _tick(self) -> float:
        self.now += 1e-3
        return self.now

    def start_again(self) -> None:
        self.journal.close()
        self.start()

    async def act(self) -> None:
        worker = self.random.choice(self.workers)
        acts = {"work": 12, "submit": 12, "judge": 12, "wait": 12, "publish": 6, "register": 3}
        acts |= {"release": 1, "jump": 1, "ban": 1, "break": 1, "again": 1}
        (act,) = self.random.choices(list(acts), list(acts.values()))
        match act:
            case "register":
                self.registering.register(worker.public_hex, "near", address="here")
            case "work":
                await self.work(worker)
            case "submit" if self.held:
                await self.submit(*self.random.choice(self.held))
            case "judge":
                await self.judge()
            case "wait":
                self.now += self.random.choice([0.0, 0.0, 1.0, 5.0])
                self.closing._advance(self._tick())
            case "publish":
                step = self.journal.state.next_close
                latest = Latest(RUN, step, digest("manifest", step), self.now, self.now + 100.0)
                self.closing.published(latest)
            case "release":
                self.leasing.release(worker.public_hex, list(self.journal.state.leases))
            case "jump":
                self.now += self.random.choice([-3600.0, -60.0, 20.0, 40.0])
            case "ban":
                verb = "unban" if worker.public_hex in self.journal.state.bans else "ban"
                obey(self.journal, self.roles, verb, worker.public_hex, "by hand")
            case "break":
                self.store.how = self.random.choice(HOW)
            case "again":
                self.start_again()

    async def work(self, worker: SigningKey) -> None:
        holding = [lease_digest(document) for _, document, _ in self.held]
        document = await self.leasing.lease(worker.public_hex, holding, 0.0)
        if document is not None:
            key = frozenset({self.site.coordinator.public_hex})
            self.held.append((worker, document, open_lease(document, coordinators=key)))

    async def submit(self, worker: SigningKey, document: bytes, lease: Lease) -> None:
        if self.random.random() < 0.1:  # at the last moment
            self.now = max(self.now, lease.expires - self.random.randint(1, 4) * 1e-3)
        signed, table = submission(document, lease, worker, note=self.random.randrange(2))
        await self.leasing.submit(open_submission(signed), signed, chunks(table))
        assert len(self.journal.state.to_judge) <= self.spec.verify.backlog.submissions

    async def judge(self) -> None:
        key, accepted = self.random.choice(self.validators), self.random.random() < 0.85
        found = await self.judging.next_submission(key.public_hex, [], 0.0)
        if found is not None:
            name = found[0].submission
            assert name is not None
            signed, rows = verdict(name, found[0].lease, key, accepted=accepted)
            envelope = open_verdict(signed, validators=frozenset({key.public_hex}))
            await self.judging.judge(key.public_hex, envelope, signed, chunks(rows))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_whatever_comes_in_whatever_order(tmp_path: Path, seed: int) -> None:
    """No event is refused, no file lost, and an audit finds nothing, over a ledger that breaks and
    a process that is killed at any append."""
    run = Coordinator(tmp_path, seed)
    for _ in range(500):
        try:
            await run.act()
        except (Refusal, NotNow):
            pass  # whoever asked is told so
        except (Finished, RunStopped):
            break
        except (UserError, Killed):  # the ledger went on without it, or it was killed
            run.start_again()
    run.start_again()
    state = run.journal.state
    run.journal.close()
    assert audit(run.site.run_dir, root_key=run.site.root.public_hex).findings == []
    with closing(Ledger(run.site.run_dir / "state.db")) as ledger:
        assert replay(Policy.of(run.spec), ledger.events()) == state
    for record in state.leases.values():
        if record.submission is not None:
            files = submission_files(run.site.run_dir, record.lease.step, record.submission)
            assert files.submission.exists() and files.submission_envelope.exists()
            assert files.verdict.exists() == (record.verdict is not None)
