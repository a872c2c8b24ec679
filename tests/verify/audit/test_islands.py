"""The audit of a run with learner islands: what was committed, and what was changed since."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from runspec.core.files import write_atomic
from runspec.core.keys import SigningKey
from runspec.core.spec.resolved import dump_resolved
from tests.verify.audit.tampering import Copy
from tests.verify.coordinator.deployment import DEADLINE_S, RUN, Site
from tests.verify.coordinator.filled import digest
from tests.verify.coordinator.island_run import island, islands_spec, offer, outer
from verify.formats.islands import (
    CommitRecord,
    Contribution,
    Dropped,
    ShareOffered,
    open_commit,
    open_offer,
    sign_commit,
    sign_offer,
)
from verify.formats.ranges import open_ranges, sign_ranges
from verify.island_client import Committed

Fields = dict[str, Any]
SETTINGS: Fields = {"quorum": 2, "grace": "20ms", "max_norm": 5.0}
COMMIT = 1
"""The record that is tampered with: of step 1, to which a and c contributed."""


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two committed steps, the first without b's large share, the second without b's late one."""
    site = Site(tmp_path_factory.mktemp("islands"), islands_spec(**SETTINGS))
    site.publish(0)
    with site.origin(), site.serving():
        for step, names in enumerate((("b", "a", "c"), ("a", "c"))):
            for name in names:
                assert island(site, name).batch(step, DEADLINE_S)
                norm = 9.0 if name == "b" else 2.0
                island(site, name).offer(offer(name, step, norm=norm))
            found = island(site, "b").record(step, DEADLINE_S)
            assert isinstance(found, Committed)
            for name in ("c", "b"):
                assert island(site, name).result(step, found.digest, outer(step)) is True
            site.publish(step + 1)
    yield site


@pytest.fixture
def run(audited: Site, tmp_path: Path) -> Copy:
    shutil.copytree(audited.run_dir, tmp_path / "run")
    return Copy(tmp_path / "run", audited)


def rows_of(rows: list[tuple[str, Fields]], kind: str) -> list[Fields]:
    return [fields for found, fields in rows if found == kind]


def change_record(
    run: Copy, change: Callable[[CommitRecord], CommitRecord], key: SigningKey | None = None
) -> None:
    """Changes a record and signs it again."""

    def rewrite(rows: list[tuple[str, Fields]]) -> None:
        fields = rows_of(rows, "IslandsCommitted")[COMMIT]
        keys = frozenset({run.site.coordinator.public_hex})
        data = fields["document"].encode()
        record = change(open_commit(data, coordinators=keys, run=RUN, step=COMMIT))
        fields["record"] = asdict(record)
        fields["document"] = sign_commit(record, key or run.site.coordinator).decode()

    run.rewrite(rewrite)


def change_offer(run: Copy, change: Callable[[ShareOffered], ShareOffered], signer: str) -> None:
    """Changes the last offer, of island c, and signs it again."""

    def rewrite(rows: list[tuple[str, Fields]]) -> None:
        fields = rows_of(rows, "OfferReceived")[-1]
        keys = {name: key.public_hex for name, key in run.site.islands.items()}
        made = change(open_offer(fields["document"].encode(), keys=keys, run=RUN))
        fields["offer"] = asdict(made)
        fields["document"] = sign_offer(made, run.site.islands[signer]).decode()

    run.rewrite(rewrite)


def test_an_honest_run_is_clean(run: Copy) -> None:
    report = run.audit()
    assert (report.findings, report.notes) == ([], [])
    signed = ("StepClosed", "IslandsCommitted")
    last = max(n for n, (kind, _) in enumerate(run.rows(), start=1) if kind in signed)
    assert report.anchored_rows == last - 1
    rows = run.rows()
    reasons = [fields["record"]["dropped"] for fields in rows_of(rows, "IslandsCommitted")]
    assert [[drop["island"] for drop in dropped] for dropped in reasons] == [["b"], ["b"]]


