"""Requests that wait for a lease are in turn, whatever happens to their workers meanwhile."""

from __future__ import annotations

import asyncio

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.verify.coordinator.filled import STEADY, Filled, key, policy
from verify.coordinator.handlers.line import Line, Question
from verify.coordinator.machine import events, filling
from verify.coordinator.machine.leases import Rank

NAMES = st.sampled_from("abcdef")


class Waiting(RuleBasedStateMachine):
    """Three workers of the run's own and three strangers, each with any number of requests."""

    def __init__(self) -> None:
        super().__init__()
        self.run = Filled(policy(steps=1000, groups=1000))
        for name in "abcdef":
            self.run.register(name, own=name < "d")
        self.run.publish(0)
        self.line = Line(lambda: self.run.state)
        self.waiting: list[Question] = []
        self.loop = asyncio.new_event_loop()

    @rule(name=NAMES)
    def join(self, name: str) -> None:
        question = Question(key(name), (), lambda: False, self.loop.create_future())
        self.line.join(question)
        self.waiting.append(question)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        question = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(question)
        self.line.leave(question)
        self.line.leave(question)

    @rule(name=NAMES)
    def serve(self, name: str) -> None:
        self.run.now += 1.0
        self.run.further(name)

    @rule(name=NAMES)
    def doubt(self, name: str) -> None:
        quarantined = self.run.state.workers[key(name)].standing.quarantine is not None
        event = events.QuarantineEnded(self.run.now, key(name))
        if not quarantined:
            event = events.WorkerQuarantined(self.run.now, key(name), "a doubt")
        self.run.record(event)

    @invariant()
    def each_rank_is_in_turn(self) -> None:
        state = self.run.state
        for rank in Rank:
            its = [q for q in self.waiting if state.workers[q.key].rank is rank]
            # `waiting` is in the order of arrival, and sorting keeps it among equals
            assert [*self.line.of(rank)] == sorted(its, key=lambda q: filling.turn(state, q.key))
        assert {*self.line} == {*self.waiting} and len(self.line) == len(self.waiting)

    def teardown(self) -> None:
        self.loop.close()


test_line = Waiting.TestCase
test_line.settings = STEADY
