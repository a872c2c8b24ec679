"""Limits belong to a pair: what a worker's key is registered with, leased by, and trained for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from runspec.core.schema import RunSpec
from tests.verify.coordinator.filled import Filled, context_of, key, policy, registering_of
from tests.verify.profiles import document, made_profile, with_profile
from tests.verify.small_model import small_spec
from verify.coordinator.handlers.workers import summary
from verify.coordinator.journal import Journal
from verify.coordinator.machine.events import Event
from verify.coordinator.machine.leases import Rank
from verify.coordinator.machine.state import State
from verify.coordinator.requests import Refusal
from verify.thresholds import FLOAT32

OWN = document(made_profile(replace(FLOAT32, gap_mean=1e-6)))
OTHER = document(made_profile(sampler={"hardware": "cpu-b", "tensor": 2}))
UNKNOWN = {"device": "cpu-c", "tensor": 1}


class Run(Filled):
    """A run of the small spec's pool, over a real ledger, with the handlers of its workers."""

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        self.now, self.events = 1000.0, []
        filling = policy(groups_per_submission={"home": 2})
        self.journal = Journal(folder, filling, clock=lambda: self.now)
        self.publish(0)
        self.start(spec)

    @property
    def state(self) -> State:  # type: ignore[override]
        return self.journal.state

    def record(self, event: Event) -> None:
        self.journal.record(event)
        self.events.append(event)

    def start(self, spec: RunSpec) -> None:
        self.registering = registering_of(context_of(self.journal, spec))

    def come(self, name: str, **info: object) -> None:
        self.registering.register(key(name), "home", address="here", info=info)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, with_profile(small_spec(), OWN, OTHER))
    yield run
    run.journal.close()


def test_a_lease_names_the_devices_that_its_key_was_registered_with(run: Run) -> None:
    for name, info in {"a": {}, "b": {"device": "cpu-b", "tensor": 2}, "c": UNKNOWN}.items():
        run.come(name, **info)
        record = run.lease(name)
        assert record is not None
        assert record.lease.devices == {"a": "", "b": "cpu-b x 2", "c": "cpu-c x 1"}[name]


@pytest.mark.parametrize("other", [{}, {"device": "cpu-b", "tensor": 1}, {"device": "cpu-c"}])
def test_a_key_cannot_change_its_devices(run: Run, other: dict[str, object]) -> None:
    run.come("b", device="cpu-b", tensor=2)
    run.come("b", device="cpu-b", tensor=2)  # the same again
    with pytest.raises(Refusal, match="registered with cpu-b x 2: make another") as refused:
        run.come("b", **other)
    assert refused.value.status == 409


@pytest.mark.parametrize(
    ("info", "status"),
    [
        ({"device": "h100-80g"}, 403),
        ({"device": "cpu B"}, 400),
        ({"device": 1}, 400),
        ({"device": "cpu", "tensor": 0}, 400),
        ({"device": "cpu", "tensor": 1e3}, 400),
        ({"device": "cpu", "tensor": True}, 400),
    ],
)
def test_what_names_no_devices_of_the_pool_is_refused(
    run: Run, info: dict[str, object], status: int
) -> None:
    with pytest.raises(Refusal) as refused:
        run.come("b", **info)
    assert refused.value.status == status and key("b") not in run.state.workers


def test_uncalibrated_devices_are_on_probation_until_a_profile_covers_them(
    run: Run, tmp_path: Path
) -> None:
    # given a stranger whose devices nobody measured
    run.come("c", **UNKNOWN)
    # then all of its work is recomputed, a group at a time, and none of it is trained on
    assert run.state.share_of(key("c")) == 1.0
    record = run.lease("c")
    assert record is not None and (record.rank, record.lease.groups) == (Rank.NEW, 1)
    run.answer(record, "usable")
    found = run.state.leases[record.digest]
    assert (found.status, found.usable) == ("accepted", ())
    assert run.state.workers[key("c")].standing.accepted == 1
    # and the status names the pair
    (pair,) = summary(run.state)["pairs"]
    assert pair == {
        "pool": "home",
        "devices": "cpu-c x 1",
        "probation": True,
        "workers": 1,
        "accepted_submissions": 1,
        "rejected_submissions": 0,
    }
    # when the operator applies a profile of them
    covers = document(made_profile(sampler={"hardware": "cpu-c", "tensor": 1}))
    run.start(with_profile(small_spec(), OWN, OTHER, covers))
    # then its next groups are trained on
    assert not summary(run.state)["pairs"][0]["probation"]
    record = run.lease("c")
    assert record is not None
    run.answer(record, "usable")
    assert run.state.leases[record.digest].usable == (0,)
