"""A clean run is clean; whoever tampers with one is found, by name."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runspec.core.keys import SigningKey
from runspec.core.roles import Roles
from runspec.core.run_files import step_folder
from tests.verify.audit.tampering import Copy, work
from tests.verify.coordinator.deployment import Site, tiny_spec, verdict
from verify.__main__ import main
from verify.audit import replay
from verify.audit.findings import Credit
from verify.audit.replay import audit
from verify.audit.signers import read_roles
from verify.coordinator.ledger.ledger import Ledger
from verify.coordinator.machine.events import RolledBack
from verify.formats.batch import open_batch, sign_batch
from verify.formats.lease import Lease, open_lease, sign_lease


def whats(run: Copy) -> set[str]:
    return {finding.what for finding in run.audit().findings}


def found(run: Copy) -> set[tuple[int | None, str]]:
    return {(finding.row, finding.what) for finding in run.audit().findings}


def test_an_honest_run_is_clean_and_its_credits_are_counted(run: Copy):
    report = run.audit()

    assert report.findings == []
    assert (report.steps_closed, report.rows) == (2, len(run.rows()))
    closings = [n for n, (kind, _) in enumerate(run.rows(), start=1) if kind == "StepClosed"]
    assert report.anchored_rows == closings[-1] - 1
    assert (report.files_read, report.files_gone) == (4 * 8 - 2, 0)
    assert sorted(report.credits.values(), key=lambda c: c.rollouts) == [
        Credit(0, 0),
        Credit(4 * 6, 5 * 4 * 6),
    ]


def test_a_run_that_drops_files_while_it_is_audited_is_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
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
        monkeypatch.setattr(replay, "read_roles", while_it_is_read)
        report = audit(site.run_dir, root_key=site.root.public_hex)
        assert (report.findings, report.steps_closed, report.files_gone) == ([], 2, 4)

        # given that nothing closes meanwhile, then what is missing is found
        monkeypatch.undo()
        drop(2)
        findings = audit(site.run_dir, root_key=site.root.public_hex).findings
        assert {finding.what for finding in findings} == {"file"}


# -- The chain ---------------------------------------------------------------------------------


def test_a_ledger_cannot_write_lines_of_the_report(run: Copy):
    def change(rows: list[tuple[str, dict[str, Any]]]) -> None:
        rows[run.first("SubmissionJudged") - 1][1]["validator"] = "x\n0 findings\x1b[2Jclean"

    run.rewrite(change)
    report = run.audit()
    assert "clean" in str(report.findings)
    lines = list(report.lines())
    assert all(line.isprintable() for line in lines) and "clean" not in lines


def test_a_removed_row_is_named(run: Copy):
    row = run.first("LeaseGranted")
    run.execute("DELETE FROM ledger WHERE seq = ?", row)

    assert {(row + 1, "rows"), (row + 1, "chain")} <= found(run)


def test_an_inserted_row_with_a_good_chain_is_found_by_the_anchor(run: Copy):
    key = SigningKey.generate().public_hex
    registered = ("WorkerRegistered", {"at": 1.0, "worker": key, "pool": "near"})
    run.rewrite(lambda rows: rows.insert(run.first("NonceDrawn") - 1, registered))

    closings = {n for n, (kind, _) in enumerate(run.rows(), start=1) if kind == "StepClosed"}
    assert {(row, "anchor") for row in closings} <= found(run)
    assert "chain" not in whats(run)


def test_a_changed_time_with_a_good_chain_is_found_by_the_anchor(run: Copy):
    def change(rows: list[tuple[str, dict[str, Any]]]) -> None:
        rows[0][1]["at"] += 1.0

    run.rewrite(change)

    assert whats(run) == {"anchor"}


def test_a_ledger_cut_short_is_found_by_the_manifests_and_by_a_head_noted_before(run: Copy):
    report = run.audit()
    last = max(n for n, (kind, _) in enumerate(run.rows(), start=1) if kind == "StepClosed")
    run.rewrite(lambda rows: rows.__delitem__(slice(last - 1, None)))

    assert found(run) == {(None, "batch file")}
    findings = run.audit({report.rows: report.head}).findings
    assert (None, "noted head") in {(finding.row, finding.what) for finding in findings}


@settings(max_examples=60, deadline=None)
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
    copy = Copy(audited.run_dir.with_name("flipped"), audited)
    shutil.rmtree(copy.run_dir, ignore_errors=True)
    shutil.copytree(audited.run_dir, copy.run_dir, ignore=shutil.ignore_patterns("*.safetensors"))
    if column == "seq":
        number = int.from_bytes(changed)
        copy.execute("DELETE FROM ledger WHERE seq = ?", number)  # the row whose place it takes
        copy.execute("UPDATE ledger SET seq = ? WHERE seq = ?", number, seq)
    else:
        statement = {
            "kind": "UPDATE ledger SET kind = CAST(? AS TEXT) WHERE seq = ?",
            "body": "UPDATE ledger SET body = CAST(? AS TEXT) WHERE seq = ?",
            "chain": "UPDATE ledger SET chain = CAST(? AS TEXT) WHERE seq = ?",
        }[column]
        copy.execute(statement, changed, seq)

    expected = {"rows"} if column == "seq" else {"chain"}
    if column == "seq" and number + 1 == seq == rows[-1][0]:
        expected = {"chain"}  # the newest row in the place of the one before: no number is missing
    assert expected <= whats(copy)


def test_a_lease_of_more_groups_than_memory_holds_is_a_finding(run: Copy):
    def change(rows: list[tuple[str, dict[str, Any]]]) -> None:
        for kind, fields in rows:
            if kind == "LeaseGranted":
                fields["lease"]["groups"] = 2**31 - 1

    run.rewrite(change)
    assert {"lease", "verdict file"} <= whats(run)


# -- Documents and files -------------------------------------------------------------------------


def test_two_manifests_of_a_step_are_found(run: Copy):
    row = run.first("StepClosed")
    run.rewrite(lambda rows: rows.insert(row, rows[row - 1]))

    assert {(row + 1, "batch"), (row + 1, "state")} <= found(run)


def test_another_signed_manifest_on_disk_is_found(run: Copy):
    path = run.run_dir / "rollouts" / "step_0" / "batch.json"
    manifest = open_batch(path.read_bytes(), coordinators=None, run="tiny", step=0)
    manifest.groups.reverse()
    path.write_bytes(sign_batch(manifest, run.site.coordinator))

    assert found(run) == {(run.first("StepClosed"), "batch file")}


def test_a_manifest_of_other_groups_is_found_though_it_is_signed(run: Copy):
    row = run.first("StepClosed")

    def change(rows: list[tuple[str, dict[str, Any]]]) -> None:
        fields = rows[row - 1][1]
        manifest = open_batch(fields["document"].encode(), coordinators=None, run="tiny", step=0)
        manifest.groups.reverse()
        fields["trained"].reverse()
        fields["document"] = sign_batch(manifest, run.site.coordinator).decode()

    run.rewrite(change)

    assert (row, "filling") in found(run)


def test_a_manifest_of_another_key_is_found(run: Copy):
    row = run.first("StepClosed")

    def change(rows: list[tuple[str, dict[str, Any]]]) -> None:
        fields = rows[row - 1][1]
        manifest = open_batch(fields["document"].encode(), coordinators=None, run="tiny", step=0)
        fields["document"] = sign_batch(manifest, SigningKey.generate()).decode()

    run.rewrite(change)

    assert (row, "batch signature") in found(run)


def test_swapped_files_are_found(run: Copy):
    folder = run.run_dir / "rollouts" / "step_0"
    for suffix in (".verdict.safetensors", ".verdict.json", ".safetensors", ".json"):
        first, second, *_ = sorted(
            path for path in folder.iterdir() if path.name[64:] == suffix and path.name[64:]
        )
        held = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(held)

    assert {
        *("submission file", "submission envelope", "verdict file", "verdict envelope"),
    } <= whats(run)


def test_a_missing_file_that_may_still_be_trained_is_found_and_an_older_one_is_not(run: Copy):
    for step in (0, 1):
        for path in (run.run_dir / "rollouts" / f"step_{step}").glob("*.safetensors"):
            path.unlink()

    report = run.audit()

    # the next step to close is 2, so step 1 is still within the lag of one
    assert {f.what for f in report.findings} == {"file"}
    assert all("step_1" in finding.found for finding in report.findings)
    assert report.files_gone == 12


def test_a_verdict_of_a_key_that_roles_does_not_name_is_found(run: Copy):
    row, stranger = run.first("SubmissionJudged"), SigningKey.generate()
    fields = run.rows()[row - 1][1]
    lease = next(
        Lease(**body["lease"])
        for kind, body in run.rows()
        if kind == "LeaseGranted" and body["digest"] == fields["lease"]
    )
    envelope, table = verdict(fields["submission"], lease, stranger, accepted=False)
    folder = run.run_dir / "rollouts" / "step_0"
    (folder / f"{fields['submission']}.verdict.json").write_bytes(envelope)
    (folder / f"{fields['submission']}.verdict.safetensors").write_bytes(table)
    run.rewrite(lambda rows: rows[row - 1][1].update(validator=stranger.public_hex))

    assert (row, "validator") in found(run)
    assert "verdict signature" not in whats(run)


def test_grades_that_the_verdict_file_does_not_hold_are_found(run: Copy):
    row = next(
        n
        for n, (kind, fields) in enumerate(run.rows(), start=1)
        if kind == "SubmissionJudged" and fields["groups"]
    )
    run.rewrite(lambda rows: rows[row - 1][1]["groups"][1].update(reward=1.0))

    assert (row, "grade of group 1") in found(run)


def test_leases_that_share_a_seed_skip_an_index_or_are_unsigned_are_found(run: Copy):
    granted = [n for n, (kind, _) in enumerate(run.rows(), start=1) if kind == "LeaseGranted"]

    def regrant(rows: list[tuple[str, dict[str, Any]]], row: int, key: SigningKey) -> None:
        fields = rows[row - 1][1]
        lease = open_lease(
            fields["document"].encode(), coordinators=frozenset({run.site.coordinator.public_hex})
        )
        again = replace(lease, index=0 if row == granted[1] else lease.index)
        fields["lease"]["index"] = again.index
        fields["document"] = sign_lease(again, key).decode()

    def change(rows: list[tuple[str, dict[str, Any]]]) -> None:
        regrant(rows, granted[1], run.site.coordinator)
        regrant(rows, granted[2], SigningKey.generate())

    run.rewrite(change)

    assert {
        *((granted[1], "lease seed"), (granted[1], "state"), (granted[1], "lease digest")),
        (granted[2], "lease signature"),
    } <= found(run)


def test_a_rollback_that_kept_the_keys_is_found(run: Copy):
    with closing(Ledger(run.database)) as ledger:
        ledger.append([RolledBack(3e9, 2)])

    # a rollback makes keys anew: nothing before it is signed by those of today's roles.json
    assert {"lease signature", "batch signature", "validator", "roles"} <= whats(run)


def test_a_run_that_was_rolled_back_and_went_on_is_clean(run: Copy, tmp_path: Path):
    site = Site(tmp_path / "again", tiny_spec(steps=4))  # new keys, as a rollback makes them
    shutil.copytree(
        run.run_dir, site.run_dir, dirs_exist_ok=True, ignore=shutil.ignore_patterns("keys", "*t")
    )
    shutil.rmtree(site.run_dir / "rollouts" / "step_1")
    with closing(Ledger(site.run_dir / "state.db")) as ledger:
        ledger.append([RolledBack(2e9, 1)])
    site.publish(1)
    with site.origin(), site.serving():
        worker = site.worker()
        work(site, worker)
        work(site, worker)
        site.batch(1)

    report = audit(site.run_dir, root_key=site.root.public_hex)

    assert report.findings == []
    assert report.steps_closed == 2
    assert "a rollback removed them" in " ".join(report.notes)
    assert list(report.credits.values()) == [Credit(8, 40)]


# -- The command ---------------------------------------------------------------------------------


def command(run: Copy, *more: str) -> int:
    return main(["audit", str(run.run_dir), "--root-key", run.site.root.public_hex, *more])


def test_the_command_says_what_it_found(run: Copy, capsys: pytest.CaptureFixture[str]):
    assert command(run) == 0
    assert capsys.readouterr().out.rstrip().endswith("clean")

    row = run.first("SubmissionReceived")
    run.execute("UPDATE ledger SET kind = 'Nothing' WHERE seq = ?", row)

    assert command(run) == 1
    assert f"FINDING row {row}: row: kind b'Nothing'; expected an event" in capsys.readouterr().out
    assert command(run, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert {"row": row, "what": "row"}.items() <= report["findings"][1].items()


def test_what_cannot_be_read_is_said(run: Copy, capsys: pytest.CaptureFixture[str]):
    data = bytearray(run.database.read_bytes())
    data[4096:] = bytes(len(data) - 4096)
    run.database.write_bytes(data)

    assert command(run) == 2
    assert "the ledger cannot be read" in capsys.readouterr().err
    assert command(Copy(run.run_dir / "rollouts", run.site)) == 2
    assert "cannot read the resolved spec" in capsys.readouterr().err
    run.database.unlink()
    assert command(run) == 2
    assert "there is no ledger" in capsys.readouterr().err


def test_what_keeps_an_audit_from_its_report_is_no_finding(
    run: Copy, monkeypatch: pytest.MonkeyPatch
):
    # given a clean run whose report nobody can read, or whose audit breaks
    root = run.site.root.public_hex
    words = f"{sys.executable} -m verify audit {run.run_dir} --root-key {root}"
    gone = subprocess.run(["bash", "-c", f"{words} | true; exit ${{PIPESTATUS[0]}}"], timeout=120)
    full = subprocess.run(["bash", "-c", f"{words} > /dev/full"], timeout=120)
    monkeypatch.setattr("verify.commands.audit", lambda *_, **__: 1 // 0)
    broken = main(["audit", str(run.run_dir)])

    assert (gone.returncode, full.returncode, broken) == (141, 2, 3)
