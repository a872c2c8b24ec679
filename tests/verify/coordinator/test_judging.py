"""What is offered to validators."""

from contextlib import closing
from pathlib import Path

import pytest

from tests.verify.coordinator.filled import Filled, policy
from verify.coordinator.journal import Journal
from verify.coordinator.judging import Judging


@pytest.mark.parametrize(("async_level", "offered"), [(0, 0), (1, 1)])
def test_what_can_train_no_more_is_not_offered(tmp_path: Path, async_level: int, offered: int):
    # given a step that closed at its deadline without the submission that no validator had judged
    run = Filled(policy(async_level=async_level))
    run.register("x")
    run.register("y")
    run.publish(0)
    run.work("x")
    late = run.lease("y")
    assert late is not None
    run.submit(late)
    run.now += 101.0
    assert [close.step for close in run.advance()] == [0]
    # when the coordinator goes on
    with closing(Journal(tmp_path, run.state.policy, clock=lambda: run.now)) as journal:
        for event in run.events:
            journal.record(event)
        judging = Judging(journal, "run")
        # then it is offered only where a later step may still train it
        assert [r.digest for r in judging.submitted()] == [late.digest] * offered
