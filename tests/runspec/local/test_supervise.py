"""Real processes under the supervisor: they train, die, hang, fill disks, and take over changes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runspec.cli.apply import apply_command
from runspec.cli.status import read_status
from runspec.core.errors import NotNow, UserError
from runspec.core.process import EXIT_FINAL, load_endpoints
from runspec.core.schema import RunSpec
from runspec.core.schema.load import load_resolved, spec_digest
from runspec.local import backend, progress
from runspec.local import supervisor as requests
from runspec.local.apply import RunFailed, drive
from runspec.local.backend import birth
from runspec.local.fleet import Changed
from runspec.local.run_dir import RunLocked, hold, holder
from runspec.local.state import RequestRow, RoleRow, RunState
from runspec.local.supervisor import LiveRun
from tests.runspec.cli.in_process import runspec
from tests.runspec.local.dashboard.made_run import report
from tests.runspec.local.fake_run import (
    ROOT,
    TARGET_SHORT,
    drive_roles,
    prepared,
    role,
    small_spec,
    usual_roles,
)
from tests.waiting import eventually

pytestmark = pytest.mark.slow  # real processes, killed and waited for


def endless(*overrides: str) -> RunSpec:
    return small_spec("small", 10_000, *overrides)


ENDLESS = endless()


class Watch:
    """Keeps what it was shown, and calls `act` at every look."""

    def __init__(self, act: Callable[[Watch], None] = lambda watch: None) -> None:
        self.act = act
        self.rows: Sequence[Any] = ()
        self.roles: dict[str, RoleRow] = {}
        self.notes: list[str] = []
        self.events: list[tuple[str, str]] = []

    def event(self, role: str, text: str, kind: str = "note") -> None:
        self.events.append((role, text))

    def show(self, rows: Sequence[Any], roles: Sequence[RoleRow], note: str) -> None:
        self.rows, self.roles = rows, {role.name: role for role in roles}
        self.notes.append(note)
        self.act(self)


def steps_trained(run_dir: Path) -> list[int]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_a_run_ends_with_its_learner_and_leaves_a_summary(tmp_path: Path) -> None:
    # given a run of a stage and three roles, whose learner waits until the server is up
    with prepared(small_spec(steps=5), tmp_path) as run:
        waits = run.directory / "hold"
        waits.touch()

        def let_go(watch: Watch) -> None:
            if "server" in watch.roles and watch.roles["server"].state == "running":
                waits.unlink(missing_ok=True)

        watch = Watch(let_go)
        # when it is driven to its end
        stage = role("warm_start", run.directory)
        outcome = drive_roles(run, usual_roles(run), watch, stages=[stage])
    # then everything was trained, everyone has ended, and the results lie there
    assert outcome.kind == "finished"
    assert steps_trained(run.directory) == [0, 1, 2, 3, 4]
    assert {view.state for view in watch.roles.values()} == {"finished"}
    # and the stage's result was shown, as was once that no rollout was right
    assert ("warm_start", "making version 0") in watch.events
    assert sum("was right" in text for _, text in watch.events) == 1
    assert json.loads((run.directory / "summary.json").read_text())["steps"] == 5
    head = report(run.directory / "report.html")["head"]
    assert head["step"] == 5 and head["now"].startswith("The run is finished.")
    # and the report, which the supervisor wrote, calls nothing alive
    assert [condition for condition, *_ in head["conditions"]][-1:] == ["Finished"]
    assert {"Alive", "Training"}.isdisjoint(condition for condition, *_ in head["conditions"])
    assert holder(run.directory) is None


def test_a_role_that_keeps_dying_ends_the_run_with_its_last_lines(tmp_path: Path) -> None:
    # given a role that dies at every start, forgiven once
    spec, watch = small_spec("dying", 5, "placement.restarts=1"), Watch()
    # when the run is driven
    with prepared(spec, tmp_path) as run, pytest.raises(RunFailed) as failure:
        drive_roles(run, [role("worker", run.directory), role("dying", run.directory)], watch)
    # then it fails with the role's last error, its remedy and its last twenty lines
    text = str(failure.value)
    assert text.startswith("dying: socket 7: the cable is cut\ndying kept dying")
    assert "\n  remedy: mend it, then apply again: the run goes on from its newest" in text
    assert failure.value.exit_code == 1
    assert "line 39" in text and "line 10\n" not in text
    # and so do the events, once for each death
    ends = [said for name, said in watch.events if name == "dying" and "exit code" in said]
    assert ends == [
        "ended with exit code 1, starts again: socket 7: the cable is cut",
        "ended with exit code 1, given up after 2 in a row: socket 7: the cable is cut",
    ]
    # and nobody is left, and a status afterwards says why, and what to do
    assert all(not view.pid for view in watch.roles.values())
    status = read_status(run.directory)
    assert status["state"] == "failed"
    assert status["reason"].startswith("dying: socket 7: the cable is cut; remedy: mend it, then")


def test_a_cause_that_another_try_would_meet_ends_the_run_at_once(tmp_path: Path) -> None:
    # given a role that cannot go on, while another waits to be started again
    watch = Watch()
    with prepared(ENDLESS, tmp_path) as run, pytest.raises(RunFailed) as failure:
        others = [role(name, run.directory) for name in ("dying", "broken_plugin")]
        drive_roles(run, [*usual_roles(run), *others], watch)
    # then it was started once, and its end is reported of nobody else
    assert watch.roles["broken_plugin"].restarts == 0
    error = "KeyError: 'gold' at local/role.py:"
    [(name, text)] = [each for each in watch.events if f"exit code {EXIT_FINAL}" in each[1]]
    assert name == "broken_plugin" and f"exit code 4, stops the run: {error}" in text
    # and message and status begin with what was raised, and where
    assert failure.value.exit_code == EXIT_FINAL
    assert str(failure.value).startswith(f"broken_plugin: {error}")
    assert read_status(run.directory)["reason"].startswith(f"broken_plugin: {error}")


def test_what_the_grader_dropped_is_shown_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a run whose coordinator tells of groups that the grader dropped
    dropped = {"groups": 3, "newest": "p7: KeyError: 'gold'\x1b[2J at mine/grading.py:17"}
    status = {"waiting_for": "nobody", "dropped_by_grader": dropped}
    monkeypatch.setattr(progress, "coordinator_status", lambda url: status)
    monkeypatch.setattr(progress, "ASK_EVERY_S", 0.0)
    # when it is watched
    watch = Watch()
    with prepared(small_spec(steps=3), tmp_path) as run:
        drive_roles(run, usual_roles(run), watch)
    # then the panel's first line, the events and the status say so, without control characters
    fault = "p7: KeyError: 'gold'?[2J at mine/grading.py:17"
    words = f"3 groups dropped by the grader, the newest: {fault}"
    assert f"{words}; waiting for nobody" in watch.notes
    assert watch.events.count(("coordinator", words)) == 1
    assert words in runspec("status", run.directory).stdout


def test_a_second_request_kills_what_will_not_end(tmp_path: Path) -> None:
    watch = Watch()

    def stop_requests() -> int:
        ready = watch.roles.get("stubborn") and watch.roles["stubborn"].state == "running"
        return 2 if ready and len(watch.rows) >= 2 else 0

    with prepared(ENDLESS, tmp_path) as run:
        roles = [*usual_roles(run), role("stubborn", run.directory)]
        outcome = drive_roles(run, roles, watch, stop_requests)
    assert outcome.kind == "interrupted"
    assert ("stubborn", "killed by SIGKILL, stopped") in watch.events


def test_a_spent_budget_ends_the_run_and_says_so(tmp_path: Path) -> None:
    spec = small_spec("spent", 10_000, "budget.max_hours=0.0001")
    spent = pytest.raises(RunFailed, match=r"budget of 0\.0001 hours is used up")
    with prepared(spec, tmp_path) as run, spent:
        drive_roles(run, usual_roles(run), Watch())


def test_after_a_killed_supervisor_nothing_is_left_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a supervisor with a role that will not die with it
    command = [sys.executable, "-m", "tests.runspec.local.fake_run", tmp_path, "5", "stubborn"]
    run_dir = tmp_path / "small"
    run_dir.mkdir()
    (run_dir / "hold").write_text("1")
    supervisor = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    log = run_dir / "logs" / "stubborn.log"
    eventually(lambda: log.exists() and "ignoring" in log.read_text(), "the stubborn role")
    eventually((run_dir / "metrics.jsonl").exists, "a first step")
    roles = {}

    def all_run() -> bool:
        with closing(RunState(run_dir)) as state:
            roles.update((role.name, role) for role in state.roles())
        return [role.state for role in roles.values()] == ["running"] * 4

    eventually(all_run, "the supervisor's word that all run")
    endpoints = load_endpoints(run_dir)
    held_by = f"held by process {supervisor.pid} on"
    with pytest.raises(RunLocked, match=held_by), prepared(small_spec(steps=5), tmp_path):
        pytest.fail("the run was opened twice")
    # when the supervisor is killed with no chance to say goodbye
    supervisor.kill()
    supervisor.wait()
    polite = [role.pid for role in roles.values() if role.name != "stubborn"]
    eventually(lambda: not any(birth(pid) for pid in polite), "the end of the roles")
    states = {name: role["state"] for name, role in read_status(run_dir)["roles"].items()}
    ended = dict.fromkeys(("server", "learner", "worker"), "ended")
    assert states == ended | {"stubborn": "running"}
    (run_dir / "hold").unlink()
    # then its lock is no obstacle, the leftover is ended, and the run reaches its end
    monkeypatch.setattr(backend, "LEFTOVER_TIMEOUT_S", 0.5)
    with prepared(small_spec(steps=5), tmp_path) as run:
        eventually(lambda: birth(roles["stubborn"].pid) is None, "the end of the leftover")
        outcome = drive_roles(run, usual_roles(run), Watch())
    # on the same endpoints, every step trained once
    assert outcome.kind == "finished"
    assert steps_trained(run_dir) == list(range(5))
    assert run.endpoints == endpoints


@pytest.mark.parametrize("freed", [True, False])
def test_a_run_waits_for_a_full_disk_and_goes_on_or_ends_where_that_stays_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, freed: bool
) -> None:
    monkeypatch.setattr("runspec.local.apply.STORAGE_S", 6000.0 if freed else 0.0)
    monkeypatch.setattr("runspec.local.state.AGAIN_S", 0.0)
    victims: list[int] = []

    def fill(watch: Watch) -> None:
        """Fills the disk for the run's state, by a limit on its pages, and for a killed worker's
        log."""
        everyone_runs = {role.state for role in watch.roles.values()} == {"running"}
        if not victims and len(watch.roles) == 3 and everyone_runs:
            victims.extend(role.pid or 0 for role in watch.roles.values())
            state._db.execute("PRAGMA max_page_count = 1")  # no more than there are
            state.add_event("test", "x" * 100_000)
            log.unlink()
            log.symlink_to("/dev/full")
            os.kill(watch.roles["worker"].pid or 0, signal.SIGKILL)
        elif victims and everyone_runs and watch.roles["worker"].restarts:
            waits.unlink(missing_ok=True)

    class Freeing(Watch):
        def event(self, role: str, text: str, kind: str = "note") -> None:
            super().event(role, text, kind)
            if text.startswith("waits up to") and freed:
                state._db.execute("PRAGMA max_page_count = 1000000")
                log.unlink() if log.is_symlink() else None

    watch = Freeing(fill)
    with prepared(small_spec(steps=3), tmp_path) as run, closing(RunState(run.directory)) as state:
        log, waits = run.directory / "logs" / "worker.log", run.directory / "hold"
        waits.touch()
        roles = usual_roles(run)
        if freed:
            # given a disk that is full until somebody makes room, then the run goes on to its end
            drive(run, [], lambda run: roles, state, watch, lambda: 0)
            assert steps_trained(run.directory) == [0, 1, 2]
        else:
            # given one that stays full, then the run ends, and no process is left
            with pytest.raises(NotNow, match=r"cannot use the run's state: .*full") as error:
                drive(run, [], lambda run: roles, state, watch, lambda: 0)
            assert "free disk space" in error.value.remedy
            assert len(victims) == 3 and not any(map(birth, victims))
    full = [text.partition(": ")[2] for _, text in watch.events if text.startswith("waits up to")]
    assert "state.db: cannot use the run's state: " in full[0]
    assert not freed or "worker.log: cannot start worker: " in full[1]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRun]:
    """The supervisor's side of a run that was opened once and let go."""
    with prepared(ENDLESS, tmp_path) as run:
        pass
    with closing(RunState(run.directory)) as state:
        found = LiveRun(run, state)
        found.budget_ends_at = lambda: found.run.spec.budget.max_hours  # type: ignore[method-assign]
        yield found


