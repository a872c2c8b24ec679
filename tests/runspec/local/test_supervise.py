"""Real processes under the supervisor: they train, die, hang and fill disks; none is left over."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runspec.cli.status import read_status
from runspec.cli.view import PlainView
from runspec.core.errors import UserError
from runspec.core.process import EXIT_FINAL
from runspec.local import children
from runspec.local.apply import RunFailed, supervise
from runspec.local.children import birth
from runspec.local.planning import make_plan
from runspec.local.run_dir import RunLocked, holder
from runspec.local.state import RoleRow, RunState
from tests.runspec.cli.in_process import runspec
from tests.runspec.local.dashboard.exported import report
from tests.runspec.local.fake_run import (
    ROOT,
    drive_roles,
    prepared,
    role,
    small_spec,
    usual_roles,
)
from tests.waiting import eventually

pytestmark = pytest.mark.slow  # real processes, killed and waited for

DEADLINE_S = 30.0


class Watch:
    """Keeps what it was shown, and calls `act` at every look."""

    def __init__(self, act: Callable[[Watch], None] = lambda watch: None) -> None:
        self.act = act
        self.rows: Sequence[Any] = ()
        self.roles: dict[str, RoleRow] = {}
        self.notes: list[str] = []
        self.events: list[tuple[str, str]] = []

    def event(self, role: str, text: str) -> None:
        self.events.append((role, text))

    def show(self, rows: Sequence[Any], roles: Sequence[RoleRow], note: str) -> None:
        self.rows, self.roles = rows, {role.name: role for role in roles}
        self.notes.append(note)
        self.act(self)


def steps_trained(run_dir: Path) -> list[int]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def roles_on_record(run_dir: Path) -> dict[str, Any]:
    with closing(RunState(run_dir)) as state:
        return {role.name: role for role in state.roles()}


def test_a_run_ends_with_its_learner_and_leaves_a_summary(tmp_path: Path) -> None:
    # given a run of a stage and three roles, whose learner waits until the server is up
    with prepared(small_spec(steps=5), tmp_path) as run:
        hold = run.directory / "hold"
        hold.touch()

        def let_go(watch: Watch) -> None:
            if "server" in watch.roles and watch.roles["server"].state == "running":
                hold.unlink(missing_ok=True)

        watch = Watch(let_go)
        # when it is driven to its end
        stage = role("warm_start", run.directory)
        outcome = drive_roles(run, usual_roles(run), watch, stages=[stage])
    # then everything was trained, everyone has ended, and the results lie there
    assert outcome.kind == "finished"
    assert steps_trained(run.directory) == [0, 1, 2, 3, 4]
    assert {view.state for view in watch.roles.values()} == {"finished"}
    assert [text for name, text in watch.events if name == "server"][1] == "running"
    # and the stage's result was shown, as was once that no rollout was right
    assert ("warm_start", "making version 0") in watch.events
    [unsolved] = [text for _, text in watch.events if "was right" in text]
    assert unsolved.startswith("no rollout of step ")
    assert json.loads((run.directory / "summary.json").read_text())["steps"] == 5
    assert report(run.directory / "report.html")["head"]["step"] == 5
    assert "making version 0" in (run.directory / "logs" / "warm_start.log").read_text()
    assert holder(run.directory) is None


@pytest.mark.parametrize("victim", ["learner", "worker", "server"])
def test_a_killed_role_is_back_within_two_seconds(tmp_path: Path, victim: str) -> None:
    # given a run whose victim is killed once two steps are trained
    times: dict[str, float] = {}
    first: list[int] = []

    def kill_once(watch: Watch) -> None:
        pid = watch.roles[victim].pid
        if pid and len(watch.rows) >= 2 and not first:
            first.append(pid)
            times["killed"] = time.monotonic()
            os.kill(pid, signal.SIGKILL)
        elif first and pid not in (None, first[0]) and "back" not in times:
            times["back"] = time.monotonic()

    with prepared(small_spec(steps=30), tmp_path) as run:
        watch = Watch(kill_once)
        outcome = drive_roles(run, usual_roles(run), watch)
    # then it came back in time, and no step is missing or there twice
    assert outcome.kind == "finished"
    assert times["back"] - times["killed"] < 2.0
    assert steps_trained(run.directory) == list(range(30))
    assert (victim, "killed by SIGKILL, starts again") in watch.events
    assert watch.roles[victim].restarts == 1


def test_a_run_that_fails_before_its_first_process_says_so_in_status(tmp_path: Path) -> None:
    # given a run with two roles of one name
    relay = "broadcast.relays={volunteers-0: {upstream: [origin]}, local: null}"
    with prepared(small_spec("small", 5, relay), tmp_path) as run:
        [pool] = run.spec.samplers
        twin = pool.model_copy(update={"name": "relay-volunteers"})
        run = replace(run, spec=run.spec.model_copy(update={"samplers": [twin]}))
        # when it is supervised
        with pytest.raises(UserError) as failure:
            supervise(run, Watch(), lambda: 0)
    # then the status is its failure, and not a start that never ends
    status = read_status(run.directory)
    assert (status["state"], status["reason"]) == ("failed", failure.value.thing)
    assert status["roles"] == {}


def test_no_dead_role_is_called_running_after_a_supervisor_that_broke_down(tmp_path: Path) -> None:
    def break_down(watch: Watch) -> None:
        if {role.state for role in watch.roles.values()} == {"running"}:
            raise RuntimeError("a fault of our own")

    with prepared(small_spec(steps=10_000), tmp_path) as run, pytest.raises(RuntimeError):
        drive_roles(run, usual_roles(run), Watch(break_down))
    assert {role.state for role in roles_on_record(run.directory).values()} == {"running"}
    status = read_status(run.directory)
    assert status["state"] == "failed"
    assert {role["state"] for role in status["roles"].values()} == {"ended"}
    assert {role["pid"] for role in status["roles"].values()} == {None}


def test_a_role_that_keeps_dying_ends_the_run_with_its_last_lines(tmp_path: Path) -> None:
    # given a role that dies at every start, forgiven once
    spec = small_spec("dying", 5, "placement.restarts=1")
    watch = Watch()
    # when the run is driven
    with prepared(spec, tmp_path) as run, pytest.raises(RunFailed) as failure:
        drive_roles(run, [role("worker", run.directory), role("dying", run.directory)], watch)
    # then it fails with the role's last error, its remedy and its last twenty lines
    text = str(failure.value)
    assert text.startswith("dying: socket 7: the cable is cut\ndying kept dying")
    assert "\n  remedy: mend it, then apply again: the run goes on from its newest" in text
    assert failure.value.exit_code == 1
    assert "dying kept dying (ended with exit code 1)" in text
    assert "the cable is cut" in text and "remedy: mend it" in text
    assert "line 39" in text and "line 10\n" not in text
    assert watch.roles["dying"].state == "failed"
    # and so do the events, once for each death
    ends = [said for name, said in watch.events if name == "dying" and "exit code" in said]
    assert ends == [
        "ended with exit code 1, starts again: socket 7: the cable is cut",
        "ended with exit code 1, given up after 2 in a row: socket 7: the cable is cut",
    ]
    # and nobody is left
    assert all(not view.pid for view in watch.roles.values())
    with closing(RunState(run.directory)) as state:
        row = state.run()
        assert row is not None
        assert row.state == "failed"
    # and a status afterwards says why, and what to do
    status = runspec("status", run.directory).stdout
    assert "(dying: socket 7: the cable is cut)" in status
    status = json.loads(runspec("status", run.directory, "--json").stdout)
    assert status["reason"].startswith("dying: socket 7: the cable is cut; remedy: mend it, then")


def test_a_cause_that_another_try_would_meet_ends_the_run_at_once(tmp_path: Path) -> None:
    # given a role whose plug-in raises whenever it is loaded
    watch = Watch()
    with prepared(small_spec(steps=10_000), tmp_path) as run, pytest.raises(RunFailed) as failure:
        roles = [*usual_roles(run), role("broken_plugin", run.directory)]
        # when the run is driven, then that role is started once
        drive_roles(run, roles, watch)
    assert watch.roles["broken_plugin"].restarts == 0
    assert failure.value.exit_code == EXIT_FINAL
    # and the message, the events and the status begin with what was raised, and where
    cause = "broken_plugin: KeyError: 'gold' at local/role.py:"
    assert str(failure.value).startswith(cause)
    (said,) = [said for name, said in watch.events if "stops the run" in said]
    assert "ended with exit code 4, stops the run: KeyError: 'gold' at local/role.py:" in said
    status = json.loads(runspec("status", run.directory, "--json").stdout)
    assert status["reason"].startswith(cause)
    assert status["reason"].endswith("from its newest checkpoint")
    conditions = {each["type"]: each["status"] for each in status["conditions"]}
    assert (conditions["Failed"], conditions["Stalled"]) == ("True", "False")


def test_what_the_grader_dropped_is_shown_while_the_run_goes_on(tmp_path: Path) -> None:
    # given a run whose coordinator tells of groups that the grader dropped
    out = io.StringIO()
    with prepared(small_spec(steps=3), tmp_path) as run:
        hold = run.directory / "hold"
        hold.touch()
        host = run.endpoints.coordinator.removeprefix("http://")
        coordinator = role("grading_coordinator", run.directory, host)
        _, *others = usual_roles(run)

        def let_go(watch: Watch) -> None:
            if any("dropped" in note for note in watch.notes):
                hold.unlink(missing_ok=True)

        # when it is watched
        watch, plain = Watch(let_go), PlainView(3, out)
        watch.event = lambda name, text: plain.event(name, text)  # type: ignore[method-assign]
        drive_roles(run, [coordinator, *others], watch)
    # then the panel's first line, the plain lines and the events say so, without control characters
    words = (
        "3 groups dropped by the grader, the newest: p7: KeyError: 'gold'?[2J at mine/grading.py:17"
    )
    assert f"{words}; waiting for nobody" in watch.notes
    assert out.getvalue().count(f"coordinator: {words}\n") == 1
    assert words in runspec("status", run.directory).stdout


def test_a_role_that_says_stop_stops_the_run_at_once(tmp_path: Path) -> None:
    # given a role that stalls, while another waits to be started again
    watch = Watch()
    with prepared(small_spec(steps=10_000), tmp_path) as run, pytest.raises(RunFailed) as failure:
        others = [role("dying", run.directory), role("stalled", run.directory)]
        drive_roles(run, [*usual_roles(run), *others], watch)
    # then the run stops with its words, and its end is told of nobody else
    assert [name for name, text in watch.events if f"exit code {EXIT_FINAL}" in text] == ["stalled"]
    assert failure.value.exit_code == EXIT_FINAL
    assert "stalled says that the run cannot go on" in str(failure.value)
    assert "step 3 stalled" in str(failure.value)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    spec = small_spec("full", 10_000, "placement.restarts=0")
    with prepared(spec, tmp_path) as run, pytest.raises(RunFailed) as failure:
        drive_roles(run, [*usual_roles(run), role("full_disk", run.directory)], Watch())
    assert "big.safetensors: cannot write: File too large" in str(failure.value)
    assert not list((run.directory / "rollouts").glob("*big.safetensors"))


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    # given a run that is asked to stop after three steps
    watch = Watch()
    with prepared(small_spec(steps=20), tmp_path) as run:
        outcome = drive_roles(run, usual_roles(run), watch, lambda: int(len(watch.rows) >= 3))
    assert outcome.kind == "interrupted"
    before = steps_trained(run.directory)
    assert 3 <= len(before) < 20
    assert not make_plan(run.spec, run.directory).finished
    # when it is opened again
    with prepared(small_spec(steps=20), tmp_path) as again:
        outcome = drive_roles(again, usual_roles(again), Watch())
    # then it ends, on the same endpoints, every step trained once
    assert outcome.kind == "finished"
    assert steps_trained(run.directory) == list(range(20))
    assert again.endpoints == run.endpoints
    assert make_plan(run.spec, run.directory).finished
    assert not make_plan(small_spec(steps=25), run.directory).finished, (
        "more steps may be asked for"
    )


def test_a_second_request_kills_what_will_not_end(tmp_path: Path) -> None:
    watch = Watch()

    def requests() -> int:
        ready = watch.roles.get("stubborn") and watch.roles["stubborn"].state == "running"
        return 2 if ready and len(watch.rows) >= 2 else 0

    with prepared(small_spec(steps=10_000), tmp_path) as run:
        started = time.monotonic()
        outcome = drive_roles(
            run, [*usual_roles(run), role("stubborn", run.directory)], watch, requests
        )
    assert outcome.kind == "interrupted"
    assert time.monotonic() - started < 15.0
    assert ("stubborn", "killed by SIGKILL, waiting") in watch.events


def test_a_spent_budget_ends_the_run_and_says_so(tmp_path: Path) -> None:
    spec = small_spec("spent", 10_000, "budget.max_hours=0.0003")
    with (
        prepared(spec, tmp_path) as run,
        pytest.raises(RunFailed, match=r"budget of 0\.0003 hours"),
    ):
        drive_roles(run, usual_roles(run), Watch())


def test_after_a_killed_supervisor_nothing_is_left_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a supervisor with a role that will not die with it
    command = [sys.executable, "-m", "tests.runspec.local.fake_run", tmp_path, "40", "stubborn"]
    supervisor = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    run_dir = tmp_path / "small"
    log = run_dir / "logs" / "stubborn.log"
    eventually(lambda: log.exists() and "ignoring" in log.read_text(), "the stubborn role")
    eventually((run_dir / "metrics.jsonl").exists, "a first step")
    roles = roles_on_record(run_dir)
    held_by = f"held by process {supervisor.pid} on"
    with pytest.raises(RunLocked, match=held_by), prepared(small_spec(steps=40), tmp_path):
        pytest.fail("the run was opened twice")
    # when the supervisor is killed with no chance to say goodbye
    supervisor.kill()
    supervisor.wait()
    polite = [role.pid for role in roles.values() if role.name != "stubborn"]
    eventually(lambda: not any(birth(pid) for pid in polite), "the end of the roles")
    assert birth(roles["stubborn"].pid) == roles["stubborn"].born
    states = {name: role["state"] for name, role in read_status(run_dir)["roles"].items()}
    assert states == dict.fromkeys(("server", "learner", "worker"), "ended") | {
        "stubborn": "running"
    }
    # then its lock is no obstacle, the leftover is ended, and the run reaches its end
    monkeypatch.setattr(children, "LEFTOVER_TIMEOUT_S", 0.5)
    with prepared(small_spec(steps=40), tmp_path) as run:
        assert birth(roles["stubborn"].pid) is None
        outcome = drive_roles(run, usual_roles(run), Watch())
    assert outcome.kind == "finished"
    assert steps_trained(run_dir) == list(range(40))
