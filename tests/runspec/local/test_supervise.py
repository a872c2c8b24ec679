"""Real processes under the supervisor: they train, die, hang, fill disks, and take over changes."""

from __future__ import annotations

import io
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
from runspec.cli.view import PlainView
from runspec.core.errors import NotNow, UserError
from runspec.core.process import EXIT_FINAL
from runspec.core.spec.load import SpecFiles
from runspec.core.spec.resolved import load_resolved, spec_digest
from runspec.core.spec.schema import RunSpec
from runspec.local import children, problems, progress
from runspec.local.apply import RunFailed, drive
from runspec.local.children import birth
from runspec.local.fleet import Changed
from runspec.local.planning import make_plan
from runspec.local.problems import CheckedProblems
from runspec.local.processes import PreparedRun
from runspec.local.run_dir import RunLocked, hold, holder
from runspec.local.state import RequestRow, RoleRow, RunState
from runspec.local.supervisor_requests import (
    CHANGE,
    PAUSE,
    LiveRun,
    RequestRefused,
    change_request,
    readers_names,
    send_request,
)
from tests.runspec.cli.in_process import runspec
from tests.runspec.local.dashboard.exported import report
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

ENDLESS = small_spec(steps=10_000)


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


def json_status(run_dir: Path) -> dict[str, Any]:
    return json.loads(runspec("status", run_dir, "--json").stdout)


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
    assert [text for name, text in watch.events if name == "server"][1] == "running"
    # and the stage's result was shown, as was once that no rollout was right
    assert ("warm_start", "making version 0") in watch.events
    [unsolved] = [text for _, text in watch.events if "was right" in text]
    assert unsolved.startswith("no rollout of step ")
    assert json.loads((run.directory / "summary.json").read_text())["steps"] == 5
    assert report(run.directory / "report.html")["head"]["step"] == 5
    assert "making version 0" in (run.directory / "logs" / "warm_start.log").read_text()
    assert holder(run.directory) is None


def test_a_killed_role_is_started_again_and_no_step_is_lost(tmp_path: Path) -> None:
    # given a run that waits after two steps, and whose roles are killed, one after the other
    victims: dict[str, int] = {}

    def kill_each(watch: Watch) -> None:
        roles = {name: view for name, view in watch.roles.items() if view.state == "running"}
        back = all(roles[name].pid != pid for name, pid in victims.items() if name in roles)
        if len(watch.rows) < 2 or len(roles) < 3 or not back:
            return
        for name in ("learner", "worker", "server"):
            if name not in victims:
                victims[name] = roles[name].pid or 0
                os.kill(victims[name], signal.SIGKILL)
                return
        waits.unlink(missing_ok=True)

    with prepared(small_spec(steps=5), tmp_path) as run:
        waits, watch = run.directory / "hold", Watch(kill_each)
        waits.write_text("2")
        outcome = drive_roles(run, usual_roles(run), watch)
    # then each came back, and no step is missing or there twice
    assert outcome.kind == "finished"
    assert steps_trained(run.directory) == list(range(5))
    for name, pid in victims.items():
        assert (name, "killed by SIGKILL, starts again") in watch.events
        assert (watch.roles[name].restarts, birth(pid)) == (1, None)
    assert len(victims) == 3


def test_no_dead_role_is_called_running_after_a_supervisor_that_broke_down(tmp_path: Path) -> None:
    def break_down(watch: Watch) -> None:
        if {role.state for role in watch.roles.values()} == {"running"}:
            raise RuntimeError("a fault of our own")

    with prepared(ENDLESS, tmp_path) as run, pytest.raises(RuntimeError):
        drive_roles(run, usual_roles(run), Watch(break_down))
    assert {role.state for role in roles_on_record(run.directory).values()} == {"running"}
    status = read_status(run.directory)
    assert status["state"] == "failed"
    assert {(role["state"], role["pid"]) for role in status["roles"].values()} == {("ended", None)}


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
    assert "dying kept dying (ended with exit code 1)" in text
    assert "line 39" in text and "line 10\n" not in text
    # and so do the events, once for each death
    ends = [said for name, said in watch.events if name == "dying" and "exit code" in said]
    assert ends == [
        "ended with exit code 1, starts again: socket 7: the cable is cut",
        "ended with exit code 1, given up after 2 in a row: socket 7: the cable is cut",
    ]
    # and nobody is left, and a status afterwards says why, and what to do
    assert watch.roles["dying"].state == "failed"
    assert all(not view.pid for view in watch.roles.values())
    assert "(dying: socket 7: the cable is cut)" in runspec("status", run.directory).stdout
    status = json_status(run.directory)
    assert status["state"] == "failed"
    assert status["reason"].startswith("dying: socket 7: the cable is cut; remedy: mend it, then")


