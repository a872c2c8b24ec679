"""The coordinator's own process: killed at any time, started again, refused a port."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.hashing import digest_bytes
from tests.verify.coordinator.deployment import DEADLINE_S, Site, submission, tiny_spec, verdict
from tests.verify.coordinator.filled import POLICY, Filled
from verify.coordinator.events import CoordinatorStarted
from verify.coordinator.journal import Journal
from verify.coordinator.policy import Policy
from verify.coordinator.transitions import replay
from verify.formats.layout import STATE_FILE, step_folder, submission_files
from verify.formats.lease import open_lease
from verify.ledger import Ledger

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


def test_a_second_coordinator_of_a_run_is_refused_and_the_first_goes_on(site: Site):
    with site.serving():
        key, worker = site.worker()
        first = site.url

        with pytest.raises(UserError, match="another process writes this run's ledger") as refused:
            site.serving().__enter__()

        assert refused.value.place == str(site.run_dir / STATE_FILE)
        assert site.url == first
        data = worker.lease(DEADLINE_S)
        assert data is not None
        lease = open_lease(data, coordinators=worker.roles().coordinator)
        worker.submit(*submission(data, lease, key))
    with site.serving():  # its lock went with it
        site.client(key).heartbeat({})


def with_a_lease(folder: Path) -> Journal:
    run = Filled()
    run.register("x")
    run.publish(0)
    run.lease("x")
    journal = Journal(folder, POLICY)
    for event in run.events:
        journal.record(event)
    return journal


def test_a_second_coordinator_touches_no_file_of_the_first(tmp_path: Path):
    # given a coordinator that has a body on its way, and a file whose row is about to be written
    with closing(with_a_lease(tmp_path)):
        files = [step_folder(tmp_path, 0) / name for name in (".tmp-on-its-way", "new.safetensors")]
        for file in files:
            write_atomic(file, b"rollouts")
        # when somebody starts a second one
        with pytest.raises(UserError, match="another process writes this run's ledger"):
            Journal(tmp_path, POLICY)
        assert all(file.exists() for file in files)
    # then only one that is alone tidies up
    with closing(Journal(tmp_path, POLICY)):
        assert not any(file.exists() for file in files)


def test_a_folder_of_somebody_who_looked_at_a_file_is_left_alone(tmp_path: Path):
    with_a_lease(tmp_path).close()
    (step_folder(tmp_path, 0) / ".ipynb_checkpoints").mkdir(parents=True)
    with closing(Journal(tmp_path, POLICY)) as journal:
        assert journal.state.next_step == 1


def test_the_state_is_what_the_ledger_says(site: Site):
    with site.serving():
        key, worker = site.worker()
        data = worker.lease(DEADLINE_S)
        lease = open_lease(data, coordinators=worker.roles().coordinator)
        worker.submit(*submission(data, lease, key))

    ledger = Ledger(site.run_dir / "state.db")
    events = list(ledger.events())
    ledger.close()
    state = replay(Policy.of(tiny_spec()), events)

    (record,) = state.leases.values()
    assert record.document.encode() == data and record.status == "submitted"
    with site.serving():
        assert site.client(key).lease(DEADLINE_S) != data
    ledger = Ledger(site.run_dir / "state.db")
    assert list(ledger.events())[: len(events)] == events
    assert sum(isinstance(e, CoordinatorStarted) for e in ledger.events()) == 2
    ledger.close()
