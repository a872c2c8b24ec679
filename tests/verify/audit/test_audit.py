"""A clean run is clean; whoever tampers with one is found, by name."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.roles import Roles
from runspec.core.run_files import step_folder
from runspec.core.schema import CalibrationProfile, RunSpec
from runspec.core.schema.load import dump_resolved
from runspec.core.signed import SigningKey
from tests.verify.audit.tampering import Copy, Fields, Rows, work
from tests.verify.coordinator.deployment import Site, tiny_spec, verdict
from tests.verify.profiles import document, made_profile
from verify.__main__ import main
from verify.audit import audit
from verify.audit.files import Credit, read_roles
from verify.coordinator.ledger import Ledger
from verify.coordinator.machine.events import RolledBack
from verify.coordinator.machine.verdicts import is_gap_fault
from verify.formats.batch import BatchManifest, open_batch, sign_batch
from verify.formats.lease import Lease, open_lease, sign_lease
from verify.thresholds import FLOAT32, GapNoise

Found = set[tuple[int | None, str]]


NOISE = GapNoise(cap=1e-3, mean=1e-4, probability=1e-3)
TOO_MUCH = 1.1 * NOISE.largest_excess / 4
"""Excess of each row of a submission that takes its worker's sum above the limit."""


def calibrated(site: Site) -> RunSpec:
    """The tiny run, with limits that its root has signed for it."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    profile = made_profile(replace(FLOAT32, gap_noise=NOISE), sampler={"sampling": sampling})
    item = CalibrationProfile(name="measured", document=document(profile, site.root))
    values = tiny_spec(steps=4).model_dump(mode="json", by_alias=True)
    values["learner"]["compute_dtype"] = "float32"
    values["identity"]["root_public_key"] = site.root.public_hex
    values["verify"]["profiles"] = [item.model_dump(mode="json", by_alias=True)]
    for pool in values["samplers"]:
        pool["dtype"] = "float32"
    return RunSpec.model_validate(values)


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A real run of two closed steps and a third that is being filled, restarted once: submissions
    that were rejected, by a validator and by the coordinator, a filtered one, and one that waits
    for its verdict."""
    site = Site(tmp_path_factory.mktemp("audited"), tiny_spec(steps=4))
    write_atomic(site.run_dir / "spec.json", dump_resolved(calibrated(site)))
    site.publish(0)
    with site.origin():
        with site.serving():
            one, two = site.worker(), site.worker("far")
            work(site, one, accepted=False)
            work(site, one, task_rewards=(1.0, 1.0), gap_excess=0.0)
            work(site, one, fingerprints=[11, 12], gap_excess=0.001)
        with site.serving():
            one, two = ((key, site.client(key)) for key, _ in (one, two))
            work(site, two, fingerprints=[99, 12], gap_excess=0.0)
            work(site, two, gap_excess=TOO_MUCH)
            for step in range(2):
                for _ in range(1 + step):
                    work(site, one, gap_excess=0.0)
                site.batch(step)
                site.publish(step + 1)
            work(site, one, gap_excess=0.0)
            work(site, one, judged=False)
    yield site


@pytest.fixture
def run(audited: Site, tmp_path: Path) -> Copy:
    """A copy of that run, to be tampered with."""
    return Copy.of(audited, tmp_path / "run")


def test_an_honest_run_is_clean_and_its_credits_are_counted(run: Copy):
    report = run.audit()
    assert report.findings == []
    assert (report.steps_closed, report.rows) == (2, len(run.rows()))
    assert report.anchored_rows == run.all("StepClosed")[-1] - 1
    assert (report.files_read, report.files_gone) == (4 * 10 - 2, 0)
    assert sorted(report.credits.values(), key=lambda c: c.rollouts) == [
        Credit(0, 0),
        Credit(4 * 6, 5 * 4 * 6),
    ]
    # when its pools are calibrated no more, then what was judged before stays true
    values = calibrated(run.site).model_dump(mode="json", by_alias=True)
    values["verify"]["profiles"] = []
    values["identity"]["root_public_key"] = None
    write_atomic(run.run_dir / "spec.json", dump_resolved(RunSpec.model_validate(values)))
    assert run.audit().findings == []
    # and where no root key is given, the run's own counts, with a note
    with pytest.raises(UserError, match="no root key"):
        audit(run.run_dir, root_key=None)
    run.site.root.save(run.run_dir / "keys" / "root.key")
    report = audit(run.run_dir, root_key=None)
    assert report.findings == [] and "its owner could have signed anything" in report.notes[0]