@pytest.mark.parametrize(
    ("behaviour", "cause"),
    [
        ("broken_plugin", "broken_plugin: KeyError: 'gold' at local/role.py:"),
        ("stalled", "stalled: step 3 stalled"),
    ],
)
def test_a_cause_that_another_try_would_meet_ends_the_run_at_once(
    tmp_path: Path, behaviour: str, cause: str
) -> None:
    # given a role that cannot go on, while another waits to be started again
    watch = Watch()
    with prepared(ENDLESS, tmp_path) as run, pytest.raises(RunFailed) as failure:
        others = [role("dying", run.directory), role(behaviour, run.directory)]
        drive_roles(run, [*usual_roles(run), *others], watch)
    # then it was started once, and its end is reported of nobody else
    assert watch.roles[behaviour].restarts == 0
    [said] = [each for each in watch.events if f"exit code {EXIT_FINAL}" in each[1]]
    error = cause.partition(": ")[2]
    assert said[0] == behaviour and f"exit code 4, stops the run: {error}" in said[1]
    # and message and status begin with what was raised, and where
    assert failure.value.exit_code == EXIT_FINAL
    assert str(failure.value).startswith(cause)
    assert f"{behaviour} says that the run cannot go on" in str(failure.value)
    status = json_status(run.directory)
    assert status["reason"].startswith(cause)
    assert status["reason"].endswith("from its newest checkpoint")
    conditions = {each["type"]: each["status"] for each in status["conditions"]}
    assert (conditions["Failed"], conditions["Stalled"]) == ("True", "False")


def test_what_the_grader_dropped_is_shown_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a run whose coordinator tells of groups that the grader dropped
    dropped = {"groups": 3, "newest": "p7: KeyError: 'gold'\x1b[2J at mine/grading.py:17"}
    status = {"waiting_for": "nobody", "dropped_by_grader": dropped}
    monkeypatch.setattr(progress, "coordinator_status", lambda url: status)
    monkeypatch.setattr(progress, "ASK_EVERY_S", 0.0)
    # when it is watched
    watch, out = Watch(), io.StringIO()
    with prepared(small_spec(steps=3), tmp_path) as run:
        watch.event = PlainView(3, out).event  # type: ignore[method-assign]
        drive_roles(run, usual_roles(run), watch)
    # then the panel's first line, the plain lines and the events say so, without control characters
    fault = "p7: KeyError: 'gold'?[2J at mine/grading.py:17"
    words = f"3 groups dropped by the grader, the newest: {fault}"
    assert f"{words}; waiting for nobody" in watch.notes
    assert out.getvalue().count(f"coordinator: {words}\n") == 1
    assert words in runspec("status", run.directory).stdout


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    # given a run that is asked to stop after three steps
    watch = Watch()
    with prepared(small_spec(steps=6), tmp_path) as run:
        (run.directory / "hold").write_text("3")
        outcome = drive_roles(run, usual_roles(run), watch, lambda: int(len(watch.rows) >= 3))
    assert outcome.kind == "interrupted"
    assert steps_trained(run.directory) == [0, 1, 2]
    assert not make_plan(run.spec, run.directory).finished
    # when it is opened again
    (run.directory / "hold").unlink()
    with prepared(small_spec(steps=6), tmp_path) as again:
        outcome = drive_roles(again, usual_roles(again), Watch())
    # then it ends, on the same endpoints, every step trained once
    assert outcome.kind == "finished"
    assert steps_trained(run.directory) == list(range(6))
    assert again.endpoints == run.endpoints
    assert make_plan(run.spec, run.directory).finished
    assert not make_plan(small_spec(steps=25), run.directory).finished, "more may be asked for"


