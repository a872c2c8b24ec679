"""A monitor sends all that a run has: over restarts, kills and rollbacks, and as a role."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from runspec.core.run_files import monitor_folder
from runspec.core.schema.role_names import monitor_names
from runspec.local.monitors.follow import Feed
from runspec.local.processes import role_specs
from runspec.local.run_dir import RunLocked, hold
from tests.runspec.local.fake_run import ROOT, drive_roles, prepared, small_spec, usual_roles
from tests.runspec.local.monitors import fake_monitors
from tests.runspec.local.monitors.fake_monitors import entries
from tests.runspec.local.monitors.logged_run import STEPS, LoggedRun, row
from tests.runspec.local.test_supervise import Watch, steps_trained


def test_each_thing_is_seen_once_and_samples_once_their_step_is_whole(tmp_path: Path) -> None:
    # given a run with steps 0 to 10 and two evaluations, and a tool that has steps 0 to 7
    run = LoggedRun(tmp_path / "run", "kind: tensorboard")
    run.train(range(11))
    run.evaluate(0, 10)
    position = {"step": 7, "samples": -1, "evaluation:held-out:0": 1.7e9}
    feed = Feed(run.path, position)

    def look() -> list[tuple[str, int, int]]:
        found = []
        for entry, sent in feed.look(last=False):
            found.append((entry.axis, entry.at, len(entry.rollouts)))
            position.update(sent)
        return found

    # when it is looked at, then the newest step may get more samples, which come with the next one
    rows = [("step", step, 0) for step in (8, 9, 10)]
    assert look() == [*rows, ("step", 0, 2), ("version", 10, 0)]
    run.train([11])
    assert look() == [("step", 11, 0), ("step", 10, 2)]
    # and lines that are no steps are left out
    run.append("metrics.jsonl", [{"loss": 1.0}, {"step": True}, {"step": -1}])
    assert look() == []


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The fake monitors are installed; the path of their package."""
    path = fake_monitors.install(tmp_path / "packages")
    monkeypatch.syspath_prepend(path)
    return path


@pytest.fixture
def run(tmp_path: Path, packages: str) -> LoggedRun:
    """A whole run with a sound monitor."""
    run = LoggedRun(tmp_path / "run", "kind: writing")
    run.train(range(STEPS))
    run.evaluate(0, 10, STEPS)
    return run


def steps(rows: list[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in rows if "step" in row and row["rollouts"] == 0]


def test_everything_is_sent_once_over_several_sessions(tmp_path: Path, packages: str) -> None:
    # given a run that is looked at in the middle, twice at one place, and in the end
    run = LoggedRun(tmp_path / "run", "kind: writing")
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


def test_after_a_kill_the_newest_part_comes_again_with_its_numbers(run: LoggedRun) -> None:
    # given a monitor that was killed after it sent a part that its position does not have
    run.follow()
    noted = (run.folder / "position.json").read_bytes()
    run.train(range(STEPS, STEPS + 5))
    run.follow()
    (run.folder / "position.json").write_bytes(noted)
    # when it starts again, then the part comes again
    run.follow()
    [rows] = entries(run.folder).values()
    assert steps(rows) == [*range(STEPS + 5), *range(STEPS, STEPS + 5)]
    assert rows[-5:] == rows[-10:-5]
    position = json.loads((run.folder / "position.json").read_bytes())
    assert position["number"] == rows[-1]["number"] + 1


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
    "monitors=[{name: sound, kind: writing}, {name: killed, kind: writing}, "
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
        # from its second death in a row on nothing is said of one that hangs
        back &= watch.roles["monitor-stuck"].restarts >= 2
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
    # and the two that can have sent everything, the killed one its newest steps twice
    for name in ("sound", "killed"):
        [rows] = entries(monitor_folder(run.directory, name)).values()
        sent = [each["step"] for each in rows]
        assert sorted(set(sent)) == list(range(10))
        assert name == "killed" or len(sent) == 10
    # and what is wrong with the others was reported once
    deaths = [(name, text) for name, text in watch.events if "ended with" in text]
    for name, words in {
        "broken": "1, starts again: monitors.broken: raising: send failed: ConnectionError: the ",
        "stuck": "takes over 1 s: this process ends, to be started again",
        "absent": "4, is not started again; the run goes on: ",
    }.items():
        [text] = [text for each, text in deaths if each == f"monitor-{name}"]
        assert words in text