def test_the_coordinator_rejects_what_only_it_sees_whatever_the_verdict_says(run: Copy):
    judged = [fields for kind, fields in run.rows() if kind == "SubmissionJudged"]
    assert [each["accepted"] for each in judged] == [False, True, True, False, False, *[True] * 4]
    first, repeated, gaps = judged[2:5]
    assert f"submission {first['submission']}, which was judged before" in repeated["reason"]
    assert is_gap_fault(gaps["reason"]) and repeated["groups"] == gaps["groups"] == []
    (quarantined,) = (fields for kind, fields in run.rows() if kind == "WorkerQuarantined")
    assert quarantined["reason"].startswith(gaps["reason"])


def test_a_run_that_drops_files_while_it_is_audited_is_clean(tmp_path, monkeypatch):
    site = Site(tmp_path, tiny_spec(steps=4))
    site.publish(0)
    with site.origin(), site.serving():
        worker = site.worker()

        def one_step(step: int) -> None:
            work(site, worker), work(site, worker)
            site.batch(step)
            site.publish(step + 1)

        def drop(step: int) -> None:
            for file in step_folder(site.run_dir, step).glob("*.safetensors"):
                file.unlink()

        def while_it_is_read(*arguments: Any) -> Roles:
            """Its rows are a snapshot's by now; another step closes, and a checkpoint passes."""
            one_step(2)
            drop(1)
            return read_roles(*arguments)

        one_step(0), one_step(1)
        monkeypatch.setattr("verify.audit.read_roles", while_it_is_read)
        report = audit(site.run_dir, root_key=site.root.public_hex)
        assert (report.findings, report.steps_closed, report.files_gone) == ([], 2, 4)

        # given that nothing closes meanwhile, then what is missing is found
        monkeypatch.undo()
        drop(2)
        assert Copy(site.run_dir, site).whats() == {"file"}


# -- Each way to tamper with it ------------------------------------------------------------------


def manifest(
    run: Copy,
    what: str,
    key: SigningKey | None = None,
    *,
    of_row: bool = False,
    **changes: Callable[[BatchManifest], object],
) -> Found:
    """Changes the first manifest and signs it again; what is found in its row."""
    row = run.first("StepClosed")

    def rewrite(fields: Fields) -> None:
        found = open_batch(fields["document"].encode(), coordinators=None, run="tiny", step=0)
        made = replace(found, **{name: change(found) for name, change in changes.items()})
        fields["document"] = sign_batch(made, key or run.site.coordinator).decode()
        if of_row:
            fields["trained"].reverse()

    run.change(row, rewrite)
    return {(row, what)}


def an_inserted_row_with_a_good_chain(run: Copy) -> Found:
    fields = {"at": 1.0, "worker": SigningKey.generate().public_hex, "pool": "near"}
    place = run.first("NonceDrawn") - 1
    run.rewrite(lambda rows: rows.insert(place, ("WorkerRegistered", fields)))
    return {(row, "anchor") for row in run.all("StepClosed")}


def two_manifests_of_a_step(run: Copy) -> Found:
    row = run.first("StepClosed")
    run.rewrite(lambda rows: rows.insert(row, rows[row - 1]))
    return {(row + 1, "batch"), (row + 1, "state")}