def test_a_second_request_kills_what_will_not_end(tmp_path: Path) -> None:
    watch = Watch()

    def requests() -> int:
        ready = watch.roles.get("stubborn") and watch.roles["stubborn"].state == "running"
        return 2 if ready and len(watch.rows) >= 2 else 0

    with prepared(ENDLESS, tmp_path) as run:
        roles = [*usual_roles(run), role("stubborn", run.directory)]
        outcome = drive_roles(run, roles, watch, requests)
    assert outcome.kind == "interrupted"
    assert ("stubborn", "killed by SIGKILL, waiting") in watch.events


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
    roles = roles_on_record(run_dir)
    held_by = f"held by process {supervisor.pid} on"
    with pytest.raises(RunLocked, match=held_by), prepared(small_spec(steps=5), tmp_path):
        pytest.fail("the run was opened twice")
    # when the supervisor is killed with no chance to say goodbye
    supervisor.kill()
    supervisor.wait()
    polite = [role.pid for role in roles.values() if role.name != "stubborn"]
    eventually(lambda: not any(birth(pid) for pid in polite), "the end of the roles")
    assert birth(roles["stubborn"].pid) == roles["stubborn"].born
    states = {name: role["state"] for name, role in read_status(run_dir)["roles"].items()}
    ended = dict.fromkeys(("server", "learner", "worker"), "ended")
    assert states == ended | {"stubborn": "running"}
    (run_dir / "hold").unlink()
    # then its lock is no obstacle, the leftover is ended, and the run reaches its end
    monkeypatch.setattr(children, "LEFTOVER_TIMEOUT_S", 0.5)
    with prepared(small_spec(steps=5), tmp_path) as run:
        assert birth(roles["stubborn"].pid) is None
        outcome = drive_roles(run, usual_roles(run), Watch())
    assert outcome.kind == "finished"
    assert steps_trained(run_dir) == list(range(5))


class OnFullDisk(Watch):
    """Fills the disk for the run's state, then for a killed worker's log, and frees it when told.

    Args:
        state: of the run; a limit on its pages stands for its disk.
        freed: whether the disk has room again once the supervisor waits.
    """

    def __init__(self, state: RunState, log: Path, *, freed: bool) -> None:
        super().__init__()
        self._state, self._log, self._freed = state, log, freed
        self.waits = log.parent.parent / "hold"
        self.waits.touch()
        self.victims: list[int] = []

    def show(self, rows: Any, roles: Any, note: str) -> None:
        super().show(rows, roles, note)
        everyone_runs = {role.state for role in roles} == {"running"}
        if not self.victims and len(roles) == 3 and everyone_runs:
            self.victims = [role.pid for role in self.roles.values()]
            self._state._db.execute("PRAGMA max_page_count = 1")  # no more than there are
            self._state.add_event("test", "x" * 100_000)
            self._log.unlink()
            self._log.symlink_to("/dev/full")
            os.kill(self.roles["worker"].pid or 0, signal.SIGKILL)
        elif self.victims and everyone_runs and self.roles["worker"].restarts:
            self.waits.unlink(missing_ok=True)

    def event(self, role: str, text: str) -> None:
        super().event(role, text)
        if text.startswith("waits up to") and self._freed:
            self._state._db.execute("PRAGMA max_page_count = 1000000")
            self._log.unlink() if self._log.is_symlink() else None


@pytest.mark.parametrize("freed", [True, False])
def test_a_run_waits_for_a_full_disk_and_goes_on_or_ends_where_that_stays_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, freed: bool
) -> None:
    monkeypatch.setattr("runspec.local.apply.STORAGE_S", 6000.0 if freed else 0.0)
    monkeypatch.setattr("runspec.local.state.AGAIN_S", 0.0)
    with prepared(small_spec(steps=3), tmp_path) as run, closing(RunState(run.directory)) as state:
        watch = OnFullDisk(state, run.directory / "logs" / "worker.log", freed=freed)
        roles = usual_roles(run)
        if freed:
            # given a disk that is full until somebody makes room, then the run goes on to its end
            outcome = drive(run, [], lambda run: roles, state, watch, lambda: 0)
            assert outcome.kind == "finished"
            assert steps_trained(run.directory) == [0, 1, 2]
        else:
            # given one that stays full, then the run ends, and no process is left
            with pytest.raises(NotNow, match=r"cannot use the run's state: .*full") as error:
                drive(run, [], lambda run: roles, state, watch, lambda: 0)
            assert "free disk space" in error.value.remedy
            assert len(watch.victims) == 3 and not any(map(birth, watch.victims))
    told = [text for name, text in watch.events if name == "supervisor"]
    full = [text.partition(": ")[2] for text in told if text.startswith("waits up to")]
    assert "state.db: cannot use the run's state: " in full[0]
    if freed:
        assert "worker.log: cannot start worker: " in full[1]
        assert [text for text in told if text.startswith("goes on after")][1:]
        assert ("worker", "killed by SIGKILL, starts again") in watch.events


