"""What a row speaks of outlasts a loss of power as the row does: a rename is on the disk once its
folder is synced, and the ledger's own log, which is written over, says nothing of folders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tests.verify.coordinator.deployment import Site
from tests.verify.coordinator.filled import POLICY, Filled
from tests.verify.coordinator.over_http import check, sample
from verify.coordinator.events import RolledBack, StepClosed
from verify.coordinator.filling import Close
from verify.coordinator.journal import Journal
from verify.formats.layout import step_folder
from verify.ledger_store import SqliteStore, StoredRow


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


def closed(run: Filled) -> list[StepClosed]:
    """A run with two closed steps."""
    for step in range(2):
        run.publish(step)
        run.work("x"), run.work("x")
        (decision,) = run.advance()
        assert isinstance(decision, Close)
    return [event for event in run.events if isinstance(event, StepClosed)]


@pytest.mark.parametrize("back_to", [None, 1])
def test_every_batch_that_the_ledger_has_and_the_disk_lost_is_written_again(
    tmp_path: Path, back_to: int | None
) -> None:
    run = Filled()
    run.register("x")
    first, _ = closed(run)
    if back_to is not None:
        run.record(RolledBack(run.now, back_to))
    with closing(Journal(tmp_path, POLICY)) as journal:
        for event in run.events:
            journal.record(event)
    with closing(Journal(tmp_path, POLICY)) as journal:
        assert journal.batch_path(0).read_text() == first.document
        assert (step_folder(tmp_path, 1) / "batch.json").exists() == (back_to is None)