def test_a_record_of_another_signer_is_found(run: Copy) -> None:
    change_record(run, lambda record: record, SigningKey.generate())
    assert "commit signature" in run.whats()


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
        (lambda record: replace(record, previous=None), "commit chain"),
        (lambda record: replace(record, previous=digest("other")), "commit chain"),
        (lambda record: replace(record, base=digest("other")), "contribution"),
        (lambda record: replace(record, codec="int8"), "commit"),
        (lambda record: replace(record, ledger_chain=digest("other")), "anchor"),
    ],
)
def test_a_changed_record_is_found(run: Copy, change: Any, what: str) -> None:
    change_record(run, change)
    assert what in run.whats()


def test_a_row_that_is_not_what_was_signed_is_found(run: Copy) -> None:
    def rewrite(rows: list[tuple[str, Fields]]) -> None:
        rows_of(rows, "IslandsCommitted")[COMMIT]["record"]["codec"] = "int8"
        rows_of(rows, "OfferReceived")[0]["offer"]["weight"] = 7.0

    run.rewrite(rewrite)
    assert {"commit", "offer"} <= run.whats()


def test_an_offer_that_another_island_signed_is_found(run: Copy) -> None:
    change_offer(run, lambda made: made, "a")
    assert {"offer signature", "contribution"} <= run.whats()


def test_an_offer_that_was_signed_anew_is_found(run: Copy) -> None:
    change_offer(run, lambda made: replace(made, share=digest("other")), "c")
    assert "contribution" in run.whats()


def test_a_second_record_of_a_step_is_found(run: Copy) -> None:
    def rewrite(rows: list[tuple[str, Fields]]) -> None:
        last = max(n for n, (kind, _) in enumerate(rows) if kind == "IslandsCommitted")
        rows.insert(last, rows[last])

    run.rewrite(rewrite)
    (found,) = (f for f in run.audit().findings if "a second record of step 1" in f.found)
    assert found.what == "commit"


def test_outer_states_that_do_not_follow_are_found(run: Copy) -> None:
    def rewrite(rows: list[tuple[str, Fields]]) -> None:
        first, last = rows_of(rows, "OuterResult")
        first["digest"] = digest("other")
        last["step"] = 5

    run.rewrite(rewrite)
    findings = run.audit().findings
    assert any(f.what == "commit" and "base" in f.found for f in findings)
    assert any(f.what == "outer state" and f.found == "of step 5" for f in findings)


def test_a_step_that_was_opened_again_too_late_is_found(run: Copy) -> None:
    def rewrite(rows: list[tuple[str, Fields]]) -> None:
        at = rows_of(rows, "OuterResult")[0]["at"]
        rows.append(("ShareLost", {"at": at, "step": 0, "island": "c", "by": "a"}))
        rows.append(("ShareLost", {"at": at, "step": 5, "island": "c", "by": "a"}))

    run.rewrite(rewrite)
    found = [f.expected for f in run.audit().findings if f.what == "lost share"]
    assert found == ["the newest step", "a committed step"]


def test_shares_of_other_islands_are_found(run: Copy) -> None:
    def rewrite(rows: list[tuple[str, Fields]]) -> None:
        fields = rows_of(rows, "StepClosed")[0]
        data = fields["document"].encode()
        manifest = open_ranges(data, coordinators=None, run=RUN, step=0, rows_per_step=6)
        changed = replace(
            manifest, shares=[replace(s, island=f"{s.island}x") for s in manifest.shares]
        )
        fields["document"] = sign_ranges(changed, run.site.coordinator).decode()

    run.rewrite(rewrite)
    assert "batch shares" in run.whats()


@pytest.mark.parametrize(
    "settings", [{"grace": "1h"}, {"quorum": None}, {"max_norm": None}, {"max_norm": 3.0}]
)
def test_changed_settings_are_noted(run: Copy, settings: Fields) -> None:
    """A restart may change when a step is committed, and the bound on the norm."""
    spec = islands_spec(**{**SETTINGS, **settings})
    write_atomic(run.run_dir / "spec.json", dump_resolved(spec))
    report = run.audit()
    assert report.findings == []
    assert any("its shares were all offered" in note for note in report.notes)
