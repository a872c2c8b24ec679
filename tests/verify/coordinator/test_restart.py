"""The coordinator's own process: killed at any time, without power, started again, refused a port.

A rename is on the disk once its folder is synced, and the ledger's own log, which is written over,
says nothing of folders.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.hashing import digest_bytes
from runspec.core.run_files import step_folder, submission_files
from tests.verify.coordinator.deployment import DEADLINE_S, Site, submission, verdict
from tests.verify.coordinator.filled import POLICY, started
from tests.verify.coordinator.in_process import journal_of
from tests.verify.coordinator.over_http import check, sample
from verify.coordinator.journal import Journal
from verify.coordinator.ledger.store import SqliteStore, StoredRow
from verify.coordinator.machine.events import RolledBack, StepClosed
from verify.formats.lease import open_lease

START_S = 120.0
"""A process may take to start on a busy machine, and to end by itself."""


@contextmanager
def running(site: Site, port: int) -> Iterator[subprocess.Popen[str]]:
    process = site.process(port)
    drain = threading.Thread(target=process.communicate)  # a full pipe would block it
    drain.start()
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        drain.join(DEADLINE_S)


@pytest.mark.slow
def test_kill_at_every_stage_of_a_step_loses_nothing(site: Site, free_port: int):
    with running(site, free_port) as process:
        key, worker = site.worker()
        first = worker.lease(DEADLINE_S)
        process.kill()
    coordinators = frozenset({site.coordinator.public_hex})
    lease = open_lease(first, coordinators=coordinators)

    # given a kill after the lease, when it is started again, then the lease is the same
    with running(site, free_port) as process:
        worker = site.client(key)
        assert worker.lease(DEADLINE_S) == first
        envelope, table = submission(first, lease, key)
        worker.submit(envelope, table)
        process.kill()

    # given a kill after the submission, then it is there, and judged once
    with running(site, free_port) as process:
        worker, validator = site.client(key), site.client(site.validator)
        worker.submit(envelope, table)  # sent again: harmless
        item = validator.next_submission(DEADLINE_S)
        assert item.submission == digest_bytes(table)
        assert validator.download(item.submission) == table
        judgement = verdict(item.submission, lease, site.validator)
        validator.verdict(*judgement)
        process.kill()

    # given a kill after the verdict and files that a killed process left, when the step is filled
    leftovers = [step_folder(site.run_dir, 0) / n for n in (".tmp-1", f"{'0' * 64}.safetensors")]
    for path in leftovers:
        path.write_bytes(b"half")
    with running(site, free_port) as process:
        worker, validator = site.client(key), site.client(site.validator)
        second = worker.lease(DEADLINE_S)
        other = open_lease(second, coordinators=coordinators)
        assert (other.step, other.index, other.nonce) == (0, 1, lease.nonce)
        worker.submit(*submission(second, other, key))
        item = validator.next_submission(DEADLINE_S)
        validator.verdict(*verdict(item.submission, other, site.validator))
        batch = site.batch(0)
        assert [g.submission for g in batch.groups] == [digest_bytes(table)] * 2 + [
            item.submission
        ] * 2
        assert not any(path.exists() for path in leftovers)
        assert submission_files(site.run_dir, 0, digest_bytes(table)).verdict.exists()
        process.kill()

    # given a kill between the ledger and the file, then the same file is written again
    path = step_folder(site.run_dir, 0) / "batch.json"
    signed = path.read_bytes()
    path.unlink()
    with running(site, free_port) as process:
        site.client(key).lease(DEADLINE_S)
        assert path.read_bytes() == signed
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


def test_a_batch_that_the_ledger_does_not_know_stops_the_run(site: Site, free_port: int):
    path = step_folder(site.run_dir, 0) / "batch.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"{}")

    process = site.process(free_port)
    _, words = process.communicate(timeout=START_S)

    assert process.returncode == 4
    assert f"{path}: a batch of step 0, which the ledger has not closed" in words


def test_a_taken_port_is_an_error_that_names_it(site: Site):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = site.process(port)
        _, words = process.communicate(timeout=START_S)

    assert process.returncode == 1
    assert f"127.0.0.1:{port}: the port is taken" in words


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


# -- a loss of power -----------------------------------------------------------------------------


class Disk:
    """Files that were renamed and whose folder was not synced since, each time a row comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.unsynced: set[Path] = set()
        self.found: dict[str, list[str]] = {}
        rename, fsync, append = Path.rename, os.fsync, SqliteStore.append

        def renamed(path: Path, target: Path) -> Path:
            self.unsynced.add(Path(target))
            return rename(path, target)

        def synced(file: int) -> None:
            folder = Path(f"/proc/self/fd/{file}").readlink()
            self.unsynced = {path for path in self.unsynced if path.parent != folder}
            fsync(file)

        def appended(store: SqliteStore, rows: Sequence[StoredRow]) -> None:
            self.found[rows[0][1]] = [path.name for path in sorted(self.unsynced)]
            append(store, rows)

        monkeypatch.setattr(Path, "rename", renamed)
        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(SqliteStore, "append", appended)


def test_a_row_comes_after_its_files(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with site.serving():
        key, worker = site.worker()
        disk = Disk(monkeypatch)
        sample(site, key, worker)
        check(site, site.client(site.validator))
    assert disk.found["SubmissionReceived"] == disk.found["SubmissionJudged"] == []


@pytest.mark.parametrize("back_to", [None, 1])
def test_every_batch_that_the_ledger_has_and_the_disk_lost_is_written_again(
    tmp_path: Path, back_to: int | None
) -> None:
    run = started()
    for step in range(2):
        run.work("x"), run.work("x")
        run.advance()
        run.publish(step + 1)
    first, _ = (event for event in run.events if isinstance(event, StepClosed))
    if back_to is not None:
        run.record(RolledBack(run.now, back_to))
    journal_of(run, tmp_path).close()
    with closing(Journal(tmp_path, POLICY)) as journal:
        assert journal.batch_path(0).read_text() == first.document
        assert journal.batch_path(1).exists() == (back_to is None)
