"""A monitor sends each thing once: over restarts, crashes and rollbacks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.process import RunStopped
from runspec.local.run_dir import RunLocked, hold
from tests.runspec.local.monitors import fake_monitors
from tests.runspec.local.monitors.fake_monitors import entries
from tests.runspec.local.monitors.logged_run import STEPS, LoggedRun, row


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(fake_monitors.install(tmp_path / "packages"))


def steps(rows: list[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in rows if "step" in row and row["rollouts"] == 0]


def whole_run(tmp_path: Path, kind: str) -> LoggedRun:
    run = LoggedRun(tmp_path / "run", f"kind: {kind}")
    run.train(range(STEPS))
    run.evaluate(0, 10, STEPS)
    return run


@pytest.mark.parametrize("kind", ["counting", "forgetful"])
def test_everything_is_sent_once_over_several_sessions(tmp_path: Path, kind: str) -> None:
    # given a run that is looked at in the middle, twice at one place, and in the end
    run = LoggedRun(tmp_path / "run", f"kind: {kind}")
    for part in (range(12), (), range(12, STEPS)):
        run.train(part)
        run.follow()
    run.evaluate(0, STEPS)
    run.follow()
    # then there is one record, its entries numbered without gaps, with all there is
    [rows] = entries(run.folder).values()
    assert [each["number"] for each in rows] == list(range(len(rows)))
    assert steps(rows) == list(range(STEPS))
    assert [each["step"] for each in rows if each["rollouts"] == 2] == [0, 10, 20]
    assert [each["version"] for each in rows if "version" in each] == [0, STEPS]
    assert rows[3]["scalars"]["figure_1"] == row(3)["figure_1"]


@pytest.mark.parametrize("lost", [1, 7])
def test_what_a_tool_has_lost_is_sent_again(tmp_path: Path, lost: int) -> None:
    # given a tool that buffers, and has lost its newest entries in a crash
    run = whole_run(tmp_path, "counting")
    run.follow()
    [path] = run.folder.glob("*.entries")
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:-lost]))
    # when the monitor starts again, then the same entries have the same numbers
    run.follow()
    assert path.read_text() == whole


def test_a_torn_line_of_the_journal_costs_nothing(tmp_path: Path) -> None:
    # given a monitor that was killed while it numbered entries, which it has not sent
    run = LoggedRun(tmp_path / "run", "kind: counting")
    run.train(range(5))
    run.follow()
    with (run.folder / "journal.jsonl").open("a") as file:
        file.write('{"key": "step:5", "dig')
    run.train(range(5, STEPS))
    run.follow()
    run.follow()
    [rows] = entries(run.folder).values()
    assert steps(rows) == list(range(STEPS))


def test_after_a_rollback_another_record_has_everything(tmp_path: Path) -> None:
    run = whole_run(tmp_path, "counting")
    run.follow()
    # when the run goes back to version 10 and trains those steps again
    run.roll_back(10)
    run.train(range(10, STEPS), attempt=2)
    run.follow()
    # then the first record stays as it was, and the second has the run as it is now
    first, second = entries(run.folder).values()
    assert steps(first) == steps(second) == list(range(STEPS))
    assert first[9]["scalars"] == second[9]["scalars"]
    assert second[10]["scalars"]["figure_0"] == row(10, attempt=2)["figure_0"]
    # also where the steps that are gone were not trained again yet
    run.roll_back(5)
    run.follow()
    assert steps(list(entries(run.folder).values())[2]) == list(range(5))


def test_a_tool_that_has_more_than_was_sent_gets_another_record(tmp_path: Path) -> None:
    # given a tool that has entries which the journal does not know
    run = whole_run(tmp_path, "counting")
    run.follow()
    [path] = run.folder.glob("*.entries")
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[-1] + "\n")
    run.follow()
    _, second = entries(run.folder).values()
    assert steps(second) == list(range(STEPS))


def test_what_a_plug_in_raises_is_one_message_and_nothing_is_lost(tmp_path: Path) -> None:
    run = whole_run(tmp_path, "raising")
    with pytest.raises(UserError) as caught:
        run.follow()
    text = str(caught.value)
    assert text.startswith("monitors.m: raising: send failed: ConnectionError: the tool's server")
    assert "the run goes on without it" in text
    # when the tool is mended, then it gets the rest
    spec = (run.path / "spec.json").read_text()
    write_atomic(run.path / "spec.json", spec.replace("raising", "counting").encode())
    run.follow()
    [rows] = entries(run.folder).values()
    assert steps(rows) == list(range(STEPS))


def test_a_kind_that_is_not_installed_is_not_tried_again(tmp_path: Path) -> None:
    run = whole_run(tmp_path, "counting")
    spec = (run.path / "spec.json").read_text()
    write_atomic(run.path / "spec.json", spec.replace("counting", "absent").encode())
    with pytest.raises(RunStopped, match="no installed package offers the kind 'absent'"):
        run.follow()


def test_two_processes_never_send_to_one_record(tmp_path: Path) -> None:
    run = whole_run(tmp_path, "counting")
    run.folder.mkdir(parents=True)
    with hold(run.folder), pytest.raises(RunLocked):
        run.follow()


def test_a_monitor_tells_where_it_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = whole_run(tmp_path, "counting")
    with caplog.at_level(logging.INFO):
        run.follow()
        run.follow()
    told = [each.getMessage() for each in caplog.records if "logs to" in each.getMessage()]
    # 25 steps, 3 samples and 3 evaluations
    assert [text.partition(" from ")[2] for text in told] == ["entry 0 on", "entry 31 on"]