def take(live: LiveRun, payload: Any) -> Any:
    return live.take(RequestRow(1, 0.0, requests.CHANGE, json.dumps(payload), "asked", ""))


def test_a_change_is_on_disk_and_in_the_history_before_any_role_is_told(live: LiveRun) -> None:
    # given a new budget and a new timeout, when the supervisor takes them
    new = endless("budget.max_hours=2.0", "verify.lease_timeout=70s")
    taken = take(live, requests.change_request(new, serial=1))
    # then they are true of the run, and the readers are to be renewed in their order
    assert live.run.spec == load_resolved(live.run.directory) == new
    assert taken == Changed(5, 2.0, ("coordinator", "validator-0", "volunteers-0"))
    with closing(RunState(live.run.directory)) as state:
        assert [row.serial for row in state.applied()] == [1, 2]
        assert state.applied()[-1].spec_digest == spec_digest(new)
        what = state.applied()[-1].what
        assert 'verify.lease_timeout: "1m" there, "70s" now' in what and len(what) == 2
    # and where signatures must last longer, those who serve roles.json read the new one
    new = endless("budget.max_hours=100.0", "verify.lease_timeout=70s")
    taken = take(live, requests.change_request(new, serial=2))
    assert taken == Changed(5, 100.0, ("coordinator", "publisher"))
    # and roles of other machines are not renewed here
    here = small_spec("small", 5, "placement.roles=[volunteers]")
    readers = requests.readers_names(("coordinator", "validators", "samplers"), here)
    assert readers == ["coordinator", "volunteers-0"]


