"""A monitor sends all that a run has, once: over restarts, crashes and rollbacks, and as a role."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from runspec.core.run_files import monitor_folder
from runspec.core.spec.role_names import monitor_names
from runspec.local.monitors.feed import Feed, last_keys
from runspec.local.processes import role_specs
from runspec.local.run_dir import RunLocked, hold
from tests.runspec.local.fake_run import ROOT, drive_roles, prepared, small_spec, usual_roles
from tests.runspec.local.monitors import fake_monitors
from tests.runspec.local.monitors.fake_monitors import entries
from tests.runspec.local.monitors.logged_run import STEPS, LoggedRun, row
from tests.runspec.local.test_supervise import Watch, steps_trained


def test_each_thing_is_seen_once_and_samples_once_their_step_is_whole(tmp_path: Path) -> None:
    # given a run with steps 0 to 10 and two evaluations
    run = LoggedRun(tmp_path / "run", "kind: tensorboard")
    run.train(range(11))
    run.evaluate(0, 10)
    feed = Feed(run.path)
    # when it is looked at, then the newest step may get more samples, which come with the next one
    first = [item.key for item in feed.look(last=False)]
    evaluations = ["evaluation:held-out:0", "evaluation:held-out:10"]
    assert first == [*(f"step:{step}" for step in range(11)), "samples:0", *evaluations]
    run.train([11])
    assert [item.key for item in feed.look(last=False)] == ["step:11", "samples:10"]
    # and lines that are no steps are left out
    run.append("metrics.jsonl", [{"loss": 1.0}, {"step": True}, {"step": -1}])
    assert feed.look(last=False) == []
    # and a run is shown once its last step and evaluations are
    evaluations = "evaluations=[{name: held-out}, {name: b, at_end: false}]"
    assert last_keys(small_spec("small", 5, evaluations)) == {"step:4", "evaluation:held-out:5"}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The fake monitors are installed; the path of their package."""
    path = fake_monitors.install(tmp_path / "packages")
    monkeypatch.syspath_prepend(path)
    return path


@pytest.fixture
def run(tmp_path: Path, packages: str) -> LoggedRun:
    """A whole run with a sound monitor."""
    run = LoggedRun(tmp_path / "run", "kind: counting")
    run.train(range(STEPS))
    run.evaluate(0, 10, STEPS)
    return run


def steps(rows: list[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in rows if "step" in row and row["rollouts"] == 0]


@pytest.mark.parametrize("kind", ["counting", "forgetful"])
def test_everything_is_sent_once_over_several_sessions(
    tmp_path: Path, packages: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    # given a run that is looked at in the middle, twice at one place, and in the end
    run = LoggedRun(tmp_path / "run", f"kind: {kind}")
    for part in (range(12), (), range(12, STEPS)):
        run.train(part)
        run.follow()
    run.evaluate(0, STEPS)
    with caplog.at_level(logging.INFO):
        run.follow()
    # then there is one record, its entries numbered without gaps, with all there is
    [rows] = entries(run.folder).values()
    assert [each["number"] for each in rows] == list(range(len(rows)))
    assert steps(rows) == list(range(STEPS))
    assert [each["step"] for each in rows if each["rollouts"] == 2] == [0, 10, 20]
    assert [each["version"] for each in rows if "version" in each] == [0, STEPS]
    assert rows[3]["scalars"]["figure_1"] == row(3)["figure_1"]
    # and the last session began after 25 steps and 3 samples
    assert " from entry 28 on" in caplog.text


@pytest.mark.parametrize("lost", [0, 1, 7])
def test_what_a_tool_has_lost_is_sent_again(run: LoggedRun, lost: int) -> None:
    # given a tool that buffers, and has lost its newest entries in a crash
    run.follow()
    [path] = run.folder.glob("*.entries")
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[: -lost or None]))
    # when the monitor starts again, then the same entries have the same numbers
    run.follow()
    assert path.read_text() == whole
    # given one that has entries which the journal does not know, then it gets another record
    path.write_text(whole + whole.splitlines()[-1] + "\n")
    run.follow()
    _, second = entries(run.folder).values()
    assert steps(second) == list(range(STEPS))


def test_a_torn_line_of_the_journal_costs_nothing(run: LoggedRun) -> None:
    # given a monitor that was killed while it numbered entries, which it has not sent
    run.follow()
    with (run.folder / "journal.jsonl").open("a") as file:
        file.write('{"key": "step:25", "dig')
    run.train(range(STEPS, STEPS + 5))
    run.follow()
    run.follow()
    [rows] = entries(run.folder).values()
    assert steps(rows) == list(range(STEPS + 5))


def test_after_a_rollback_another_record_has_everything(run: LoggedRun) -> None:
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


def test_two_processes_never_send_to_one_record(run: LoggedRun) -> None:
    run.folder.mkdir(parents=True)
    with hold(run.folder), pytest.raises(RunLocked):
        run.follow()


MONITORS = (
    "monitors=[{name: sound, kind: counting}, {name: killed, kind: counting}, "
    "{name: broken, kind: raising}, {name: stuck, kind: hanging, deadline: 1s}, "
    "{name: absent, kind: unimportable}]"
)


@pytest.mark.slow
def test_no_monitor_costs_the_run_anything_and_each_failure_is_told_once(
    tmp_path: Path, packages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a run with a sound monitor, one that is killed, and plug-ins that raise, hang and miss
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{packages}")
    victims: list[int] = []

    def let_go(watch: Watch) -> None:
        """The run waits after some steps until each monitor has done what it does."""
        told = {name for name, text in watch.events if ": " in text}
        killed = watch.roles.get("monitor-killed")
        if len(watch.rows) < 5 or killed is None:
            return
        if killed.pid and not victims and entries(monitor_folder(run.directory, "killed")):
            victims.append(killed.pid)
            os.kill(killed.pid, signal.SIGKILL)
        back = killed.restarts == 1 and killed.state == "running"
        if back and told >= {"monitor-broken", "monitor-stuck", "monitor-absent"}:
            waits.unlink(missing_ok=True)

    watch = Watch(let_go)
    spec = small_spec("small", 10, MONITORS, "evaluations=null")
    with prepared(spec, tmp_path) as run:
        waits = run.directory / "hold"
        waits.write_text("5")
        monitors = role_specs(run, here=set(monitor_names(spec)))
        # when it is driven to its end
        outcome = drive_roles(run, [*usual_roles(run), *monitors], watch)
    # then it has trained every step
    assert outcome.kind == "finished"
    assert steps_trained(run.directory) == list(range(10))
    # and the two that can have sent everything, once
    for name in ("sound", "killed"):
        [rows] = entries(monitor_folder(run.directory, name)).values()
        assert [each["step"] for each in rows] == list(range(10))
    # and what is wrong with the others was reported once
    deaths = [(name, text) for name, text in watch.events if "ended with" in text]
    for name, words in {
        "broken": "1, starts again: monitors.broken: raising: send failed: ConnectionError: the ",
        "stuck": "takes over 1 s: this process ends, to be started again",
        "absent": "4, is not started again; the run goes on: ",
    }.items():
        [text] = [text for each, text in deaths if each == f"monitor-{name}"]
        assert words in text
