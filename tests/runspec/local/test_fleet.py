"""The supervisor's rules, transition by transition, with no process and no clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runspec.core.process import EXIT_FINAL
from runspec.local.fleet import (
    BACKOFF_MAX_S,
    Action,
    Event,
    Exited,
    Fleet,
    Kill,
    Outcome,
    Phase,
    Progress,
    Published,
    Ready,
    RoleState,
    Rules,
    Sampled,
    Start,
    State,
    Stop,
    StopRequested,
    Tick,
    Trained,
    advance,
)

RULES = Rules(
    restarts=2,
    ends_run=frozenset({"learner"}),
    ends_when_sampled=frozenset({"worker"}),
    drain_s=30.0,
    publish_s=100.0,
    stop_s=20.0,
)


def waiting(rules: Rules = RULES) -> Fleet:
    return Fleet({name: RoleState() for name in ("learner", "origin", "worker")}, rules)


def play(fleet: Fleet, *timed: tuple[float, Event]) -> tuple[Fleet, list[Action]]:
    """Events at their times; the actions of the last one."""
    actions: list[Action] = []
    for now, event in timed:
        fleet, actions = advance(fleet, event, now)
    return fleet, actions


def up(rules: Rules = RULES) -> Fleet:
    return play(waiting(rules), (0.0, Tick()))[0]


def test_all_roles_start_at_once_and_run_when_they_show_life() -> None:
    fleet, actions = advance(waiting(), Tick(), 0.0)
    assert actions == [Start("learner"), Start("origin"), Start("worker")]
    assert {role.state for role in fleet.roles.values()} == {State.STARTING}

    fleet, actions = play(fleet, (1.0, Ready("origin")))
    assert actions == []
    assert fleet.roles["origin"].state is State.RUNNING
    assert fleet.roles["learner"].state is State.STARTING


def test_a_killed_role_starts_again_after_half_a_second() -> None:
    fleet, actions = play(up(), (10.0, Exited("origin", -9)))
    assert (fleet.roles["origin"].state, actions) == (State.BACKOFF, [])

    assert play(fleet, (10.4, Tick()))[1] == []
    fleet, actions = play(fleet, (10.5, Tick()))
    assert actions == [Start("origin")]
    assert fleet.roles["origin"].restarts == 1


def test_pauses_double_up_to_a_limit() -> None:
    fleet, now, pauses = up(Rules(restarts=9)), 0.0, []
    for _ in range(7):
        fleet, _ = advance(fleet, Exited("origin", 1), now)
        pauses.append(fleet.roles["origin"].retry_at - now)
        now = fleet.roles["origin"].retry_at
        fleet, _ = advance(fleet, Tick(), now)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, BACKOFF_MAX_S, BACKOFF_MAX_S]


def test_one_death_more_than_forgiven_ends_the_run() -> None:
    fleet, _ = play(
        up(),
        *((0.0, Exited("origin", 1)), (1.0, Tick())),
        *((1.0, Exited("origin", 1)), (3.0, Tick())),
    )
    assert fleet.phase is Phase.UP
    fleet, actions = play(fleet, (3.0, Exited("origin", 1)))
    assert fleet.outcome == Outcome("failed", "origin", 1)
    assert fleet.roles["origin"].state is State.FAILED
    assert actions == [Stop("learner"), Stop("worker")]


def test_a_trained_step_forgives_earlier_deaths() -> None:
    fleet = up()
    for n in range(10):
        now = 10.0 * n
        fleet, _ = play(fleet, (now, Ready("origin")), (now, Progress()))
        fleet, actions = play(fleet, (now + 1, Exited("origin", 1)), (now + 2, Tick()))
        assert actions == [Start("origin")]
    assert fleet.phase is Phase.UP
    assert fleet.roles["origin"].restarts == 10


def test_a_role_that_says_the_run_cannot_go_on_stops_it_at_once() -> None:
    fleet, actions = play(up(), (0.0, Exited("worker", EXIT_FINAL)))
    assert fleet.outcome == Outcome("stopped", "worker", EXIT_FINAL)
    assert actions == [Stop("learner"), Stop("origin")]


@pytest.mark.parametrize("role", ["learner", "origin", "worker"])
def test_exit_0_before_its_time_is_a_death(role: str) -> None:
    fleet, _ = play(up(), (0.0, Exited(role, 0)))
    assert fleet.roles[role].state is State.BACKOFF


def test_a_worker_may_end_once_everything_is_sampled_but_a_server_may_not() -> None:
    fleet, _ = play(up(), (0.0, Sampled()), (1.0, Exited("worker", 0)), (1.0, Exited("origin", 0)))
    assert fleet.roles["worker"].state is State.FINISHED
    assert fleet.roles["origin"].state is State.BACKOFF


def test_a_trained_run_waits_for_publication_and_workers_then_stops_the_servers() -> None:
    fleet, actions = play(up(), (5.0, Trained()), (5.0, Exited("learner", 0)), (6.0, Tick()))
    assert (fleet.phase, actions) == (Phase.DRAINING, [])
    fleet, actions = play(fleet, (7.0, Exited("worker", 0)), (7.0, Tick()))
    assert (fleet.phase, actions) == (Phase.DRAINING, [])
    fleet, actions = play(fleet, (8.0, Published()), (8.0, Tick()))
    assert actions == [Stop("origin")]
    assert fleet.outcome == Outcome("finished")
    assert not fleet.done
    fleet, _ = play(fleet, (9.0, Exited("origin", 0)))
    assert fleet.done
    assert {role.state for role in fleet.roles.values()} == {State.FINISHED}


def test_a_worker_that_does_not_end_holds_a_trained_run_up_only_so_long() -> None:
    trained = (0.0, Trained()), (0.0, Published()), (0.0, Exited("learner", 0))
    fleet, actions = play(up(), *trained, (29.0, Tick()))
    assert (fleet.phase, actions) == (Phase.DRAINING, [])
    fleet, actions = play(fleet, (30.0, Tick()))
    assert actions == [Stop("origin"), Stop("worker")]
    assert fleet.outcome == Outcome("finished")


def test_a_run_whose_workers_are_elsewhere_ends_when_its_last_version_is_out() -> None:
    # given a fleet without samplers and validators
    rules = replace(RULES, ends_when_sampled=frozenset(), servers=frozenset({"origin"}))
    fleet = Fleet({name: RoleState() for name in ("learner", "origin")}, rules)
    fleet, _ = play(fleet, (0.0, Tick()), (10.0, Sampled()), (11.0, Trained()))
    # when the learner has ended, then the run waits for the version, and for nobody else
    fleet, actions = play(fleet, (12.0, Exited("learner", 0)), (13.0, Tick()))
    assert (fleet.phase, actions) == (Phase.DRAINING, [])
    fleet, _ = play(fleet, (14.0, Published()), (14.1, Tick()), (14.2, Tick()))
    assert fleet.outcome == Outcome("finished")
    fleet, _ = play(fleet, (15.0, Exited("origin", 0)))
    assert fleet.done


def test_a_last_version_that_never_comes_out_is_said() -> None:
    fleet, actions = play(up(), (0.0, Trained()), (0.0, Exited("learner", 0)), (100.0, Tick()))
    assert actions == [Stop("origin"), Stop("worker")]
    assert fleet.outcome == Outcome("unpublished")


def test_a_spent_budget_stops_the_run() -> None:
    fleet = up(Rules(restarts=2, budget_ends_at=60.0))
    assert play(fleet, (59.9, Tick()))[1] == []
    fleet, actions = play(fleet, (60.0, Tick()))
    assert fleet.outcome == Outcome("over_budget")
    assert actions == [Stop("learner"), Stop("origin"), Stop("worker")]


def test_ctrl_c_stops_politely_then_kills_after_the_deadline() -> None:
    fleet, actions = play(up(), (0.0, Exited("origin", 1)), (0.1, StopRequested()))
    assert actions == [Stop("learner"), Stop("worker")]
    assert fleet.roles["origin"].state is State.WAITING, "its restart is called off"
    assert fleet.outcome == Outcome("interrupted")

    fleet, actions = play(fleet, (1.0, Exited("learner", 0)), (20.0, Tick()))
    assert actions == []
    fleet, actions = play(fleet, (20.1, Tick()))
    assert actions == [Kill("worker")]
    assert play(fleet, (21.0, Tick()))[1] == [], "killed once"
    fleet, _ = play(fleet, (21.0, Exited("worker", -9)))
    assert fleet.done


def test_servers_are_stopped_once_nobody_needs_them() -> None:
    rules = Rules(restarts=2, servers=frozenset({"origin"}), stop_s=20.0)
    fleet, actions = play(up(rules), (0.0, StopRequested()))
    assert actions == [Stop("learner"), Stop("worker")]
    fleet, actions = play(fleet, (1.0, Exited("worker", 0)), (1.0, Tick()))
    assert actions == []
    fleet, actions = play(fleet, (2.0, Exited("learner", 0)), (2.0, Tick()))
    assert actions == [Stop("origin")]
    assert play(fleet, (3.0, Tick()))[1] == [], "told once"


def test_a_second_ctrl_c_kills_at_once() -> None:
    _, actions = play(up(), (0.0, StopRequested()), (0.1, StopRequested()))
    assert actions == [Kill("learner"), Kill("origin"), Kill("worker")]


def test_what_dies_while_stopping_is_not_started_again_and_changes_no_outcome() -> None:
    fleet, _ = play(up(), (0.0, StopRequested()), (0.1, Exited("learner", EXIT_FINAL)))
    fleet, actions = play(fleet, (5.0, Tick()))
    assert actions == []
    assert fleet.outcome == Outcome("interrupted")
