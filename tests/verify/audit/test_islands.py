"""The audit of runs without workers: signed rows, shares that were offered, and commit records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runspec.core.files import write_atomic
from runspec.core.run_files import step_folder
from runspec.core.schema import RunSpec
from runspec.core.schema.load import dump_resolved
from runspec.core.signed import SigningKey
from tests.verify.audit.tampering import Copy, Fields
from tests.verify.coordinator.deployment import DEADLINE_S, RUN, Site
from tests.verify.coordinator.documents import documents_spec
from tests.verify.coordinator.filled import digest
from tests.verify.coordinator.island_run import island, offer, outer, with_islands
from tests.verify.coordinator.over_http import polled
from verify.formats.batch import (
    CommitRecord,
    Contribution,
    Dropped,
    RowRange,
    open_commit,
    open_offer,
    open_ranges,
    sign_commit,
    sign_offer,
    sign_ranges,
)
from verify.island_client import Committed

SETTINGS: Fields = {"quorum": 2, "grace": "20ms", "max_norm": 5.0}
COMMIT = 1
"""The record that is tampered with: of step 1, to which a and c contributed."""
STEPS = 6
"""Steps whose rows are signed: two that are committed, and four ahead of them."""


def spec_of(publish_every: int = 2, **settings: Any) -> RunSpec:
    return with_islands(documents_spec(publish_every=publish_every), **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two committed steps, the first without b's large share, the second without b's late one."""
    site = Site(tmp_path_factory.mktemp("islands"), spec_of())
    site.publish(0)
    with site.origin(), site.serving():
        for step, names in enumerate((("b", "a", "c"), ("a", "c"))):
            for name in names:
                polled(partial(island(site, name).batch, step))
                norm = 9.0 if name == "b" else 2.0
                island(site, name).offer(offer(name, step, norm=norm))
            found = island(site, "b").record(step, DEADLINE_S)
            assert isinstance(found, Committed)
            for name in ("c", "b"):
                assert island(site, name).result(step, found.digest, outer(step)) is True
        polled(partial(island(site, "b").batch, STEPS - 1))
    yield site


@pytest.fixture
def run(audited: Site, tmp_path: Path) -> Copy:
    return Copy.of(audited, tmp_path / "run")


def test_an_honest_run_is_clean(run: Copy) -> None:
    report = run.audit()
    assert (report.findings, report.notes) == ([], [])
    assert (report.steps_closed, report.files_gone) == (STEPS, 0)
    assert report.anchored_rows == max(run.all("StepClosed") + run.all("IslandsCommitted")) - 1
    records = [fields["record"] for kind, fields in run.rows() if kind == "IslandsCommitted"]
    assert [[drop["island"] for drop in record["dropped"]] for record in records] == [["b"]] * 2


# -- Signed rows ---------------------------------------------------------------------------------


def sign_again(run: Copy, key: SigningKey | None = None, **changes: Any) -> int:
    """Signs the first manifest again, changed, in the ledger and for the learner."""
    row = run.first("StepClosed")

    def rewrite(fields: Fields) -> None:
        data = fields["document"].encode()
        found = open_ranges(data, coordinators=None, run=RUN, step=0, rows_per_step=6)
        document = sign_ranges(replace(found, **changes), key or run.site.coordinator)
        fields["document"] = document.decode()
        (step_folder(run.run_dir, 0) / "batch.json").write_bytes(document)

    run.change(row, rewrite)
    return row


def test_other_bytes_rows_signers_anchors_and_islands_of_a_manifest_are_found(run: Copy) -> None:
    path = step_folder(run.run_dir, 1) / "batch.json"
    path.write_bytes(path.read_bytes() + b" ")
    assert run.found() == {(run.all("StepClosed")[1], "batch file")}
    data = (step_folder(run.run_dir, 0) / "batch.json").read_bytes()
    shares = open_ranges(data, coordinators=None, run=RUN, step=0, rows_per_step=6).shares
    row = sign_again(run, SigningKey.generate())
    assert (row, "batch signature") in run.found()
    sign_again(run, ledger_chain="ab" * 32)
    assert (row, "anchor") in run.found()
    sign_again(run, shares=[replace(share, island=f"{share.island}x") for share in shares])
    assert (row, "batch shares") in run.found()
    sign_again(run, shares=shares, rows=RowRange(0, 7))
    (found,) = (f for f in run.audit().findings if f.what == "batch signature")
    assert "rows 0 to 7 in step 0, which has 0 to 6" in found.found


def test_steps_that_train_groups_and_ones_out_of_order_are_found(run: Copy) -> None:
    first, second, *_ = run.all("StepClosed")
    run.change(first, lambda fields: fields.update(trained=[{"lease": "ab" * 32, "group": 0}]))
    assert {(first, "state"), (first, "batch groups")} <= run.found()

    run.rewrite(lambda rows: rows.insert(first - 1, rows.pop(second - 1)))
    assert {(first, "state"), (first, "anchor")} <= run.found()


