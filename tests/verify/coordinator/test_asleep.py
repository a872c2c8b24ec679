"""A laptop that is shut over a fill.deadline, and a clock that is set: nobody could work then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runspec.core.keys import SigningKey
from runspec.core.process import RunStopped
from tests.verify.coordinator.filled import POLICY, Filled
from verify.coordinator.activity import Activity
from verify.coordinator.closing import Closing
from verify.coordinator.journal import Journal


class Machine:
    """A coordinator whose only step has an open lease, by a clock that people see and one that
    stands still while the machine sleeps."""

    def __init__(self, folder: Path) -> None:
        run = Filled()
        run.register("x")
        run.publish(0)
        run.lease("x")
        self.clock = self.steady = run.now
        self.journal = Journal(folder, POLICY, clock=lambda: self.clock)
        for event in run.events:
            self.journal.record(event)
        self.closing = Closing(
            *(self.journal, "run", SigningKey.generate(), Activity()), steady=lambda: self.steady
        )

    def goes_on(self, seconds: float) -> None:
        self.clock += seconds
        self.steady += seconds
        self.closing._advance()

    def is_set(self, seconds: float) -> None:
        self.clock += seconds
        self.closing._advance()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.journal.close()


@pytest.mark.parametrize("jump", [7200.0, -7200.0])
def test_a_jump_of_the_clock_counts_for_no_deadline(machine: Machine, jump: float) -> None:
    machine.goes_on(POLICY.deadline_s - 1.0)

    machine.is_set(jump)  # nothing stalls

    machine.goes_on(POLICY.deadline_s - 1.0)
    with pytest.raises(RunStopped, match="step 0 stalled"):
        machine.goes_on(2.0)


def test_a_clock_that_is_a_little_off_is_no_reason_for_more_time(machine: Machine) -> None:
    rows, _ = machine.journal.ledger.head
    with pytest.raises(RunStopped, match="step 0 stalled"):
        for _ in range(20):
            machine.is_set(5.0)
    assert machine.journal.ledger.head[0] == rows + 1  # the lease is over
