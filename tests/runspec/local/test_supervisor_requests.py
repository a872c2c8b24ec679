"""What a live run takes over: on the supervisor's side, and by real processes that are renewed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runspec.cli.apply import apply_command
from runspec.core.errors import UserError
from runspec.core.spec.load import SpecFiles
from runspec.core.spec.resolved import load_resolved, spec_digest
from runspec.core.spec.schema import RunSpec
from runspec.local.fleet import Changed, Outcome
from runspec.local.processes import PreparedRun
from runspec.local.run_dir import RunLocked, hold
from runspec.local.state import RequestRow, RunState
from runspec.local.supervisor_requests import (
    CHANGE,
    PAUSE,
    LiveRun,
    RequestRefused,
    change_request,
    readers_names,
    send_request,
)
from tests.runspec.local.fake_run import (
    TARGET_SHORT,
    drive_roles,
    prepared,
    role,
    small_spec,
    usual_roles,
)
from tests.runspec.local.test_supervise import DEADLINE_S, Watch
from tests.waiting import eventually

SPEC = small_spec(steps=10_000)


@pytest.fixture
def run(tmp_path: Path) -> PreparedRun:
    """A run that was opened once and let go."""
    with prepared(SPEC, tmp_path) as opened:
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
    # given a new budget and a new timeout
    new = changed("budget.max_hours=2.0", "verify.lease_timeout=70s")
    live = live_run(run, state)
    # when the supervisor takes it
    taken = live.take(request(change_request(new, serial=1)))
    # then it is true of the run, and the readers are to be renewed in their order
    assert live.run.spec == load_resolved(run.directory) == new
    assert taken.change == Changed(5, 2.0, ("coordinator", "validator-0", "volunteers-0"))
    assert [row.serial for row in state.applied()] == [1, 2]
    assert state.applied()[-1].spec_digest == spec_digest(new)
    assert state.applied()[-1].what == [
        'verify.lease_timeout: "1m" there, "70s" now',
        "budget.max_hours: 1.0 there, 2.0 now",
    ]


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
    assert live.run.spec == load_resolved(run.directory) == SPEC
    assert state.serial() == 1


def test_a_longer_budget_is_signed_for_and_whoever_hands_signatures_out_is_renewed(
    run: PreparedRun, state: RunState
) -> None:
    # given a run whose keys are signed for a day, when it gets a hundred hours
    taken = live_run(run, state).take(request(change_request(changed("budget.max_hours=100.0"), 1)))
    # then those who serve roles.json read the new one
    assert taken.change == Changed(5, 100.0, ("coordinator", "publisher"))


def test_nobody_there_is_said_at_once(run: PreparedRun) -> None:
    with pytest.raises(RequestRefused, match="gone") as refused:
        send_request(run.directory, PAUSE, {})
    assert refused.value.exit_code == 5


def test_a_supervisor_that_died_at_it_is_told_from_one_that_refused(
    run: PreparedRun, state: RunState
) -> None:
    # given a supervisor that has taken a change, and renews roles
    with ThreadPoolExecutor(1) as pool:
        with hold(run.directory):
            asked = pool.submit(send_request, run.directory, PAUSE, {})
            eventually(lambda: bool(state.asked()), "the request")
            state.answer(state.asked()[0].id, "taken", "waits for coordinator to run again")
        # when it is gone, then whoever asked reads that, and what it was at
        with pytest.raises(RequestRefused, match=r"supervisor is gone.*waits for coordinator"):
            asked.result(DEADLINE_S)


def test_what_a_dead_supervisor_was_asked_is_not_done_by_the_next(
    run: PreparedRun, state: RunState
) -> None:
    number = state.ask(PAUSE, {})
    state.begin("small", "digest", 5)
    assert state.asked() == []
    found = state.request(number)
    assert found is not None and found.state == "refused"


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


def drive_named(run: PreparedRun, watch: Asking) -> Outcome:
    """The usual roles under the names that a real run has."""
    server, learner, _ = usual_roles(run)
    worker = role("worker", run.directory, name="volunteers-0")
    return drive_roles(run, [replace(server, name="coordinator"), learner, worker], watch, watch)


def apply(runs_dir: Path, *overrides: str) -> int:
    sets = ["name=small", "steps=10000", *overrides]
    return apply_command(SpecFiles(TARGET_SHORT, "laptop", None, sets), False, runs_dir)


@pytest.mark.slow
def test_apply_hands_hot_and_rolling_changes_to_a_live_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a run that is up
    watch = Asking(lambda: apply(tmp_path, "budget.max_hours=2.0", "verify.lease_timeout=70s"))
    with prepared(SPEC, tmp_path) as run:
        # when another `apply` changes what it may take over
        outcome = drive_named(run, watch)
    # then that command waited until every reader was running again, one after the other
    assert watch.result is not None and watch.result.result() == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "rolling  verify.lease_timeout" in said and "hot      budget.max_hours" in said
    assert "The supervisor waits for coordinator, then volunteers-0 to run again" in said
    assert "small: taken over (serial 2)" in said
    turns = [(name, text.split()[0]) for name, text in watch.events if name != "learner"]
    start = turns.index(("coordinator", "renewing"))
    assert [turn for turn in turns[start:] if turn[1] in ("renewing", "running")] == [
        ("coordinator", "renewing"),
        ("coordinator", "running"),
        ("volunteers-0", "renewing"),
        ("volunteers-0", "running"),
    ]
    # and the learner went on meanwhile, under the new spec's name on disk
    assert watch.roles["learner"].restarts == 0
    assert load_resolved(run.directory).verify.lease_timeout == 70.0
    assert outcome.kind == "interrupted"


@pytest.mark.slow
def test_changes_that_need_a_stop_are_left_to_whoever_pauses(
    tmp_path: Path,
) -> None:
    watch = Asking(lambda: apply(tmp_path, "samplers.volunteers.replicas=2"))
    with prepared(SPEC, tmp_path) as run:
        drive_named(run, watch)
    assert watch.result is not None
    with pytest.raises(
        RequestRefused, match=r"samplers\.volunteers\.replicas: 1 there, 2 now"
    ) as refused:
        watch.result.result()
    assert refused.value.exit_code == 5
    assert f"runspec pause {run.directory}" in str(refused.value)
    assert load_resolved(run.directory) == SPEC


def test_of_two_who_start_a_run_at_once_one_is_refused(tmp_path: Path) -> None:
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


def test_roles_of_other_machines_are_not_renewed_here() -> None:
    readers = ("coordinator", "validators", "samplers")
    here = small_spec("small", 5, "placement.roles=[volunteers]")
    assert readers_names(readers, here) == ["coordinator", "volunteers-0"]
    everything = ["coordinator", "validator-0", "volunteers-0"]
    assert readers_names(readers, small_spec()) == everything
