"""The supervisor's rules, with no process and no clock: as a property, and at their boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runspec.core.process import EXIT_FINAL
from runspec.local.fleet import (
    BACKOFF_MAX_S,
    ONLOOKER_PAUSE_S,
    Action,
    Changed,
    Fleet,
    Outcome,
    Phase,
    Reached,
    RestartPolicy,
    RoleState,
    Rules,
    State,
)

RULES = Rules(
    restarts=2,
    budget_ends_at=5000.0,
    drain_s=30.0,
    publish_s=100.0,
    stop_s=20.0,
)
POLICIES = {
    "evaluator": RestartPolicy(may_fail=True, late_s=60.0),
    "island": RestartPolicy(may_fail=True),
    "learner": RestartPolicy(ends_run=True),
    "monitor": RestartPolicy(may_fail=True, onlooker=True, late_s=60.0),
    "origin": RestartPolicy(server=True),
    "worker": RestartPolicy(ends_when_sampled=True),
}
ROLES, LATE = tuple(POLICIES), ("evaluator", "monitor")


class AnyRun(RuleBasedStateMachine):
    """A run whose roles die, and which is looked at, changed and stopped, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet({name: RoleState(policy) for name, policy in POLICIES.items()}, RULES)
        self.now = 0.0
        self.running: dict[str, float] = {}
        """When each role with a process was started."""
        self.deaths, self.restarts = dict.fromkeys(ROLES, 0), dict.fromkeys(ROLES, 0)
        self.dead: set[str] = set()
        """Roles that wait to be started again."""
        self.outcome: Outcome | None = None
        self.killed: set[str] = set()

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if action.do == "start":
                assert action.role not in self.running and not self.fleet.ending
                self.running[action.role] = self.now
                self.restarts[action.role] += action.role in self.dead
                self.dead.discard(action.role)
                continue
            assert action.role in self.running
            if action.do == "kill":
                self.killed.add(action.role)
            elif self.fleet.ending and action.role == "origin":
                assert self.running.keys() <= {"origin"}, "a server is stopped last"

    @rule(seconds=st.sampled_from([0.25, 0.5, 1.0, 10.0, 20.0, 30.0, 60.0, 600.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        fleet, phase = self.fleet, self.fleet.phase
        waited = self.now - fleet.since
        expected = fleet.outcome
        if phase is Phase.UP and self.now >= (fleet.rules.budget_ends_at or self.now + 1):
            expected = Outcome("over_budget")
        elif phase is Phase.DRAINING:
            drained = "worker" not in self.running or waited >= RULES.drain_s
            late = any(self.at_work(name) for name in LATE) and waited < 60.0
            if fleet.published and drained and not late:
                expected = Outcome("finished")
            elif not fleet.published and waited >= RULES.publish_s:
                expected = Outcome("unpublished")
        self.do(fleet.tick(self.now))
        assert fleet.outcome == expected
        if phase is Phase.STOPPING:
            assert (fleet.phase is Phase.KILLING) == (waited >= RULES.stop_s)
        if fleet.phase is Phase.KILLING:
            assert self.killed >= self.running.keys()
        if not fleet.ending:
            for role in fleet.roles.values():
                assert role.state is not State.WAITING, "who is due is started"
                assert role.state is not State.BACKOFF or role.retry_at > self.now

    def at_work(self, name: str) -> bool:
        state = self.fleet.roles[name].state
        resting = name == "monitor" and self.deaths[name] > 1 and state is State.BACKOFF
        return state not in (State.FINISHED, State.FAILED) and not resting

    @rule(names=st.sampled_from([ROLES, ROLES, ROLES[::2]]))
    def roles_show_life(self, names: Sequence[str]) -> None:
        for name in names:
            before = self.fleet.roles[name].state
            self.do(self.fleet.ready(name, self.now))
            shown = State.RUNNING if before is State.STARTING else before
            assert self.fleet.roles[name].state is shown

    @rule(stepped=st.booleans(), sampled=st.booleans(), published=st.booleans())
    def run_is_looked_at(self, stepped: bool, sampled: bool, published: bool) -> None:
        self.fleet.reached(Reached(stepped, sampled, False, published and self.fleet.trained))
        for name in set(ROLES) - {"monitor"} if stepped else ():
            if self.fleet.roles[name].state is State.RUNNING:
                self.deaths[name] = 0

    @precondition(lambda self: self.running)
    @rule(data=st.data(), code=st.sampled_from([0, 1, -9] * 4 + [EXIT_FINAL]))
    def role_ends(self, data: st.DataObject, code: int) -> None:
        self.ends(data.draw(st.sampled_from(sorted(self.running))), code)

    @precondition(lambda self: "learner" in self.running)
    @rule(published=st.booleans())
    def learner_is_done(self, published: bool) -> None:
        self.fleet.reached(Reached(False, True, True, published))
        self.ends("learner", 0)

    def ends(self, name: str, code: int) -> None:
        ran, fleet = self.now - self.running.pop(name), self.fleet
        self.killed.discard(name)
        renewed, ending = fleet.roles[name].state is State.RENEWING, fleet.ending
        draining = fleet.phase is Phase.DRAINING
        self.do(fleet.exited(name, code, self.now))
        role, needed = fleet.roles[name], not POLICIES[name].may_fail
        expected, outcome = State.BACKOFF, self.outcome
        if ending:
            finished = fleet.outcome == Outcome("finished")
            expected = State.FINISHED if finished else State.STOPPED
        elif (
            (code == 0 and name == "learner" and fleet.trained)
            or (code == 0 and name in LATE and (draining or fleet.sampled or fleet.trained))
            or (name == "worker" and (draining or (code == 0 and fleet.sampled)))
        ):
            expected = State.FINISHED
            assert (fleet.phase is Phase.DRAINING) == (draining or name == "learner")
        elif code == EXIT_FINAL:
            expected = State.FAILED
            outcome = Outcome("stopped", name, code) if needed else outcome
        elif renewed:
            expected = State.WAITING
        else:
            if name == "monitor" and ran >= ONLOOKER_PAUSE_S:
                self.deaths[name] = 0
            self.deaths[name] += 1
            if needed and self.deaths[name] > fleet.rules.restarts:
                expected, outcome = State.FAILED, Outcome("failed", name, code)
            else:
                longest = ONLOOKER_PAUSE_S if name == "monitor" else BACKOFF_MAX_S
                pause = min(longest, 0.5 * 2 ** (self.deaths[name] - 1))
                assert role.retry_at == self.now + pause
                self.dead.add(name)
        assert (role.state, fleet.outcome) == (expected, outcome)
        assert fleet.keeps_dying(name) == (name == "monitor" and self.deaths[name] > 1)

    @rule(restarts=st.integers(0, 3), budget=st.sampled_from([None, 900.0, 5000.0]))
    def spec_changes(self, restarts: int, budget: float | None) -> None:
        self.fleet.changed(Changed(restarts, budget, ("origin", "elsewhere", "worker")))
        if self.fleet.phase is not Phase.UP:
            assert not self.fleet.to_renew

    @rule(what=st.sampled_from(["paused"] * 2 + ["interrupted"]), seldom=st.integers(0, 9))
    def stop_is_asked_for(self, what: str, seldom: int) -> None:
        if seldom:
            return
        ending = self.fleet.ending
        self.do(getattr(self.fleet, what)(self.now))
        if not ending:
            assert self.fleet.outcome == Outcome(what) and self.fleet.renewing is None
        elif what == "interrupted":
            assert self.killed >= self.running.keys(), "a second Ctrl-C kills"

    @invariant()
    def the_run_ends_once_and_processes_are_known(self) -> None:
        fleet = self.fleet
        assert self.outcome in (None, fleet.outcome), "what began the stopping is the outcome"
        self.outcome = fleet.outcome
        assert set(fleet.alive) == self.running.keys()
        for name, role in fleet.roles.items():
            counted = (role.deaths_in_a_row, role.restarts)
            assert counted == (self.deaths[name], self.restarts[name])
        assert fleet.ending == (fleet.outcome is not None)
        assert fleet.done == (fleet.ending and not self.running)
        if fleet.renewing is not None or fleet.to_renew:
            assert fleet.phase is Phase.UP
        renewing = [n for n, role in fleet.roles.items() if role.state is State.RENEWING]
        assert fleet.phase is not Phase.UP or renewing in ([], [fleet.renewing])


TestAnyRun = AnyRun.TestCase
TestAnyRun.settings = settings(derandomize=True, max_examples=250, stateful_step_count=30)


def play(*timed: Any, after: Fleet | None = None) -> tuple[Fleet, list[str]]:
    """The fleet after (time, what happens, arguments)s, and what it does upon the last one."""
    fleet, actions = deepcopy(after or RUNNING), []
    for now, what, *arguments in timed:
        if what in ("stepped", "sampled", "trained", "published"):
            fleet.reached(Reached(**{what: True}))
        elif what == "changed":
            fleet.changed(*arguments)
        else:
            actions = getattr(fleet, what)(*arguments, now)
    return fleet, [f"{action.do} {action.role}" for action in actions]


RUNNING = Fleet({name: RoleState(policy) for name, policy in POLICIES.items()}, RULES)
RUNNING, _ = play((0.0, "tick"), *((0.0, "ready", name) for name in ROLES))
TRAINED = ((5.0, "sampled"), (5.0, "trained"), (5.0, "published"), (5.0, "exited", "learner", 0))
SENT = tuple((5.0, "exited", name, 0) for name in ("worker", "monitor", "evaluator"))


def test_a_trained_run_waits_for_its_evaluator() -> None:
    fleet, actions = play(*TRAINED, *SENT[:2], (64.9, "tick"))
    assert fleet.phase is Phase.DRAINING and actions == []
    # until that has ended, also where it died meanwhile
    over, actions = play((64.9, "exited", "evaluator", 0), (64.9, "tick"), after=fleet)
    assert over.outcome == Outcome("finished") and actions == ["stop island"]
    dead, actions = play((10.0, "exited", "evaluator", -9), (20.0, "tick"), after=fleet)
    assert actions == ["start evaluator"] and dead.outcome is None
    over, _ = play((21.0, "exited", "evaluator", EXIT_FINAL), (21.0, "tick"), after=dead)
    assert over.outcome == Outcome("finished")
    # or its time is up
    over, actions = play((65.0, "tick"), after=fleet)
    assert over.outcome == Outcome("finished") and "stop evaluator" in actions


def test_a_monitor_that_keeps_dying_is_tried_ever_more_seldom_and_ends_no_run() -> None:
    fleet, now, pauses = RUNNING, 0.0, []
    for _ in range(12):
        fleet, _ = play((now, "stepped"), (now, "exited", "monitor", 1), after=fleet)
        pauses.append(fleet.roles["monitor"].retry_at - now)
        # then only its first death is reported
        assert fleet.keeps_dying("monitor") == (len(pauses) > 1)
        now += pauses[-1]
        fleet, actions = play((now, "tick"), after=fleet)
        assert actions == ["start monitor"] and fleet.outcome is None
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0] and pauses[-1] == ONLOOKER_PAUSE_S == 600.0


def test_readers_of_a_changed_spec_end_one_after_the_other_and_who_does_not_is_killed() -> None:
    changed = (1.0, "changed", Changed(2, None, ("origin", "worker"))), (1.0, "tick")
    back = *changed, (2.0, "exited", "origin", 0), (2.0, "tick")
    for events, actions in (
        (changed, ["stop origin"]),
        ((*changed, (20.9, "tick")), []),
        ((*changed, (21.0, "tick")), ["kill origin"]),
        ((*changed, (21.0, "tick"), (22.0, "tick")), []),
        (back, ["start origin"]),
        ((*back, (9.0, "tick")), []),
        ((*back, (9.0, "ready", "origin"), (9.0, "tick")), ["stop worker"]),
    ):
        fleet, found = play(*events)
        assert (found, fleet.outcome) == (actions, None)


STOP = [f"stop {name}" for name in ROLES if name != "origin"]


@pytest.mark.parametrize(
    ("events", "actions", "outcome"),
    [
        # a stop is a kill after its deadline, or on a second Ctrl-C, but not on a second pause
        ([(1.0, "interrupted"), (20.9, "tick")], [], "interrupted"),
        ([(1.0, "interrupted"), (21.0, "tick")], [f"kill {name}" for name in ROLES], "interrupted"),
        ([(0.0, "paused"), (0.1, "interrupted")], [f"kill {name}" for name in ROLES], "paused"),
        ([(0.0, "paused"), (0.1, "paused")], [], "paused"),
        # the budget, and a change of it
        ([(4999.9, "tick")], [], None),
        ([(5000.0, "tick")], STOP, "over_budget"),
        ([(9.0, "changed", Changed(0, 50.0)), (50.0, "tick")], STOP, "over_budget"),
        ([(9.0, "changed", Changed(0, None)), (9999.0, "tick")], [], None),
        # a trained run waits for its last version, and its workers, only so long
        ([TRAINED[1], TRAINED[3], (104.9, "tick")], [], None),
        ([TRAINED[1], TRAINED[3], (105.0, "tick")], [*STOP[:2], *STOP[3:]], "unpublished"),
        ([*TRAINED, *SENT[1:], (34.9, "tick")], [], None),
        ([*TRAINED, *SENT[1:], (35.0, "tick")], ["stop island", "stop worker"], "finished"),
    ],
)
def test_what_is_done_at_its_time(
    events: list[Any], actions: list[str], outcome: str | None
) -> None:
    fleet, found = play(*events)
    assert (found, fleet.outcome) == (actions, Outcome(outcome) if outcome else None)