def test_a_changed_pace_of_versions_is_noted(run: Copy) -> None:
    # given a run that goes on with more frequent versions: most steps were signed too early for it
    write_atomic(run.run_dir / "spec.json", dump_resolved(spec_of(publish_every=1)))
    report = run.audit()
    assert (report.findings, report.steps_closed) == ([], STEPS)
    assert sum("its contents are right" in note for note in report.notes) == STEPS - 2
    # and a step that is signed before any version was published is found
    run.rewrite(lambda rows: rows.pop(run.first("VersionPublished") - 1))
    assert "filling" in run.whats()


# -- Offers and records --------------------------------------------------------------------------


def change_record(
    run: Copy, change: Callable[[CommitRecord], CommitRecord], key: SigningKey | None = None
) -> int:
    """Changes a record and signs it again; the number of its row."""
    row = run.all("IslandsCommitted")[COMMIT]

    def rewrite(fields: Fields) -> None:
        data = fields["document"].encode()
        keys = frozenset({run.site.coordinator.public_hex})
        record = change(open_commit(data, coordinators=keys, run=RUN, step=COMMIT))
        fields["record"] = asdict(record)
        fields["document"] = sign_commit(record, key or run.site.coordinator).decode()

    run.change(row, rewrite)
    return row


def heavier(record: CommitRecord) -> CommitRecord:
    first, *others = record.contributors
    return replace(record, contributors=[replace(first, weight=1e6), *others])


def without_c(record: CommitRecord) -> CommitRecord:
    first, _ = record.contributors
    dropped = [*record.dropped, Dropped("c", "no share offered")]
    return replace(record, contributors=[first], dropped=dropped)


def with_b(record: CommitRecord) -> CommitRecord:
    a, c = record.contributors
    made = Contribution.of(offer("b", COMMIT))
    return replace(record, contributors=[a, made, c], dropped=[])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (heavier, "contribution"),
        (with_b, "contribution"),
        (without_c, "commit"),
        (lambda record: replace(record, previous=digest("other")), "commit chain"),
        (lambda record: replace(record, base=digest("other")), "contribution"),
        (lambda record: replace(record, codec="sparse"), "commit"),
        (lambda record: replace(record, ledger_chain=digest("other")), "anchor"),
    ],
)
def test_a_changed_record_is_found(run: Copy, change: Any, what: str) -> None:
    row = change_record(run, change)
    assert (row, what) in run.found()
    change_record(run, lambda record: record, SigningKey.generate())
    assert (row, "commit signature") in run.found()


@pytest.mark.parametrize(
    ("signer", "changes", "whats"),
    [
        ("a", {}, {"offer signature", "contribution"}),  # another island signed it
        ("c", {"share": digest("other")}, {"contribution"}),  # it was signed anew
    ],
)
def test_a_changed_offer_is_found(run: Copy, signer: str, changes: Fields, whats: set[str]) -> None:
    def rewrite(fields: Fields) -> None:
        keys = {name: key.public_hex for name, key in run.site.islands.items()}
        made = replace(open_offer(fields["document"].encode(), keys=keys, run=RUN), **changes)
        fields["offer"] = asdict(made)
        fields["document"] = sign_offer(made, run.site.islands[signer]).decode()

    run.change(run.all("OfferReceived")[-1], rewrite)
    assert whats <= run.whats()


def test_a_second_record_of_a_step_and_a_row_that_was_not_signed_are_found(run: Copy) -> None:
    last = run.all("IslandsCommitted")[COMMIT]
    run.rewrite(lambda rows: rows.insert(last, rows[last - 1]))
    (found,) = (f for f in run.audit().findings if "a second record of step 1" in f.found)
    assert (found.row, found.what) == (last + 1, "commit")
    made = run.first("OfferReceived")
    run.change(last, lambda fields: fields["record"].update(codec="sparse"))
    run.change(made, lambda fields: fields["offer"].update(weight=7.0))
    assert {(last, "commit"), (made, "offer")} <= run.found()


def test_outer_states_that_do_not_follow_are_found(run: Copy) -> None:
    first, last = run.all("OuterResult")
    run.change(first, lambda fields: fields.update(digest=digest("other")))
    run.change(last, lambda fields: fields.update(step=5))
    findings = run.audit().findings
    assert any(f.what == "commit" and "base" in f.found for f in findings)
    assert any(f.what == "outer state" and f.found == "of step 5" for f in findings)
    # and one island's report is recorded once
    run.rewrite(lambda rows: rows.insert(first, rows[first - 1]))
    assert (first + 1, "outer state") in run.found()


def test_a_step_that_was_opened_again_too_late_is_found(run: Copy) -> None:
    lost = {"at": run.rows()[-1][1]["at"], "island": "c", "by": "a"}
    run.rewrite(lambda rows: rows.extend(("ShareLost", {**lost, "step": n}) for n in (0, 5)))
    found = [f.expected for f in run.audit().findings if f.what == "lost share"]
    assert found == ["the newest step", "a committed step"]


@pytest.mark.parametrize(
    "settings", [{"grace": "1h"}, {"quorum": None}, {"max_norm": None}, {"max_norm": 3.0}]
)
def test_changed_settings_are_noted(run: Copy, settings: Fields) -> None:
    """A restart may change when a step is committed, and the bound on the norm."""
    write_atomic(run.run_dir / "spec.json", dump_resolved(spec_of(**settings)))
    report = run.audit()
    assert report.findings == []
    assert any("its shares were all offered" in note for note in report.notes)