@pytest.fixture
def run(tmp_path: Path) -> PreparedRun:
    """A run that was opened once and let go."""
    with prepared(ENDLESS, tmp_path) as opened:
        return opened


@pytest.fixture
def state(run: PreparedRun) -> Iterator[RunState]:
    with closing(RunState(run.directory)) as opened:
        yield opened


def live_run(run: PreparedRun, state: RunState) -> LiveRun:
    live = LiveRun(run, state, lambda run: [])
    live.budget_ends_at = lambda: live.run.spec.budget.max_hours  # type: ignore[method-assign]
    return live


def request(payload: Any, kind: str = CHANGE) -> RequestRow:
    return RequestRow(1, 0.0, kind, json.dumps(payload), "asked", "")


def changed(*overrides: str) -> RunSpec:
    return small_spec("small", 10_000, *overrides)


def test_a_change_is_on_disk_and_in_the_history_before_any_role_is_told(
    run: PreparedRun, state: RunState
) -> None:
    # given a new budget and a new timeout, when the supervisor takes them
    new = changed("budget.max_hours=2.0", "verify.lease_timeout=70s")
    live = live_run(run, state)
    taken = live.take(request(change_request(new, serial=1)))
    # then they are true of the run, and the readers are to be renewed in their order
    assert live.run.spec == load_resolved(run.directory) == new
    assert taken.change == Changed(5, 2.0, ("coordinator", "validator-0", "volunteers-0"))
    assert [row.serial for row in state.applied()] == [1, 2]
    assert state.applied()[-1].spec_digest == spec_digest(new)
    assert state.applied()[-1].what == [
        'verify.lease_timeout: "1m" there, "70s" now',
        "budget.max_hours: 1.0 there, 2.0 now",
    ]
    # and where signatures must last longer, those who serve roles.json read the new one
    new = changed("budget.max_hours=100.0", "verify.lease_timeout=70s")
    taken = live.take(request(change_request(new, serial=2)))
    assert taken.change == Changed(5, 100.0, ("coordinator", "publisher"))
    # and roles of other machines are not renewed here
    readers = ("coordinator", "validators", "samplers")
    here = small_spec("small", 5, "placement.roles=[volunteers]")
    assert readers_names(readers, here) == ["coordinator", "volunteers-0"]


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (change_request(changed("steps=20000"), 1), "steps: 10000 there, 20000 now"),
        (change_request(changed("seed=7"), 1), "seed"),
        (change_request(changed("name=other"), 1), "name"),
        (change_request(changed("budget.max_hours=2.0"), 7), "serial 1, not 7"),
        ({"spec": {"version": "runspec/v1"}, "serial": 1}, "not a resolved run spec"),
        ({"spec": 3, "serial": 1}, "not a resolved run spec"),
        ({"serial": 1}, "not a change of a spec"),
        ([], "not a change of a spec"),
    ],
)
def test_what_a_live_run_cannot_take_over_is_refused_and_changes_nothing(
    run: PreparedRun, state: RunState, payload: Any, said: str
) -> None:
    live = live_run(run, state)
    with pytest.raises(UserError, match=said):
        live.take(request(payload))
    assert live.run.spec == load_resolved(run.directory) == ENDLESS
    assert state.serial() == 1


