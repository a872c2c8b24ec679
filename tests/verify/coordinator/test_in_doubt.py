"""Rows and their files: a row that may or may not be written, and a loss of power.

A rename is on the disk once its folder is synced, and the ledger's own log, which is written over,
says nothing of folders.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes
from runspec.core.keys import SigningKey
from tests.verify.coordinator.deployment import RUN, Site, tiny_spec, verdict
from tests.verify.coordinator.filled import POLICY, Filled, policy, started
from tests.verify.coordinator.over_http import check, sample
from tests.verify.coordinator.services import (
    Breaking,
    chunks,
    edge_of,
    journal_of,
    leasing_of,
    roles_of,
)
from verify.coordinator.events import RolledBack, StepClosed, SubmissionJudged
from verify.coordinator.journal import Journal
from verify.coordinator.judging import Judging
from verify.coordinator.state import LeaseRecord
from verify.formats.layout import SubmissionFiles, submission_files
from verify.formats.submission import SubmissionEnvelope
from verify.formats.verdict import open_verdict
from verify.ledger import Ledger, NotNow
from verify.ledger_store import SqliteStore, StoredRow

TABLE = b"what a worker sampled"


class Services:
    """Both services of a run of one worker with one open lease."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.validator = folder, SigningKey.generate()
        self.run = Filled(policy(groups_per_submission={"near": 2}))
        self.run.register("x", pool="near")
        self.run.publish(0)
        self.run.lease("x")
        journal_of(self.run, folder).close()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """From a start of the coordinator until it is killed."""
        self.store = Breaking(self.folder / "state.db")
        policy, ledger = self.run.state.policy, Ledger(self.store)
        self.at = Journal(self.folder, policy, ledger=ledger, clock=lambda: self.run.now)
        spec, roles = tiny_spec(), roles_of()
        edge = edge_of(self.at, spec)
        self.leasing = leasing_of(self.at, spec, SigningKey.generate(), roles, edge)
        self.judging = Judging(self.at, RUN)
        with closing(self.at):
            yield

    def breaks(self, *, committed: bool) -> None:
        self.store.how = "broken" if committed else "broken unwritten"

    @property
    def lease(self) -> LeaseRecord:
        (record,) = self.at.state.leases.values()
        return record

    @property
    def files(self) -> SubmissionFiles:
        return submission_files(self.folder, 0, digest_bytes(TABLE))

    async def submit(self) -> None:
        lease, digest = self.lease.lease, digest_bytes(TABLE)
        envelope = SubmissionEnvelope(
            *("run", lease.step, lease.worker, lease.index, self.lease.digest, digest, len(TABLE))
        )
        await self.leasing.submit(envelope, b"signed", chunks(TABLE))

    async def judge(self, validator: SigningKey) -> None:
        signed, rows = verdict(digest_bytes(TABLE), self.lease.lease, validator)
        key = validator.public_hex
        envelope = open_verdict(signed, validators=frozenset({key}))
        await self.judging.judge(key, envelope, signed, chunks(rows))


@pytest.fixture
def services(tmp_path: Path) -> Services:
    return Services(tmp_path)


@pytest.mark.parametrize("committed", [True, False])
async def test_another_validators_verdict_is_not_put_in_the_place_of_one_that_may_have_a_row(
    services: Services, committed: bool
) -> None:
    other = SigningKey.generate()
    with services.at_work():
        await services.submit()
        services.breaks(committed=committed)
        with pytest.raises(NotNow):
            await services.judge(services.validator)
        if committed:
            with pytest.raises(UserError, match="another process wrote"):
                await services.judge(other)
        else:
            await services.judge(other)
    with services.at_work():
        (judged,) = (e for e in services.at.ledger.events() if isinstance(e, SubmissionJudged))
        assert judged.validator == (services.validator if committed else other).public_hex
        signed = services.files.verdict_envelope.read_bytes()
        assert open_verdict(signed, validators=frozenset({judged.validator})).accepted


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