def a_verdict_of_a_key_that_roles_does_not_name(run: Copy) -> Found:
    row, stranger = run.first("SubmissionJudged"), SigningKey.generate()
    fields = run.rows()[row - 1][1]
    lease = next(
        Lease(**body["lease"])
        for kind, body in run.rows()
        if kind == "LeaseGranted" and body["digest"] == fields["lease"]
    )
    envelope, table = verdict(fields["submission"], lease, stranger, accepted=False)
    folder = step_folder(run.run_dir, 0)
    (folder / f"{fields['submission']}.verdict.json").write_bytes(envelope)
    (folder / f"{fields['submission']}.verdict.safetensors").write_bytes(table)
    run.change(row, lambda fields: fields.update(validator=stranger.public_hex))
    return {(row, "validator")}


def graded(run: Copy) -> int:
    """The first row of a verdict that accepts."""
    return next(row for row in run.all("SubmissionJudged") if run.rows()[row - 1][1]["groups"])


def blamed(run: Copy, original: str) -> Found:
    row = run.all("SubmissionJudged")[3]
    reason = re.sub("[0-9a-f]{64}", original, run.rows()[row - 1][1]["reason"])
    run.change(row, lambda fields: fields.update(reason=reason))
    return {(row, "duplicates")}


def answers_to_leases_that_nobody_granted(run: Copy) -> Found:
    received, judged = run.first("SubmissionReceived"), run.first("SubmissionJudged")
    for row in (received, judged):
        run.change(row, lambda fields: fields.update(lease="ab" * 32))
    return {(received, "submission"), (received, "state"), (judged, "verdict")}


def a_file_that_cannot_be_read(run: Copy) -> Found:
    row = run.first("SubmissionReceived")
    submission = run.rows()[row - 1][1]["submission"]
    path = step_folder(run.run_dir, 0) / f"{submission}.json"
    path.unlink()
    path.mkdir()
    return {(row, "file")}


def leases_that_share_a_seed_skip_an_index_or_are_unsigned(run: Copy) -> Found:
    _, again, unsigned, *_ = run.all("LeaseGranted")

    def regrant(fields: Fields, key: SigningKey, **changes: int) -> None:
        keys = frozenset({run.site.coordinator.public_hex})
        lease = replace(open_lease(fields["document"].encode(), coordinators=keys), **changes)
        fields["lease"]["index"] = lease.index
        fields["document"] = sign_lease(lease, key).decode()

    def change(rows: Rows) -> None:
        regrant(rows[again - 1][1], run.site.coordinator, index=0)
        regrant(rows[unsigned - 1][1], SigningKey.generate())

    run.rewrite(change)
    return {
        *((again, "lease seed"), (again, "state"), (again, "lease digest")),
        (unsigned, "lease signature"),
    }


def leases_of_more_groups_than_memory_holds(run: Copy) -> Found:
    rows = run.all("LeaseGranted")
    for row in rows:
        run.change(row, lambda fields: fields["lease"].update(groups=2**31 - 1))
    return {(row, "lease") for row in rows} | {(graded(run), "verdict file")}


def a_nonce_that_was_drawn_before(run: Copy) -> Found:
    first, second, *_ = run.all("NonceDrawn")
    nonce = run.rows()[first - 1][1]["nonce"]
    run.change(second, lambda fields: fields.update(nonce=nonce))
    return {(second, "nonce")}


def a_rollback_that_kept_the_keys(run: Copy) -> Found:
    """A rollback makes keys anew: nothing before it is signed by those of today's roles.json."""
    with closing(Ledger(run.database)) as ledger:
        ledger.append([RolledBack(3e9, 2)])
    rows = {"LeaseGranted": "lease signature", "StepClosed": "batch signature"}
    rows["SubmissionJudged"] = "validator"
    found: Found = {(row, what) for kind, what in rows.items() for row in run.all(kind)}
    return found | {(None, "roles")}


def original(run: Copy, number: int) -> str:
    return run.rows()[run.all("SubmissionJudged")[number] - 1][1]["submission"]