def test_a_supervisor_that_died_at_a_request_is_told_from_one_that_is_not_there(
    run: PreparedRun, state: RunState
) -> None:
    with pytest.raises(RequestRefused, match="gone") as refused:
        send_request(run.directory, PAUSE, {})
    assert refused.value.exit_code == 5
    # given a supervisor that has taken a change, and renews roles
    with ThreadPoolExecutor(1) as pool:
        with hold(run.directory):
            asked = pool.submit(send_request, run.directory, PAUSE, {})
            eventually(lambda: bool(state.asked()), "the request")
            state.answer(state.asked()[0].id, "taken", "waits for coordinator to run again")
        # when it is gone, then whoever asked reads that, and what it was at
        with pytest.raises(RequestRefused, match=r"supervisor is gone.*waits for coordinator"):
            asked.result()
    # and what a dead supervisor was asked is not done by the next
    number = state.ask(PAUSE, {})
    state.begin("small", "digest", 5)
    found = state.request(number)
    assert state.asked() == [] and found is not None and found.state == "refused"


class Asking(Watch):
    """Does something once a few steps are trained, in a thread; asks for a stop when it is done."""

    def __init__(self, do: Callable[[], Any]) -> None:
        super().__init__()
        self._do = do
        self._pool = ThreadPoolExecutor(1)
        self.result: Future[Any] | None = None

    def show(self, rows: Any, roles: Any, note: str) -> None:
        super().show(rows, roles, note)
        everyone_runs = all(view.state == "running" for view in roles)
        if self.result is None and len(rows) >= 2 and everyone_runs:
            self.result = self._pool.submit(self._do)

    def __call__(self) -> int:
        return int(self.result is not None and self.result.done())


def drive_named(run: PreparedRun, watch: Asking) -> Any:
    """The usual roles under the names that a real run has."""
    server, learner, _ = usual_roles(run)
    worker = role("worker", run.directory, name="volunteers-0")
    outcome = drive_roles(run, [replace(server, name="coordinator"), learner, worker], watch, watch)
    assert watch.result is not None and outcome.kind == "interrupted"
    return watch.result


def apply(runs_dir: Path, *overrides: str) -> int:
    sets = ["name=small", "steps=10000", *overrides]
    return apply_command(SpecFiles(TARGET_SHORT, "laptop", None, sets), False, runs_dir)


@pytest.fixture
def problems_are_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "check_problems", lambda *_: CheckedProblems([], []))


def test_apply_hands_hot_and_rolling_changes_to_a_live_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask() -> int:
        # when an `apply` changes what needs a stop, then that is left to whoever pauses
        changes = r"(?s)samplers\.volunteers\.replicas: 1 there, 2 now.*runspec pause"
        with pytest.raises(RequestRefused, match=changes) as refused:
            apply(tmp_path, "samplers.volunteers.replicas=2")
        assert refused.value.exit_code == 5
        # when another one changes what a live run may take over
        return apply(tmp_path, "budget.max_hours=2.0", "verify.lease_timeout=70s")

    watch = Asking(ask)
    with prepared(ENDLESS, tmp_path) as run:
        result = drive_named(run, watch)
    # then that command waited until every reader was running again, one after the other
    assert result.result() == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "rolling  verify.lease_timeout" in said and "hot      budget.max_hours" in said
    assert "The supervisor waits for coordinator, then volunteers-0 to run again" in said
    assert "small: taken over (serial 2)" in said
    turns = [(name, text.split()[0]) for name, text in watch.events if name != "learner"]
    start = turns.index(("coordinator", "renewing"))
    assert [turn for turn in turns[start:] if turn[1] in ("renewing", "running")] == [
        (name, what) for name in ("coordinator", "volunteers-0") for what in ("renewing", "running")
    ]
    # and the learner went on meanwhile, under the new spec's name on disk
    assert watch.roles["learner"].restarts == 0
    assert load_resolved(run.directory).verify.lease_timeout == 70.0


def test_of_two_who_start_a_run_at_once_one_is_refused(
    tmp_path: Path, problems_are_sound: None
) -> None:
    # given someone who has the lock of a run, and has not written its spec yet
    (tmp_path / "small").mkdir()
    # when another one applies
    held = pytest.raises(RunLocked, match="the run is alive: held by process")
    with hold(tmp_path / "small"), held:
        apply(tmp_path)
    assert not (tmp_path / "small" / "spec.json").exists()


def test_a_change_that_this_machine_cannot_run_is_never_handed_over(
    run: PreparedRun, state: RunState, capsys: pytest.CaptureFixture[str]
) -> None:
    with hold(run.directory):
        assert apply(run.directory.parent, "verify.engine=abacus") == 1
    assert "no prefill engine 'abacus'" in capsys.readouterr().err
    assert state.asked() == []
