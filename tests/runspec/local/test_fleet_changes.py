"""How the supervisor's rules take a changed spec and a pause, with no process and no clock."""

from __future__ import annotations

import pytest

from runspec.core.process import EXIT_FINAL
from runspec.local.fleet import (
    Changed,
    Event,
    Exited,
    Fleet,
    Kill,
    Outcome,
    PauseRequested,
    Ready,
    Start,
    State,
    Stop,
    StopRequested,
    Tick,
)
from tests.runspec.local.test_fleet import play, up

RENEW = Changed(restarts=2, budget_ends_at=None, renew=("origin", "worker"))


def running() -> Fleet:
    ready: list[tuple[float, Event]] = [(0.0, Ready(r)) for r in ("learner", "origin", "worker")]
    return play(up(), *ready)[0]


def test_a_hot_change_moves_deadline_and_patience_and_nobody_stops() -> None:
    fleet, actions = play(running(), (1.0, Changed(restarts=0, budget_ends_at=50.0)), (2.0, Tick()))
    assert actions == []
    assert fleet.rules.restarts == 0
    assert play(fleet, (49.0, Tick()))[0].outcome is None
    assert play(fleet, (50.0, Tick()))[0].outcome == Outcome("over_budget")
    later, _ = play(fleet, (40.0, Changed(restarts=2, budget_ends_at=None)), (999.0, Tick()))
    assert later.outcome is None, "a budget can be lifted"


def test_readers_are_renewed_one_after_the_other() -> None:
    # given two roles that must read a changed spec: the first is told to end
    fleet, actions = play(running(), (1.0, RENEW), (1.0, Tick()))
    assert actions == [Stop("origin")]
    assert fleet.roles["origin"].state is State.RENEWING
    # when it has ended it starts at once, and the second waits until it runs
    fleet, actions = play(fleet, (2.0, Exited("origin", 0)), (2.0, Tick()))
    assert actions == [Start("origin")]
    assert play(fleet, (9.0, Tick()))[1] == []
    # then it is the second's turn, and after that nobody's
    fleet, actions = play(fleet, (10.0, Ready("origin")), (10.0, Tick()))
    assert actions == [Stop("worker")]
    fleet, _ = play(fleet, (11.0, Exited("worker", 0)), (11.0, Tick()), (12.0, Ready("worker")))
    fleet, actions = play(fleet, (12.0, Tick()))
    assert (fleet.renewing, fleet.to_renew, actions) == (None, (), [])
    # and no end of theirs was a death
    assert {(role.restarts, role.deaths_in_a_row) for role in fleet.roles.values()} == {(0, 0)}


def test_a_role_that_does_not_end_is_killed_once() -> None:
    fleet, _ = play(running(), (1.0, RENEW), (1.0, Tick()))
    assert play(fleet, (20.9, Tick()))[1] == []
    fleet, actions = play(fleet, (21.0, Tick()))
    assert actions == [Kill("origin")]
    assert play(fleet, (22.0, Tick()))[1] == []
    _, actions = play(fleet, (22.0, Exited("origin", -9)), (22.0, Tick()))
    assert actions == [Start("origin")]


def test_a_role_that_was_down_is_started_once_and_waited_for() -> None:
    # given a role that has just died when its turn comes
    fleet, _ = play(running(), (1.0, Exited("origin", 1)), (1.1, RENEW))
    fleet, actions = play(fleet, (1.2, Tick()))
    assert actions == []
    # when its pause is over it starts, with what is new
    fleet, actions = play(fleet, (1.5, Tick()))
    assert actions == [Start("origin")]
    # then the next one's turn comes only when it runs
    assert play(fleet, (9.0, Tick()))[1] == []
    assert play(fleet, (9.0, Ready("origin")), (9.0, Tick()))[1] == [Stop("worker")]


def test_a_role_that_dies_of_the_change_ends_the_run_as_any_other() -> None:
    fleet, _ = play(running(), (1.0, RENEW), (1.0, Tick()), (2.0, Exited("origin", 0)))
    for now in (3.0, 13.0, 23.0):
        fleet, _ = play(fleet, (now, Tick()), (now, Exited("origin", 1)))
    assert fleet.outcome == Outcome("failed", "origin", 1)
    assert fleet.roles["worker"].state is State.RUNNING, "told to stop, and never renewed"


def test_a_role_that_says_the_run_cannot_go_on_is_believed_in_its_turn() -> None:
    fleet, _ = play(running(), (1.0, RENEW), (1.0, Tick()), (2.0, Exited("origin", EXIT_FINAL)))
    assert fleet.outcome == Outcome("stopped", "origin", EXIT_FINAL)


@pytest.mark.parametrize("stop", [StopRequested(), PauseRequested()])
def test_a_stop_ends_the_turns(stop: Event) -> None:
    fleet, _ = play(running(), (1.0, RENEW), (1.0, Tick()), (2.0, stop))
    assert (fleet.renewing, fleet.to_renew) == (None, ())
    fleet, actions = play(fleet, (3.0, Exited("origin", 0)), (3.0, Tick()))
    assert Start("origin") not in actions


def test_a_pause_stops_as_ctrl_c_does_and_is_told_from_it() -> None:
    fleet, actions = play(running(), (1.0, PauseRequested()))
    assert actions == [Stop("learner"), Stop("origin"), Stop("worker")]
    assert fleet.outcome == Outcome("paused")
    assert play(fleet, (2.0, PauseRequested()))[1] == [], "a second one does not kill"
