"""The services in any order, by a clock that jumps, over a ledger that breaks and a process that is
killed at any append: no event is refused, no file lost, and an audit finds nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from runspec.core.errors import NotNow, UserError
from runspec.core.keys import SigningKey
from runspec.core.latest import Latest
from runspec.core.process import RunStopped
from runspec.core.run_files import submission_files
from runspec.core.spec.schema import RunSpec
from tests.verify.coordinator.deployment import RUN, Site, submission, tiny_spec, verdict
from tests.verify.coordinator.filled import digest
from tests.verify.coordinator.in_process import (
    Breaking,
    Killed,
    chunks,
    edge_of,
    leasing_of,
    roles_of,
)
from verify.audit.replay import audit
from verify.coordinator.intake import Refusal
from verify.coordinator.journal import Finished, Journal
from verify.coordinator.ledger.ledger import Ledger
from verify.coordinator.machine.state import Policy
from verify.coordinator.machine.transitions import replay
from verify.coordinator.services.activity import Activity
from verify.coordinator.services.closing import Closing
from verify.coordinator.services.judging import Judging
from verify.coordinator.services.operator import OperatorService
from verify.formats.lease import Lease, lease_digest, open_lease
from verify.formats.submission import open_submission
from verify.formats.verdict import open_verdict

ACTS = 500


HOW = ["full", "broken", "broken unwritten", "killed", "killed unwritten"]


class Coordinator:
    """Its services, and all who call them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random, self.now = random.Random(seed), 1e6
        values = tiny_spec(steps=8, lease_timeout="30s").model_dump(mode="json", by_alias=True)
        values["algorithm"]["async_level"] = self.random.choice([0, 1, 2])
        values["verify"]["newcomer_share"] = self.random.choice([0.25, 1.0])
        values["verify"]["backlog"]["submissions"] = self.random.choice([2, 50])
        self.spec = RunSpec.model_validate(values)
        self.site = Site(folder, self.spec)
        self.workers = [SigningKey.generate() for _ in range(4)]
        self.validators = [self.site.validator, SigningKey.generate()]
        self.site.sign_roles(*self.validators)
        self.held: list[tuple[SigningKey, bytes, Lease]] = []
        self.start()

    def start(self) -> None:
        spec, site = self.spec, self.site
        validators = [key.public_hex for key in self.validators]
        roles = roles_of(coordinator=[site.coordinator.public_hex], validator=validators)
        self.store = Breaking(site.run_dir / "state.db")
        self.journal = Journal(
            site.run_dir, Policy.of(spec), ledger=Ledger(self.store), clock=self._tick
        )
        self.judging = Judging(self.journal, RUN)
        edge = edge_of(self.journal, spec)
        self.leasing = leasing_of(self.journal, spec, site.coordinator, roles, edge)
        self.closing = Closing(self.journal, RUN, site.coordinator, Activity())
        self.operator = OperatorService(self.journal, roles)

    def _tick(self) -> float:
        self.now += 1e-3
        return self.now

    def start_again(self) -> None:
        self.journal.close()
        self.start()

    async def act(self) -> None:
        worker = self.random.choice(self.workers)
        acts = {"work": 12, "submit": 12, "judge": 12, "wait": 12, "publish": 6, "register": 3}
        acts |= {"release": 1, "jump": 1, "ban": 1, "break": 1, "again": 1}
        (act,) = self.random.choices(list(acts), list(acts.values()))
        match act:
            case "register":
                self.leasing.register(worker.public_hex, "near", address="here")
            case "work":
                await self.work(worker)
            case "submit" if self.held:
                await self.submit(*self.random.choice(self.held))
            case "judge":
                await self.judge()
            case "wait":
                self.now += self.random.choice([0.0, 0.0, 1.0, 5.0])
                self.closing._advance(self._tick())
            case "publish":
                step = self.journal.state.next_close
                latest = Latest(RUN, step, digest("manifest", step), self.now, self.now + 100.0)
                self.closing.published(latest)
            case "release":
                self.leasing.release(worker.public_hex, list(self.journal.state.leases))
            case "jump":
                self.now += self.random.choice([-3600.0, -60.0, 20.0, 40.0])
            case "ban":
                order = {"key": worker.public_hex, "reason": "by hand"}
                banned = worker.public_hex in self.journal.state.bans
                (self.operator.unban if banned else self.operator.ban)(order)
            case "break":
                self.store.how = self.random.choice(HOW)
            case "again":
                self.start_again()

    async def work(self, worker: SigningKey) -> None:
        holding = [lease_digest(document) for _, document, _ in self.held]
        document = await self.leasing.lease(worker.public_hex, holding, 0.0)
        if document is not None:
            key = frozenset({self.site.coordinator.public_hex})
            self.held.append((worker, document, open_lease(document, coordinators=key)))

    async def submit(self, worker: SigningKey, document: bytes, lease: Lease) -> None:
        if self.random.random() < 0.1:  # at the last moment
            self.now = max(self.now, lease.expires - self.random.randint(1, 4) * 1e-3)
        signed, table = submission(document, lease, worker, note=self.random.randrange(2))
        await self.leasing.submit(open_submission(signed), signed, chunks(table))
        assert len(self.judging.submitted()) <= self.spec.verify.backlog.submissions

    async def judge(self) -> None:
        key, accepted = self.random.choice(self.validators), self.random.random() < 0.85
        found = await self.judging.next_submission(key.public_hex, [], 0.0)
        if found is not None:
            name = found[0].submission
            assert name is not None
            signed, rows = verdict(name, found[0].lease, key, accepted=accepted)
            envelope = open_verdict(signed, validators=frozenset({key.public_hex}))
            await self.judging.judge(key.public_hex, envelope, signed, chunks(rows))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_whatever_comes_in_whatever_order(tmp_path: Path, seed: int) -> None:
    run = Coordinator(tmp_path, seed)
    for _ in range(ACTS):
        try:
            await run.act()
        except (Refusal, NotNow):
            pass  # whoever asked is told so
        except (Finished, RunStopped):
            break
        except (UserError, Killed):  # the ledger went on without it, or it was killed
            run.start_again()
    run.start_again()
    state = run.journal.state
    run.journal.close()

    report = audit(run.site.run_dir, root_key=run.site.root.public_hex)
    assert report.findings == []
    ledger = Ledger(run.site.run_dir / "state.db")
    assert replay(Policy.of(run.spec), ledger.events()) == state
    ledger.close()
    for record in state.leases.values():
        if record.submission is not None:
            files = submission_files(run.site.run_dir, record.lease.step, record.submission)
            assert files.submission.exists() and files.submission_envelope.exists()
            assert files.verdict.exists() == (record.verdict is not None)
