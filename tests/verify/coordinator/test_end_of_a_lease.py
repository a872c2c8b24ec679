"""A submission that comes at the very end of its lease, by a clock that goes on meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from runspec.core.keys import SigningKey
from runspec.core.roles import Roles
from runspec.core.spec.schema import Backlog as Limits
from tests.verify.coordinator.deployment import RUN, tiny_spec
from tests.verify.coordinator.filled import Filled, digest, policy
from verify.coordinator.admission import Admission
from verify.coordinator.backlog import Backlog
from verify.coordinator.intake import Refusal
from verify.coordinator.journal import Journal
from verify.coordinator.leasing import Leasing
from verify.formats.submission import SubmissionEnvelope

TICK_S = 1e-3
"""Between two looks at the clock."""


class Desk:
    """The workers' desk of a run that takes nothing in, two leases of a worker, and the clock."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        run = Filled(policy(groups_per_submission={"near": 2}))
        run.register("x", pool="near")
        run.publish(0)
        run.lease("x")
        spec, nobody = tiny_spec(), frozenset[str]()
        self.journal = Journal(folder, run.state.policy, clock=self._tick)
        for event in run.events:
            self.journal.record(event)
        roles = Roles(RUN, 0.0, 1e12, nobody, nobody, nobody)
        full = Backlog(
            self.journal,
            lambda: self.journal.state.to_judge,
            Limits.model_validate({"disk_reserve": "500B"}),
            free_bytes=lambda _: 0,
        )
        admission = Admission(spec, roles, [])
        key = SigningKey.generate()
        self.leasing = Leasing(self.journal, spec, key, roles, admission, full)

    def _tick(self) -> float:
        self.now += TICK_S
        return self.now

    @property
    def expires(self) -> float:
        (record,) = self.journal.state.leases.values()
        return record.expires

    async def bring(self, what: str) -> Refusal:
        (record,) = self.journal.state.leases.values()
        lease = record.lease
        envelope = SubmissionEnvelope(
            *("run", lease.step, lease.worker, lease.index, record.digest, digest(what), 10)
        )
        with pytest.raises(Refusal) as refused:
            await self.leasing.submit(envelope, b"signed", nothing())
        return refused.value


async def nothing() -> AsyncIterator[bytes]:
    raise AssertionError("the body is read of what is refused")
    yield b""


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.journal.close()


LOOKS = [0.5, 1.5, 2.5]
"""How many looks at the clock before the end the submission comes."""


@pytest.mark.parametrize("looks", LOOKS)
async def test_it_is_told_to_wait_or_is_too_late_and_the_coordinator_goes_on(
    desk: Desk, looks: float
) -> None:
    desk.now = desk.expires - looks * TICK_S
    assert (await desk.bring("s")).status in (409, 429)


@pytest.mark.parametrize("looks", LOOKS)
async def test_another_submission_at_the_end_of_the_leases_own_time(
    desk: Desk, looks: float
) -> None:
    # given a lease that was extended for one submission
    own_end = desk.expires
    desk.now = own_end - 1.0
    assert (await desk.bring("first")).status == 429
    assert desk.expires > own_end
    # when another is brought just then
    desk.now = own_end - looks * TICK_S
    assert (await desk.bring("second")).status in (409, 429)
