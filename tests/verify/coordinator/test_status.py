"""What the status says of workers that are silent, and of newcomers that are held back."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from runspec.cli.desk import _MAX_STATUS_BYTES
from tests.verify.coordinator.deployment import tiny_spec
from tests.verify.coordinator.filled import Filled, key, policy
from tests.verify.coordinator.services import edge_of, journal_of
from verify.coordinator.activity import DEAD_AFTER_S, Peers, scalars
from verify.coordinator.edge.admission import MAX_UNPROVEN
from verify.coordinator.judging import Judging
from verify.coordinator.status import Status


class Told:
    """The status of a coordinator at a time of our choice."""

    def __init__(self, folder: Path, run: Filled) -> None:
        self.journal, peers = journal_of(run, folder), Peers()
        self.workers = peers.workers
        edge = edge_of(self.journal, tiny_spec())
        self._status = Status("run", self.journal, Judging(self.journal, "run"), edge, peers)

    def report(self) -> dict:
        return self._status.report()

    def close(self) -> None:
        self.journal.close()


def test_leases_of_silent_workers_are_told_until_they_speak_again(tmp_path):
    long = policy(lease_timeout_s=100.0)
    run = Filled(long)
    run.register("x"), run.register("y"), run.publish(0)
    held = run.lease("x"), run.lease("y")
    assert all(held)
    with closing(Told(tmp_path, run)) as told:
        assert told.report()["leases_of_dead_workers"] == []  # the process has only begun

        run.now += DEAD_AFTER_S
        told.workers.seen(key("y"), run.now)

        assert told.report()["leases_of_dead_workers"] == [
            {"worker": key("x"), "step": 0, "groups": 2, "silent_s": 30.0, "expires_in_s": 70.0}
        ]
        told.workers.heartbeat(key("x"), {}, run.now)
        assert told.report()["leases_of_dead_workers"] == []


def test_why_newcomers_are_held_back_is_told(tmp_path):
    few = policy(newcomer_groups=1, groups=4, groups_per_submission={"a": 1})
    run = Filled(few)
    run.register("known"), run.publish(0)
    run.work("known")
    run.register("new")
    assert run.lease("new") is not None
    with closing(Told(tmp_path, run)) as told:
        (step,) = told.report()["open_steps"]
        assert step["needed_groups"] == 2
        assert {k: step["newcomers"][k] for k in ("may_hold", "hold", "failed_lately")} == {
            "may_hold": 1,
            "hold": 1,
            "failed_lately": 0,
        }
        assert step["newcomers"]["held_back"].startswith(
            "workers without an accepted submission hold 1 groups and failed to deliver 0"
        )
        assert told.report()["unproven"] == {"registered": 1, "may_register": MAX_UNPROVEN}
        workers = {w["key"]: w for w in told.report()["workers"]}
        assert workers[key("known")]["reputation"] == round(1 / 21, 4)


def the_most(letter: str) -> dict:
    """The largest map that a worker may send of itself, in this letter."""
    for length in range(120, 0, -1):
        try:
            return dict(
                scalars({f"{n:x}{letter * (length - 1)}": letter * length for n in range(16)})
            )
        except ValueError:
            continue
    raise AssertionError(letter)


@pytest.mark.parametrize("letter", ["a", "\u00e9", "\N{GRINNING FACE}"])
def test_a_command_reads_the_status_of_as_many_keys_as_may_come(tmp_path, letter: str):
    """Who registers 10,000 of them, and says of each what it may, must not take the operator's
    commands away."""
    run = Filled()
    run.register("x")
    with closing(Told(tmp_path, run)) as told:
        told.workers.registered(key("x"), the_most(letter), run.now)
        told.workers.heartbeat(key("x"), the_most(letter), run.now)
        (worker,) = told.report()["workers"]
    assert MAX_UNPROVEN * len(json.dumps(worker)) < _MAX_STATUS_BYTES / 2
