"""The supervisor's rules, transition by transition, with no process and no clock."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from runspec.core.process import EXIT_FINAL
from runspec.local.fleet import (
    BACKOFF_MAX_S,
    ONLOOKER_PAUSE_S,
    Changed,
    Fleet,
    Outcome,
    Phase,
    Reached,
    RoleState,
    Rules,
    State,
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


def play(fleet: Fleet, *timed: Any) -> tuple[Fleet, list[str]]:
    """The fleet after (time, what happens, arguments)s, and what it does upon the last one."""
    fleet, actions = deepcopy(fleet), []
    for now, what, *arguments in timed:
        if what in ("stepped", "sampled", "trained", "published"):
            fleet.reached(Reached(**{what: True}))
        elif what == "changed":
            fleet.changed(*arguments)
        else:
            actions = getattr(fleet, what)(*arguments, now)
    return fleet, [f"{action.do} {action.role}" for action in actions]


def up(rules: Rules = RULES) -> Fleet:
    return play(waiting(rules), (0.0, "tick"))[0]


LATE = replace(
    RULES, ends_when_sampled=frozenset(), may_fail=frozenset({"worker"}), late_s={"worker": 60.0}
)
"""The worker is an evaluator."""
LOOKED_AT = replace(LATE, onlookers=frozenset({"worker"}))
"""The worker is a monitor."""
TRAINED = ((5.0, "sampled"), (5.0, "trained"), (5.0, "published"), (5.0, "exited", "learner", 0))


def test_a_monitor_that_keeps_dying_is_tried_ever_more_seldom_and_ends_no_run() -> None:
    # given a monitor that dies a second after each start, while the run trains
    fleet, now, pauses = up(LOOKED_AT), 0.0, []
    for _ in range(20):
        now += 1.0
        fleet, _ = play(
            fleet, (now, "ready", "worker"), (now, "stepped"), (now, "exited", "worker", 1)
        )
        role = fleet.roles["worker"]
        pauses.append(role.retry_at - now)
        # then only its first death is told of
        assert fleet.keeps_dying("worker") == (len(pauses) > 1)
        now = role.retry_at
        fleet, actions = play(fleet, (now, "tick"))
        assert actions == ["start worker"]
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0] and pauses[-1] == ONLOOKER_PAUSE_S
    assert fleet.outcome is None
    # one that has run for long begins anew
    long = now + ONLOOKER_PAUSE_S
    fleet, _ = play(fleet, (now, "ready", "worker"), (long, "exited", "worker", -9))
    assert fleet.roles["worker"].retry_at == long + 0.5 and not fleet.keeps_dying("worker")


def test_a_monitor_that_cannot_work_is_given_up_and_the_run_goes_on() -> None:
    fleet, actions = play(up(LOOKED_AT), (1.0, "exited", "worker", EXIT_FINAL), (9.0, "tick"))
    assert fleet.roles["worker"].state is State.FAILED
    assert fleet.outcome is None and actions == []


def test_a_trained_run_waits_for_a_monitor_that_sends_but_for_none_that_keeps_dying() -> None:
    running = (0.0, "ready", "worker")
    fleet, actions = play(up(LOOKED_AT), running, *TRAINED, (50.0, "tick"))
    assert fleet.phase is Phase.DRAINING and actions == []
    # until it has sent everything
    over, _ = play(fleet, (51.0, "exited", "worker", 0), (51.0, "tick"))
    assert over.outcome == Outcome("finished")
    # or its time is up, as where it hangs
    over, actions = play(fleet, (66.0, "tick"))
    assert over.outcome == Outcome("finished") and "stop worker" in actions
    # while one that has died again is not waited for
    dying = ((51.0, "exited", "worker", 1), (52.0, "tick"), (53.0, "exited", "worker", 1))
    over, _ = play(fleet, *dying, (53.1, "tick"))
    assert over.outcome == Outcome("finished")


def test_a_monitor_may_end_before_the_learner_does() -> None:
    # given a run on documents, whose steps have no rollouts
    fleet, _ = play(up(LOOKED_AT), (5.0, "trained"), (5.0, "exited", "worker", 0))
    assert fleet.roles["worker"].state is State.FINISHED


def test_a_trained_run_waits_for_its_evaluator() -> None:
    running = (0.0, "ready", "worker")
    fleet, actions = play(up(LATE), running, *TRAINED, (50.0, "tick"))
    assert fleet.phase is Phase.DRAINING and actions == []
    # until that has ended
    over, actions = play(fleet, (51.0, "exited", "worker", 0), (51.0, "tick"))
    assert over.outcome == Outcome("finished") and "stop origin" in actions
    # or its time is up
    over, actions = play(fleet, (66.0, "tick"))
    assert over.outcome == Outcome("finished") and "stop worker" in actions


def test_an_evaluator_that_dies_in_the_end_starts_again() -> None:
    fleet, _ = play(up(LATE), *TRAINED, (10.0, "exited", "worker", -9))
    assert fleet.roles["worker"].state is State.BACKOFF
    fleet, actions = play(fleet, (20.0, "tick"))
    assert actions == ["start worker"] and fleet.outcome is None
    # and one that cannot go on is not waited for
    fleet, _ = play(fleet, (21.0, "exited", "worker", EXIT_FINAL), (21.0, "tick"))
    assert fleet.outcome == Outcome("finished")


def test_an_evaluator_may_end_once_all_is_sampled() -> None:
    ended = play(up(LATE), (5.0, "sampled"), (6.0, "exited", "worker", 0))[0]
    assert ended.roles["worker"].state is State.FINISHED


def test_all_roles_start_at_once_and_run_when_they_show_life() -> None:
    fleet, actions = play(waiting(), (0.0, "tick"))
    assert actions == ["start learner", "start origin", "start worker"]
    assert {role.state for role in fleet.roles.values()} == {State.STARTING}

    fleet, actions = play(fleet, (1.0, "ready", "origin"))
    assert actions == []
    assert fleet.roles["origin"].state is State.RUNNING
    assert fleet.roles["learner"].state is State.STARTING


def test_a_killed_role_starts_again_after_half_a_second() -> None:
    fleet, actions = play(up(), (10.0, "exited", "origin", -9))
    assert (fleet.roles["origin"].state, actions) == (State.BACKOFF, [])

    assert play(fleet, (10.4, "tick"))[1] == []
    fleet, actions = play(fleet, (10.5, "tick"))
    assert actions == ["start origin"]
    assert fleet.roles["origin"].restarts == 1


def test_pauses_double_up_to_a_limit() -> None:
    fleet, now, pauses = up(Rules(restarts=9)), 0.0, []
    for _ in range(7):
        fleet, _ = play(fleet, (now, "exited", "origin", 1))
        pauses.append(fleet.roles["origin"].retry_at - now)
        now = fleet.roles["origin"].retry_at
        fleet, _ = play(fleet, (now, "tick"))
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, BACKOFF_MAX_S, BACKOFF_MAX_S]


def test_one_death_more_than_forgiven_ends_the_run() -> None:
    fleet, _ = play(
        up(),
        *((0.0, "exited", "origin", 1), (1.0, "tick")),
        *((1.0, "exited", "origin", 1), (3.0, "tick")),
    )
    assert fleet.phase is Phase.UP
    fleet, actions = play(fleet, (3.0, "exited", "origin", 1))
    assert fleet.outcome == Outcome("failed", "origin", 1)
    assert fleet.roles["origin"].state is State.FAILED
    assert actions == ["stop learner", "stop worker"]


def test_a_trained_step_forgives_earlier_deaths() -> None:
    fleet = up()
    for n in range(10):
        now = 10.0 * n
        fleet, _ = play(fleet, (now, "ready", "origin"), (now, "stepped"))
        fleet, actions = play(fleet, (now + 1, "exited", "origin", 1), (now + 2, "tick"))
        assert actions == ["start origin"]
    assert fleet.phase is Phase.UP
    assert fleet.roles["origin"].restarts == 10


def test_a_role_that_says_the_run_cannot_go_on_stops_it_at_once() -> None:
    fleet, actions = play(up(), (0.0, "exited", "worker", EXIT_FINAL))
    assert fleet.outcome == Outcome("stopped", "worker", EXIT_FINAL)
    assert actions == ["stop learner", "stop origin"]


@pytest.mark.parametrize("role", ["learner", "origin", "worker"])
def test_exit_0_before_its_time_is_a_death(role: str) -> None:
    fleet, _ = play(up(), (0.0, "exited", role, 0))
    assert fleet.roles[role].state is State.BACKOFF


def test_a_worker_may_end_once_everything_is_sampled_but_a_server_may_not() -> None:
    fleet, _ = play(
        up(), (0.0, "sampled"), (1.0, "exited", "worker", 0), (1.0, "exited", "origin", 0)
    )
    assert fleet.roles["worker"].state is State.FINISHED
    assert fleet.roles["origin"].state is State.BACKOFF


def test_a_trained_run_waits_for_publication_and_workers_then_stops_the_servers() -> None:
    fleet, actions = play(up(), (5.0, "trained"), (5.0, "exited", "learner", 0), (6.0, "tick"))
    assert (fleet.phase, actions) == (Phase.DRAINING, [])
    fleet, actions = play(fleet, (7.0, "exited", "worker", 0), (7.0, "tick"))
    assert (fleet.phase, actions) == (Phase.DRAINING, [])
    fleet, actions = play(fleet, (8.0, "published"), (8.0, "tick"))
    assert actions == ["stop origin"]
    assert fleet.outcome == Outcome("finished")
    assert not fleet.done
    fleet, _ = play(fleet, (9.0, "exited", "origin", 0))
    assert fleet.done
    assert {role.state for role in fleet.roles.values()} == {State.FINISHED}


def test_a_worker_that_does_not_end_holds_a_trained_run_up_only_so_long() -> None:
    trained = (0.0, "trained"), (0.0, "published"), (0.0, "exited", "learner", 0)
    fleet, actions = play(up(), *trained, (29.0, "tick"))
    assert (fleet.phase, actions) == (Phase.DRAINING, [])
    fleet, actions = play(fleet, (30.0, "tick"))
    assert actions == ["stop origin", "stop worker"]
    assert fleet.outcome == Outcome("finished")


def test_a_run_whose_workers_are_elsewhere_ends_when_its_last_version_is_out() -> None:
    # given a fleet without samplers and validators
    rules = replace(RULES, ends_when_sampled=frozenset(), servers=frozenset({"origin"}))
    fleet = Fleet({name: RoleState() for name in ("learner", "origin")}, rules)
    fleet, _ = play(fleet, (0.0, "tick"), (10.0, "sampled"), (11.0, "trained"))
    # when the learner has ended, then the run waits for the version, and for nobody else
    fleet, actions = play(fleet, (12.0, "exited", "learner", 0), (13.0, "tick"))
    assert (fleet.phase, actions) == (Phase.DRAINING, [])
    fleet, _ = play(fleet, (14.0, "published"), (14.1, "tick"), (14.2, "tick"))
    assert fleet.outcome == Outcome("finished")
    fleet, _ = play(fleet, (15.0, "exited", "origin", 0))
    assert fleet.done


def test_a_last_version_that_never_comes_out_is_said() -> None:
    fleet, actions = play(up(), (0.0, "trained"), (0.0, "exited", "learner", 0), (100.0, "tick"))
    assert actions == ["stop origin", "stop worker"]
    assert fleet.outcome == Outcome("unpublished")


def test_a_spent_budget_stops_the_run() -> None:
    fleet = up(Rules(restarts=2, budget_ends_at=60.0))
    assert play(fleet, (59.9, "tick"))[1] == []
    fleet, actions = play(fleet, (60.0, "tick"))
    assert fleet.outcome == Outcome("over_budget")
    assert actions == ["stop learner", "stop origin", "stop worker"]


def test_ctrl_c_stops_politely_then_kills_after_the_deadline() -> None:
    fleet, actions = play(up(), (0.0, "exited", "origin", 1), (0.1, "interrupted"))
    assert actions == ["stop learner", "stop worker"]
    assert fleet.roles["origin"].state is State.WAITING, "its restart is called off"
    assert fleet.outcome == Outcome("interrupted")

    fleet, actions = play(fleet, (1.0, "exited", "learner", 0), (20.0, "tick"))
    assert actions == []
    fleet, actions = play(fleet, (20.1, "tick"))
    assert actions == ["kill worker"]
    assert play(fleet, (21.0, "tick"))[1] == [], "killed once"
    fleet, _ = play(fleet, (21.0, "exited", "worker", -9))
    assert fleet.done


def test_servers_are_stopped_once_nobody_needs_them() -> None:
    rules = Rules(restarts=2, servers=frozenset({"origin"}), stop_s=20.0)
    fleet, actions = play(up(rules), (0.0, "interrupted"))
    assert actions == ["stop learner", "stop worker"]
    fleet, actions = play(fleet, (1.0, "exited", "worker", 0), (1.0, "tick"))
    assert actions == []
    fleet, actions = play(fleet, (2.0, "exited", "learner", 0), (2.0, "tick"))
    assert actions == ["stop origin"]
    assert play(fleet, (3.0, "tick"))[1] == [], "told once"


def test_a_second_ctrl_c_kills_at_once() -> None:
    _, actions = play(up(), (0.0, "interrupted"), (0.1, "interrupted"))
    assert actions == ["kill learner", "kill origin", "kill worker"]


def test_what_dies_while_stopping_is_not_started_again_and_changes_no_outcome() -> None:
    fleet, _ = play(up(), (0.0, "interrupted"), (0.1, "exited", "learner", EXIT_FINAL))
    fleet, actions = play(fleet, (5.0, "tick"))
    assert actions == []
    assert fleet.outcome == Outcome("interrupted")


RENEW = "changed", Changed(restarts=2, budget_ends_at=None, renew=("origin", "worker"))


def running() -> Fleet:
    ready = [(0.0, "ready", r) for r in ("learner", "origin", "worker")]
    return play(up(), *ready)[0]


def test_a_hot_change_moves_deadline_and_patience_and_nobody_stops() -> None:
    fleet, actions = play(
        running(), (1.0, "changed", Changed(restarts=0, budget_ends_at=50.0)), (2.0, "tick")
    )
    assert actions == []
    assert fleet.rules.restarts == 0
    assert play(fleet, (49.0, "tick"))[0].outcome is None
    assert play(fleet, (50.0, "tick"))[0].outcome == Outcome("over_budget")
    later, _ = play(
        fleet, (40.0, "changed", Changed(restarts=2, budget_ends_at=None)), (999.0, "tick")
    )
    assert later.outcome is None, "a budget can be lifted"


def test_readers_are_renewed_one_after_the_other() -> None:
    # given two roles that must read a changed spec: the first is told to end
    fleet, actions = play(running(), (1.0, *RENEW), (1.0, "tick"))
    assert actions == ["stop origin"]
    assert fleet.roles["origin"].state is State.RENEWING
    # when it has ended it starts at once, and the second waits until it runs
    fleet, actions = play(fleet, (2.0, "exited", "origin", 0), (2.0, "tick"))
    assert actions == ["start origin"]
    assert play(fleet, (9.0, "tick"))[1] == []
    # then it is the second's turn, and after that nobody's
    fleet, actions = play(fleet, (10.0, "ready", "origin"), (10.0, "tick"))
    assert actions == ["stop worker"]
    fleet, _ = play(fleet, (11.0, "exited", "worker", 0), (11.0, "tick"), (12.0, "ready", "worker"))
    fleet, actions = play(fleet, (12.0, "tick"))
    assert (fleet.renewing, fleet.to_renew, actions) == (None, [], [])
    # and no end of theirs was a death
    assert {(role.restarts, role.deaths_in_a_row) for role in fleet.roles.values()} == {(0, 0)}


def test_a_role_that_does_not_end_is_killed_once() -> None:
    fleet, _ = play(running(), (1.0, *RENEW), (1.0, "tick"))
    assert play(fleet, (20.9, "tick"))[1] == []
    fleet, actions = play(fleet, (21.0, "tick"))
    assert actions == ["kill origin"]
    assert play(fleet, (22.0, "tick"))[1] == []
    _, actions = play(fleet, (22.0, "exited", "origin", -9), (22.0, "tick"))
    assert actions == ["start origin"]


def test_a_role_that_was_down_is_started_once_and_waited_for() -> None:
    # given a role that has just died when its turn comes
    fleet, _ = play(running(), (1.0, "exited", "origin", 1), (1.1, *RENEW))
    fleet, actions = play(fleet, (1.2, "tick"))
    assert actions == []
    # when its pause is over it starts, with what is new
    fleet, actions = play(fleet, (1.5, "tick"))
    assert actions == ["start origin"]
    # then the next one's turn comes only when it runs
    assert play(fleet, (9.0, "tick"))[1] == []
    assert play(fleet, (9.0, "ready", "origin"), (9.0, "tick"))[1] == ["stop worker"]


def test_a_role_that_dies_of_the_change_ends_the_run_as_any_other() -> None:
    fleet, _ = play(running(), (1.0, *RENEW), (1.0, "tick"), (2.0, "exited", "origin", 0))
    for now in (3.0, 13.0, 23.0):
        fleet, _ = play(fleet, (now, "tick"), (now, "exited", "origin", 1))
    assert fleet.outcome == Outcome("failed", "origin", 1)
    assert fleet.roles["worker"].state is State.RUNNING, "told to stop, and never renewed"


def test_a_role_that_says_the_run_cannot_go_on_is_believed_in_its_turn() -> None:
    fleet, _ = play(running(), (1.0, *RENEW), (1.0, "tick"), (2.0, "exited", "origin", EXIT_FINAL))
    assert fleet.outcome == Outcome("stopped", "origin", EXIT_FINAL)


@pytest.mark.parametrize("stop", ["interrupted", "paused"])
def test_a_stop_ends_the_turns(stop: str) -> None:
    fleet, _ = play(running(), (1.0, *RENEW), (1.0, "tick"), (2.0, stop))
    assert (fleet.renewing, fleet.to_renew) == (None, [])
    fleet, actions = play(fleet, (3.0, "exited", "origin", 0), (3.0, "tick"))
    assert "start origin" not in actions


def test_a_pause_stops_as_ctrl_c_does_and_is_told_from_it() -> None:
    fleet, actions = play(running(), (1.0, "paused"))
    assert actions == ["stop learner", "stop origin", "stop worker"]
    assert fleet.outcome == Outcome("paused")
    assert play(fleet, (2.0, "paused"))[1] == [], "a second one does not kill"
