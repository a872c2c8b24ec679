"""The audit of a run that trains on documents: what was signed, and what was changed since."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runspec.core.files import write_atomic
from runspec.core.keys import SigningKey
from runspec.core.run_files import step_folder
from runspec.core.spec.resolved import dump_resolved
from tests.verify.audit.tampering import Copy
from tests.verify.coordinator.deployment import Site
from tests.verify.coordinator.documents import documents_spec
from tests.waiting import eventually
from verify.formats.ranges import RowRange, open_ranges, sign_ranges


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Four of nine steps are signed."""
    site = Site(tmp_path_factory.mktemp("documents"), documents_spec())
    site.publish(0)
    with site.origin(), site.serving():
        last = step_folder(site.run_dir, 3) / "batch.json"
        eventually(last.exists, "the rows of step 3")
    yield site


@pytest.fixture
def run(audited: Site, tmp_path: Path) -> Copy:
    shutil.copytree(audited.run_dir, tmp_path / "run")
    return Copy(tmp_path / "run", audited)


def closing(run: Copy, change: Any, key: SigningKey | None = None) -> None:
    """Signs the first manifest again, changed, in the ledger and for the learner."""

    def rewrite(rows: list[tuple[str, dict[str, Any]]]) -> None:
        fields = rows[run.first("StepClosed") - 1][1]
        data = fields["document"].encode()
        manifest = open_ranges(data, coordinators=None, run="tiny", step=0, rows_per_step=6)
        document = sign_ranges(change(manifest), key or run.site.coordinator)
        fields["document"] = document.decode()
        (step_folder(run.run_dir, 0) / "batch.json").write_bytes(document)

    run.rewrite(rewrite)


def test_an_honest_run_is_clean(run: Copy) -> None:
    report = run.audit()
    assert (report.findings, report.steps_closed, report.files_gone) == ([], 4, 0)
    assert report.anchored_rows == len(run.rows()) - 1


def test_rows_of_another_step_or_size_are_found(run: Copy) -> None:
    closing(run, lambda manifest: replace(manifest, rows=RowRange(0, 7)))
    (found,) = (f for f in run.audit().findings if f.what == "batch signature")
    assert "rows 0 to 7 in step 0, which has 0 to 6" in found.found


def test_another_signer_and_another_anchor_are_found(run: Copy) -> None:
    closing(run, lambda manifest: manifest, SigningKey.generate())
    assert "batch signature" in run.whats()
    closing(run, lambda manifest: replace(manifest, ledger_chain="ab" * 32))
    assert "anchor" in run.whats()


def test_a_changed_file_is_found(run: Copy) -> None:
    path = step_folder(run.run_dir, 1) / "batch.json"
    path.write_bytes(path.read_bytes() + b" ")
    assert run.whats() == {"batch file"}


def test_steps_out_of_order_and_ones_that_train_groups_are_found(run: Copy) -> None:
    def swap(rows: list[tuple[str, dict[str, Any]]]) -> None:
        first = run.first("StepClosed") - 1
        rows[first], rows[first + 1] = rows[first + 1], rows[first]

    def train(rows: list[tuple[str, dict[str, Any]]]) -> None:
        rows[run.first("StepClosed") - 1][1]["trained"] = [{"lease": "ab" * 32, "group": 0}]

    shutil.copytree(run.run_dir, run.run_dir.parent / "other")
    run.rewrite(swap)
    assert {"state", "anchor"} <= run.whats()
    other = Copy(run.run_dir.parent / "other", run.site)
    other.rewrite(train)
    assert {"state", "batch groups"} <= other.whats()


def test_a_changed_pace_of_versions_is_noted(run: Copy) -> None:
    # given a run that goes on with more frequent versions: two steps were signed too early for it
    spec = documents_spec(publish_every=1)
    write_atomic(run.run_dir / "spec.json", dump_resolved(spec))
    report = run.audit()
    assert (report.findings, report.steps_closed) == ([], 4)
    assert sum("its contents are right" in note for note in report.notes) == 2
    # and a step that is signed before any version was published is found
    run.rewrite(lambda rows: rows.pop(run.first("VersionPublished") - 1))
    assert "filling" in run.whats()