def test_what_a_live_run_cannot_take_over_is_refused_and_changes_nothing(live: LiveRun) -> None:
    refused: list[tuple[Any, str]] = [
        (requests.change_request(endless("steps=20000"), 1), "steps: 10000 there, 20000 now"),
        (requests.change_request(endless("name=other"), 1), "name"),
        (requests.change_request(endless("budget.max_hours=2.0"), 7), "serial 1, not 7"),
        ({"spec": {"version": "runspec/v1"}, "serial": 1}, "not a resolved run spec"),
        ([], "not a change of a spec"),
    ]
    for payload, said in refused:
        with pytest.raises(UserError, match=said):
            take(live, payload)
        assert live.run.spec == load_resolved(live.run.directory) == ENDLESS
        with closing(RunState(live.run.directory)) as state:
            assert state.serial() == 1


def test_a_supervisor_that_died_at_a_request_is_told_from_one_that_is_not_there(
    live: LiveRun,
) -> None:
    run_dir = live.run.directory
    with pytest.raises(requests.RequestRefused, match="gone") as refused:
        requests.send_request(run_dir, requests.PAUSE, {})
    assert refused.value.exit_code == 5
    # given a supervisor that has taken a change, and renews roles
    with closing(RunState(run_dir)) as state, ThreadPoolExecutor(1) as pool:
        with hold(run_dir):
            asked = pool.submit(requests.send_request, run_dir, requests.PAUSE, {})
            eventually(lambda: bool(state.asked()), "the request")
            state.answer(state.asked()[0].id, "taken", "waits for coordinator to run again")
        # when it is gone, then whoever asked reads that, and what it was at
        with pytest.raises(
            requests.RequestRefused, match=r"supervisor is gone.*waits for coordinator"
        ):
            asked.result()
        # and what a dead supervisor was asked is not done by the next
        state.ask(requests.PAUSE, {})
        state.begin("small", "digest", 5)
        assert state.asked() == []


