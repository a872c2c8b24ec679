"""A row of which nobody can say whether it was written: then its files may not go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes
from runspec.core.keys import SigningKey
from tests.verify.coordinator.deployment import RUN, tiny_spec, verdict
from tests.verify.coordinator.filled import Filled, policy
from tests.verify.coordinator.services import chunks, edge_of, roles_of
from verify.coordinator.events import SubmissionJudged
from verify.coordinator.intake import Refusal
from verify.coordinator.journal import Journal
from verify.coordinator.judging import Judging
from verify.coordinator.leasing import Leasing
from verify.coordinator.policy import Policy
from verify.coordinator.state import LeaseRecord
from verify.formats.layout import SubmissionFiles, submission_files
from verify.formats.submission import SubmissionEnvelope
from verify.formats.verdict import open_verdict
from verify.ledger import Ledger, NotNow
from verify.ledger_store import SqliteStore, StoredRow, StoreError

TABLE = b"what a worker sampled"


class Breaking(SqliteStore):
    """A store whose connection breaks at the next append, before it is committed or after."""

    committed: bool | None = None

    def append(self, rows: Sequence[StoredRow]) -> None:
        if self.committed is None:
            return super().append(rows)
        if self.committed:
            super().append(rows)
        self.committed = None
        raise StoreError("the connection broke", passing=True, in_doubt=True)


class Desks:
    """Both services of a run of one worker with one open lease."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        run = Filled(policy(groups_per_submission={"near": 2}))
        run.register("x", pool="near")
        run.publish(0)
        run.lease("x")
        self.now = run.now
        with closing(self.journal(run.state.policy)) as journal:
            for event in run.events:
                journal.record(event)
        self.policy, self.validator = run.state.policy, SigningKey.generate()

    def journal(self, policy: Policy) -> Journal:
        self.store = Breaking(self.folder / "state.db")
        return Journal(self.folder, policy, ledger=Ledger(self.store), clock=lambda: self.now)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """From a start of the coordinator until it is killed."""
        self.at = self.journal(self.policy)
        spec, roles = tiny_spec(), roles_of()
        edge = edge_of(self.at, spec)
        self.leasing = Leasing(self.at, spec, SigningKey.generate(), roles, edge)
        self.judging = Judging(self.at, RUN)
        with closing(self.at):
            yield

    @property
    def lease(self) -> LeaseRecord:
        (record,) = self.at.state.leases.values()
        return record

    @property
    def files(self) -> SubmissionFiles:
        return submission_files(self.folder, 0, digest_bytes(TABLE))

    async def submit(self, body: bytes = TABLE) -> None:
        lease, digest = self.lease.lease, digest_bytes(TABLE)
        envelope = SubmissionEnvelope(
            *("run", lease.step, lease.worker, lease.index, self.lease.digest, digest, len(TABLE))
        )
        await self.leasing.submit(envelope, b"signed", chunks(body))

    async def judge(self, validator: SigningKey | None = None) -> None:
        validator = validator or self.validator
        signed, rows = verdict(digest_bytes(TABLE), self.lease.lease, validator)
        key = validator.public_hex
        envelope = open_verdict(signed, validators=frozenset({key}))
        await self.judging.judge(key, envelope, signed, chunks(rows))


@pytest.fixture
def desks(tmp_path: Path) -> Desks:
    return Desks(tmp_path)


@pytest.mark.parametrize("committed", [True, False])
async def test_a_submission_is_there_after_the_next_start_if_its_row_is(
    desks: Desks, committed: bool
) -> None:
    with desks.at_work():
        desks.store.committed = committed
        with pytest.raises(NotNow):
            await desks.submit()
    with desks.at_work():
        assert desks.lease.status == ("submitted" if committed else "open")
        assert desks.files.submission.exists() == committed
        assert desks.files.submission_envelope.exists() == committed


@pytest.mark.parametrize("committed", [True, False])
async def test_a_verdict_is_there_after_the_next_start_if_its_row_is(
    desks: Desks, committed: bool
) -> None:
    with desks.at_work():
        await desks.submit()
        desks.store.committed = committed
        with pytest.raises(NotNow):
            await desks.judge()
    with desks.at_work():
        assert desks.lease.status == ("accepted" if committed else "submitted")
        assert desks.files.verdict.exists() == committed
        assert desks.files.verdict_envelope.exists() == committed
        assert desks.files.submission.exists()


async def test_who_brings_it_again_does_not_take_away_what_may_have_a_row(desks: Desks) -> None:
    """Half of it, and then all: the coordinator finds that its ledger went on, and ends."""
    with desks.at_work():
        desks.store.committed = True
        with pytest.raises(NotNow):
            await desks.submit()
        with pytest.raises(Refusal):
            await desks.submit(TABLE[:-1])
        with pytest.raises(UserError, match="another process wrote"):
            await desks.submit()
    with desks.at_work():
        assert desks.lease.status == "submitted"
        assert desks.files.submission.read_bytes() == TABLE


@pytest.mark.parametrize("committed", [True, False])
async def test_another_validators_verdict_is_not_put_in_the_place_of_one_that_may_have_a_row(
    desks: Desks, committed: bool
) -> None:
    other = SigningKey.generate()
    with desks.at_work():
        await desks.submit()
        desks.store.committed = committed
        with pytest.raises(NotNow):
            await desks.judge()
        if committed:
            with pytest.raises(UserError, match="another process wrote"):
                await desks.judge(other)
        else:
            await desks.judge(other)
    with desks.at_work():
        (judged,) = (e for e in desks.at.ledger.events() if isinstance(e, SubmissionJudged))
        assert judged.validator == (desks.validator if committed else other).public_hex
        signed = desks.files.verdict_envelope.read_bytes()
        assert open_verdict(signed, validators=frozenset({judged.validator})).accepted


async def test_where_the_row_was_not_written_it_is_taken_in_when_it_is_brought_again(
    desks: Desks,
) -> None:
    with desks.at_work():
        desks.store.committed = False
        with pytest.raises(NotNow):
            await desks.submit()
        await desks.submit()
        assert desks.lease.status == "submitted"
        assert desks.files.submission.read_bytes() == TABLE