TAMPERS: list[Callable[[Copy], Found]] = [
    an_inserted_row_with_a_good_chain,
    two_manifests_of_a_step,
    a_verdict_of_a_key_that_roles_does_not_name,
    answers_to_leases_that_nobody_granted,
    a_file_that_cannot_be_read,
    leases_that_share_a_seed_skip_an_index_or_are_unsigned,
    leases_of_more_groups_than_memory_holds,
    a_nonce_that_was_drawn_before,
    a_rollback_that_kept_the_keys,
    lambda run: manifest(run, "filling", groups=lambda found: found.groups[::-1], of_row=True),
    lambda run: manifest(run, "batch groups", groups=lambda found: found.groups[::-1]),
    lambda run: manifest(
        run, "stats.task_reward_mean", stats=lambda found: found.stats | {"task_reward_mean": 1.0}
    ),
    lambda run: manifest(run, "batch complete", complete=lambda _: False),
    lambda run: manifest(run, "batch signature", SigningKey.generate()),
    lambda run: blamed(run, original(run, 1)),
    lambda run: blamed(run, "ab" * 32),
]


@pytest.mark.parametrize("tamper", TAMPERS)
def test_what_was_changed_is_named_with_its_row(run: Copy, tamper: Callable[[Copy], Found]):
    expected = tamper(run)
    assert expected and expected <= run.found()


Row = Callable[[Copy], int]
CHANGES: list[tuple[Row, Callable[[Fields], object], set[str]]] = [
    (graded, lambda row: row["groups"][1].update(reward=1.0), {"grade of group 1"}),
    (graded, lambda row: row["groups"].pop(), {"grades"}),
    (
        lambda run: run.all("SubmissionJudged")[4],
        lambda row: row.update(gap_excess=0.0),
        {"excess of gaps", "gaps of the worker"},
    ),
]


@pytest.mark.parametrize(("row_of", "change", "whats"), CHANGES)
def test_a_row_that_says_other_than_its_files_is_found(run, row_of, change, whats):
    row = row_of(run)
    run.change(row, change)
    assert {(row, what) for what in whats} <= run.found()


def test_a_removed_row_is_found_and_a_changed_one_of_a_good_chain_by_the_anchor_alone(run: Copy):
    run.change(1, lambda fields: fields.update(at=fields["at"] + 1.0))
    assert run.whats() == {"anchor"}
    row = run.first("LeaseGranted")
    run.execute("DELETE FROM ledger WHERE seq = ?", row)
    assert {(row + 1, "rows"), (row + 1, "chain")} <= run.found()


def test_a_ledger_cut_short_is_found_by_the_manifests_and_by_a_head_noted_before(run: Copy):
    report = run.audit()
    last = run.all("StepClosed")[-1]
    run.rewrite(lambda rows: rows.__delitem__(slice(last - 1, None)))
    assert run.found() == {(None, "batch file")}
    # whether the head is of a row that is gone, or of another one
    for noted, row in ((report.rows, None), (2, 2)):
        findings = run.audit({noted: report.head}).findings
        assert (row, "noted head") in {(finding.row, finding.what) for finding in findings}


def test_another_signed_manifest_on_disk_is_found_and_one_of_no_row(run: Copy):
    path = step_folder(run.run_dir, 0) / "batch.json"
    found = open_batch(path.read_bytes(), coordinators=None, run="tiny", step=0)
    found.groups.reverse()
    path.write_bytes(sign_batch(found, run.site.coordinator))
    first = run.first("StepClosed")
    assert run.found() == {(first, "batch file")}
    # when it is gone, and there is one of a step that is not closed
    path.rename(step_folder(run.run_dir, 2) / "batch.json")
    assert run.found() == {(first, "batch file"), (None, "batch file")}


def test_swapped_files_are_found(run: Copy):
    folder = step_folder(run.run_dir, 0)
    for suffix in (".verdict.safetensors", ".verdict.json", ".safetensors", ".json"):
        first, second, *_ = sorted(path for path in folder.iterdir() if path.name[64:] == suffix)
        held = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(held)
    kinds = {"submission file", "submission envelope", "verdict file", "verdict envelope"}
    assert kinds <= run.whats()


def test_a_ledger_cannot_write_lines_of_the_report(run: Copy):
    row = run.first("SubmissionJudged")
    run.change(row, lambda fields: fields.update(validator="x\n0 findings\x1b[2Jclean"))
    report = run.audit()
    assert "clean" in str(report.findings)
    lines = list(report.lines())
    assert all(line.isprintable() for line in lines) and "clean" not in lines


