"""What the status says of workers, and the rates that manifests tell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from runspec.cli.workers import _MAX_STATUS_BYTES
from tests.verify.coordinator.deployment import tiny_spec
from tests.verify.coordinator.filled import POLICY, Filled, key, policy
from tests.verify.coordinator.in_process import edge_of, journal_of
from verify.coordinator.edge.limits import MAX_UNPROVEN
from verify.coordinator.machine.events import StepClosed
from verify.coordinator.machine.history import History
from verify.coordinator.machine.state import State
from verify.coordinator.machine.transitions import apply
from verify.coordinator.services.activity import Activity, Peers, scalars
from verify.coordinator.services.judging import Judging
from verify.coordinator.services.status import Status


@contextmanager
def told(folder: Path, run: Filled) -> Iterator[tuple[Status, Activity]]:
    """The status of a coordinator at a time of the test's choice, and what it knows of workers."""
    with closing(journal_of(run, folder)) as journal:
        peers, edge = Peers(), edge_of(journal, tiny_spec())
        yield Status("run", journal, Judging(journal, "run"), edge.backlog, peers), peers.workers


def the_most(letter: str) -> dict:
    """The largest map that a worker may send of itself, in this letter."""
    for length in range(1024, 0, -1):
        with suppress(ValueError):
            return dict(scalars({"": letter * length}))
    raise AssertionError(letter)


@pytest.mark.parametrize("letter", ["a", "\u00e9", "\N{GRINNING FACE}"])
def test_a_command_reads_the_status_of_as_many_keys_as_may_come(tmp_path, letter: str):
    """Who registers 10,000 of them, and says of each what it may, must not take the operator's
    commands away."""
    run = Filled()
    run.register("x")
    with told(tmp_path, run) as (status, workers):
        workers.registered(key("x"), the_most(letter), run.now)
        workers.heartbeat(key("x"), the_most(letter), run.now)
        (worker,) = status.report()["workers"]
    assert MAX_UNPROVEN * len(json.dumps(worker)) < _MAX_STATUS_BYTES / 2


TOKENS = 10
"""Of each group that `filled` grades."""


def rates(run: Filled) -> dict[int, float | None]:
    """What the manifest of each step says, by step."""
    history, state, found = History(), State(run.state.policy), {}
    for event in run.events:
        if isinstance(event, StepClosed):
            stats = history.batch_stats(event.at, event.step, event.trained)
            found[event.step] = stats["accepted_tokens_per_s"]
        state = apply(state, event)
        history.take(event, state.leases)
    return found


def test_the_first_step_has_a_rate_as_every_other():
    run = Filled(POLICY)
    run.register("x"), run.publish(0)
    for seconds in (10.0, 2.0):
        first = run.lease("x")
        assert first is not None
        second = run.lease("x", holding=[first.digest])
        assert second is not None
        run.now += seconds
        run.answer(first), run.answer(second)
        run.advance()

    groups = POLICY.groups
    assert rates(run) == {0: groups * TOKENS / 10.0, 1: groups * TOKENS / 2.0}


def test_overlapping_steps_count_all_that_was_accepted_while_they_were_open():
    run = Filled(policy(groups=2, lease_timeout_s=1000.0))
    run.register("x"), run.register("y"), run.publish(0)
    first = run.lease("x")
    run.now += 4.0
    second = run.lease("y")  # opens step 1: all of step 0 is leased
    assert first is not None and second is not None
    assert (first.lease.step, second.lease.step) == (0, 1)
    run.now += 6.0
    run.answer(second), run.answer(first)
    run.advance()

    assert rates(run) == {0: 4 * TOKENS / 10.0, 1: 4 * TOKENS / 6.0}