def apply(runs_dir: Path, *overrides: str) -> int:
    sets = ["name=small", "steps=10000", *overrides]
    return apply_command(TARGET_SHORT, "laptop", None, sets, runs_dir=runs_dir)


def test_apply_hands_hot_and_rolling_changes_to_a_live_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[Future[int]] = []
    looks, request = list[int](), RunState.request
    monkeypatch.setattr(RunState, "request", lambda *of: looks.append(of[1]) or request(*of))

    def ask() -> int:
        # when an `apply` changes what needs a stop, then that is left to whoever pauses
        changes = r"(?s)samplers\.volunteers\.replicas: 1 there, 2 now.*runspec pause"
        with pytest.raises(requests.RequestRefused, match=changes) as refused:
            apply(tmp_path, "samplers.volunteers.replicas=2")
        assert refused.value.exit_code == 5
        # when another one changes what a live run may take over
        return apply(tmp_path, "budget.max_hours=2.0", "verify.lease_timeout=70s")

    def ask_once(watch: Watch) -> None:
        everyone_runs = {role.state for role in watch.roles.values()} == {"running"}
        if not results and len(watch.rows) >= 2 and everyone_runs:
            results.append(pool.submit(ask))
        if watch.roles["coordinator"].state == "renewing":  # until whoever asked has been told so
            enough = len(looks) + 2
            eventually(lambda: len(looks) >= enough, "two looks of whoever asked")

    # given roles under the names that a real run has
    watch = Watch(ask_once)
    with prepared(ENDLESS, tmp_path) as run, ThreadPoolExecutor(1) as pool:
        server, learner, _ = usual_roles(run)
        worker = role("worker", run.directory, name="volunteers-0")
        roles = [replace(server, name="coordinator"), learner, worker]
        drive_roles(run, roles, watch, lambda: int(any(each.done() for each in results)))
    # then that command waited until every reader was running again, one after the other
    said = capsys.readouterr()
    assert results[0].result() == 0, said.err
    assert "rolling  verify.lease_timeout" in said.out and "hot      budget.max_hours" in said.out
    assert "The supervisor waits for coordinator, then volunteers-0 to run again" in said.out
    assert "small: taken over (serial 2)" in said.out
    turns = [(name, text.split()[0]) for name, text in watch.events if name != "learner"]
    start = turns.index(("coordinator", "renewing"))
    assert [turn for turn in turns[start:] if turn[1] in ("renewing", "running")] == [
        (name, what) for name in ("coordinator", "volunteers-0") for what in ("renewing", "running")
    ]
    # and the learner went on meanwhile, under the new spec's name on disk
    assert watch.roles["learner"].restarts == 0
    assert load_resolved(run.directory).verify.lease_timeout == 70.0


def test_a_change_that_this_machine_cannot_run_is_never_handed_over(
    live: LiveRun, capsys: pytest.CaptureFixture[str]
) -> None:
    with hold(live.run.directory):
        assert apply(live.run.directory.parent, "verify.engine=abacus") == 1
    assert "no prefill engine 'abacus'" in capsys.readouterr().err
    with closing(RunState(live.run.directory)) as state:
        assert state.asked() == []