@settings(max_examples=60, derandomize=True)
@given(data=st.data())
def test_any_byte_of_any_row_is_found(audited: Site, data: st.DataObject):
    with closing(sqlite3.connect(audited.run_dir / "state.db")) as database:
        rows = database.execute(
            "SELECT seq, CAST(kind AS BLOB), CAST(body AS BLOB), CAST(chain AS BLOB) FROM ledger"
            " ORDER BY seq"
        ).fetchall()
    seq, *texts = data.draw(st.sampled_from(rows), label="row")
    column = data.draw(st.sampled_from(["kind", "body", "chain", "seq"]), label="column")
    text = dict(zip(["kind", "body", "chain"], texts, strict=True)).get(column, seq.to_bytes(7))
    place = data.draw(st.integers(0, len(text) - 1), label="byte")
    mask = data.draw(st.integers(1, 255), label="mask")
    changed = text[:place] + bytes([text[place] ^ mask]) + text[place + 1 :]
    folder = audited.run_dir.with_name("flipped")
    shutil.rmtree(folder, ignore_errors=True)
    copy = Copy.of(audited, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    expected = {"chain"}
    if column == "seq":
        number = int.from_bytes(changed)
        copy.execute("DELETE FROM ledger WHERE seq = ?", number)  # the row whose place it takes
        copy.execute("UPDATE ledger SET seq = ? WHERE seq = ?", number, seq)
        # the newest row in the place of the one before: no number is missing
        expected = {"chain"} if number + 1 == seq == rows[-1][0] else {"rows"}
    else:
        copy.execute(f"UPDATE ledger SET {column} = CAST(? AS TEXT) WHERE seq = ?", changed, seq)
    assert expected <= copy.whats()


def test_a_run_that_was_rolled_back_and_went_on_is_clean(run: Copy, tmp_path: Path):
    site = Site(tmp_path / "again", tiny_spec(steps=4))  # new keys, as a rollback makes them
    shutil.rmtree(run.run_dir / "keys")
    (run.run_dir / "spec.json").unlink()
    shutil.copytree(run.run_dir, site.run_dir, dirs_exist_ok=True)
    shutil.rmtree(step_folder(site.run_dir, 1))
    with closing(Ledger(site.run_dir / "state.db")) as ledger:
        ledger.append([RolledBack(2e9, 1)])
    site.publish(1)
    with site.origin(), site.serving():
        worker = site.worker()
        work(site, worker), work(site, worker)
        site.batch(1)
    report = Copy(site.run_dir, site).audit()
    assert (report.findings, report.steps_closed) == ([], 2)
    assert "a rollback removed them" in " ".join(report.notes)
    assert list(report.credits.values()) == [Credit(8, 40)]


# -- The command ---------------------------------------------------------------------------------


def test_the_command_says_what_it_found_and_what_it_cannot_read(run, capsys):
    def command(*more: str, folder: Path = run.run_dir) -> int:
        return main(["audit", str(folder), "--root-key", run.site.root.public_hex, *more])

    assert command() == 0
    assert capsys.readouterr().out.rstrip().endswith("clean")
    row = run.first("SubmissionReceived")
    run.execute("UPDATE ledger SET kind = 'Nothing' WHERE seq = ?", row)
    assert command() == 1
    assert f"FINDING row {row}: row: kind b'Nothing'; expected an event" in capsys.readouterr().out
    assert command("--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert {"row": row, "what": "row"}.items() <= report["findings"][1].items()
    # given a ledger that is damaged, none, or no run directory
    data = run.database.read_bytes()
    run.database.write_bytes(data[:4096] + bytes(len(data) - 4096))
    assert command() == 2
    assert "the ledger cannot be read" in capsys.readouterr().err
    run.database.unlink()
    assert command() == 2
    assert "there is no ledger" in capsys.readouterr().err
    assert command(folder=run.run_dir / "rollouts") == 2
    assert "cannot read the resolved spec" in capsys.readouterr().err
