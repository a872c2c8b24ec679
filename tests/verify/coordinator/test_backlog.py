"""More comes in than validators judge: workers wait, nothing is lost, the disk stays bounded."""

from __future__ import annotations

import base64
import http.client
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from runspec.core.keys import SigningKey
from runspec.core.spec.schema import Backlog as Limits
from runspec.core.spec.schema import RunSpec
from tests.verify.coordinator.deployment import (
    DEADLINE_S,
    RUN,
    Site,
    submission,
    tiny_spec,
    verdict,
)
from tests.verify.coordinator.filled import POLICY, Filled, digest, policy
from tests.verify.coordinator.in_process import chunks, edge_of, journal_of, leasing_of, roles_of
from tests.verify.coordinator.over_http import granted, status
from tests.waiting import eventually
from verify.audit.replay import audit
from verify.client import SubmissionRefused
from verify.coordinator.edge import backlog as backlog_module
from verify.coordinator.intake import Refusal
from verify.coordinator.ledger.ledger import Ledger
from verify.coordinator.machine.events import (
    IllegalTransition,
    SubmissionDeferred,
    SubmissionReceived,
)
from verify.coordinator.machine.state import LeaseRecord
from verify.coordinator.machine.transitions import apply
from verify.formats.lease import lease_digest
from verify.formats.submission import SubmissionEnvelope
from verify.request_auth import ENVELOPE, sign_request


def small(**limits: object) -> RunSpec:
    """The tiny spec with a backlog of one submission."""
    spec = tiny_spec(lease_timeout="2s")
    backlog = Limits.model_validate({"submissions": 1, **limits})
    return spec.model_copy(update={"verify": spec.verify.model_copy(update={"backlog": backlog})})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(backlog_module, "FIRST_RETRY_S", 1)
    site = Site(tmp_path, small())
    site.publish(0)
    with site.origin():
        yield site


def test_what_is_too_much_waits_and_all_of_it_is_taken(site: Site):
    with site.serving(), ThreadPoolExecutor(1) as threads:
        (one, first), (two, second) = site.worker(), site.worker()
        (data, lease), (late_data, late_lease) = granted(site, first), granted(site, second)
        first.submit(*submission(data, lease, one))
        envelope, table = submission(late_data, late_lease, two)

        # given one submission that waits for its verdict, when the next comes, then it is deferred
        submitting = threads.submit(second.submit, envelope, table)
        eventually(lambda: status(site)["backlog"]["deferred"] == 1, "deferral")
        assert "verify.backlog.submissions is 1" in status(site)["backlog"]["withheld"]
        assert not submitting.done()
        folder = site.run_dir / "rollouts" / "step_0"
        assert len(list(folder.iterdir())) == 2  # the first, and its envelope

        # and no lease is granted
        _, third = site.worker()
        assert third.lease(0.1) is None

        # when the lease's own time is over, then it is not, but for that submission alone
        eventually(lambda: time.time() > late_lease.expires, "the lease's own end")
        other = submission(late_data, late_lease, two, note=1)
        with pytest.raises(SubmissionRefused, match="expired for all but what was deferred"):
            site.client(two).submit(*other)

        # when a validator comes, then everything is taken, judged and trained
        validator = site.client(site.validator)
        for expected in (lease, late_lease):
            item = validator.next_submission(DEADLINE_S)
            assert item is not None
            validator.verdict(*verdict(item.submission, expected, site.validator))
        submitting.result(DEADLINE_S)
        batch = site.batch(0)
        assert len(batch.groups) == 4 and batch.complete
        assert set(status(site)["backlog"].values()) == {0, None}
        assert batch.stats["verdict_latency_p99"] >= batch.stats["verdict_latency_p50"] > 0.0
        assert batch.stats["manifest_latency_p99"] >= batch.stats["verdict_latency_p99"]
        before = status(site)["latency"]
        assert before["verdict"]["run"]["count"] == before["manifest"]["recent"]["count"] == 2
        metrics = httpx.get(f"{site.url}/metrics", trust_env=False).text
        assert 'runspec_coordinator_verdict_latency_seconds_bucket{le="+Inf"} 2.0' in metrics
        assert "runspec_coordinator_manifest_latency_seconds_sum" in metrics

    # and a restart keeps the latencies
    with site.serving():
        assert status(site)["latency"] == before
    with closing(Ledger(site.run_dir / "state.db")) as ledger:
        events = list(ledger.events())
    deferred = {e.lease for e in events if isinstance(e, SubmissionDeferred)}
    assert deferred == {lease_digest(late_data)}
    assert audit(site.run_dir, root_key=site.root.public_hex).findings == []


def test_the_answer_comes_before_the_body_is_read(site: Site):
    with site.serving():
        (one, first), (two, second) = site.worker(), site.worker()
        (data, lease), late = granted(site, first), granted(site, second)
        first.submit(*submission(data, lease, one))
        envelope, table = submission(*late, two)
        headers = sign_request(two, run=RUN, method="POST", path="/v1/submissions", body=table)
        headers |= {
            ENVELOPE: base64.b64encode(envelope).decode(),
            "Content-Length": str(len(table)),
        }

        with closing(http.client.HTTPConnection(site.url.removeprefix("http://"))) as connection:
            connection.putrequest("POST", "/v1/submissions")
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders()  # and not a byte of the body
            answer = connection.getresponse()

            assert answer.status == 429
            assert answer.headers["Retry-After"] == "1"
            assert b"wait for a verdict" in answer.read()

        # the same bytes again, of what was taken in already, are no more than that
        first.submit(*submission(data, lease, one))


# -- The limits ----------------------------------------------------------------------------------

TICK_S = 1e-3
"""Seconds between two looks at the clock, where it goes on."""


class Caller:
    """A worker with two open leases, and the services that it calls, with a disk of their own."""

    def __init__(self, folder: Path) -> None:
        self.now, self.tick, self.free = 1000.0, 0.0, 10_000
        run = Filled(policy(groups_per_submission={"near": 2}))
        run.register("x", pool="near")
        run.publish(0)
        run.lease("x"), run.lease("x", holding=list(run.state.leases))
        self.journal = journal_of(run, folder, self._look)
        limits = Limits.model_validate(
            {"submissions": 10, "bytes": "1000B", "disk_reserve": "500B"}
        )
        spec = tiny_spec()
        edge = edge_of(self.journal, spec, limits=limits, free_bytes=lambda: self.free)
        self.backlog = edge.backlog
        self.leasing = leasing_of(self.journal, spec, SigningKey.generate(), roles_of(), edge)

    def _look(self) -> float:
        self.now += self.tick
        return self.now

    def record(self, index: int) -> LeaseRecord:
        return list(self.journal.state.leases.values())[index]

    def submit(self, index: int, size: int) -> None:
        lease = self.record(index).digest
        self.journal.record(SubmissionReceived(self.now, lease, digest("s", lease), size))

    def envelope(self, index: int, size: int, what: str = "s") -> SubmissionEnvelope:
        record = self.record(index)
        brought = digest(what, record.digest)
        return SubmissionEnvelope(
            *("run", 0, record.lease.worker, index, record.digest, brought, size)
        )

    def ask(self, index: int, size: int) -> Refusal | None:
        try:
            with self.backlog.reserve(self.record(index), self.envelope(index, size), self.now):
                return None
        except Refusal as refusal:
            return refusal

    async def bring(self, what: str) -> Refusal:
        """Brings a submission to the last lease, whose body must not be read."""
        with pytest.raises(Refusal) as refused:
            await self.leasing.submit(self.envelope(1, 10, what), b"signed", chunks(b"unread"))
        return refused.value


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[Caller]:
    caller = Caller(tmp_path)
    yield caller
    caller.journal.close()


def test_a_reserve_of_the_disk_is_kept(caller: Caller):
    caller.free = 800

    assert caller.ask(0, 300) is None
    refusal = caller.ask(0, 301)
    assert refusal is not None and "verify.backlog.disk_reserve is 500" in refusal.words
    with caller.backlog.reserve(caller.record(0), caller.envelope(0, 200), caller.now):
        assert caller.ask(1, 101) is not None  # what is being uploaded counts
    assert caller.backlog.full() is None
    caller.free = 500
    assert caller.backlog.full() is not None


def test_when_to_come_again_follows_the_rate_of_verdicts(caller: Caller, monkeypatch: Any):
    caller.submit(0, 1000)
    found = []
    for rate in (0.1, 0.1, 1e-6):  # the second waits behind the first: itself
        monkeypatch.setattr(caller.journal.history, "verdicts_per_s", lambda now, rate=rate: rate)
        found.append(caller.ask(1, 1))
    assert [each and each.retry_after_s for each in found] == [
        *(10, 20, backlog_module.LONGEST_RETRY_S)
    ]
    # and a worker that does not come is not expected for ever
    assert caller.backlog.report()["deferred"] == 1
    caller.now += 2 * backlog_module.LONGEST_RETRY_S
    assert caller.backlog.report()["deferred"] == 0


def test_a_lease_lasts_while_its_holder_is_told_to_wait_and_not_for_ever(caller: Caller):
    caller.submit(0, 1000)
    own_end = caller.record(1).lease.expires

    # a deferral is recorded only where the lease needs it, and not at every question
    rows, _ = caller.journal.ledger.head
    for _ in range(5):
        assert caller.ask(1, 1) is not None
    assert caller.journal.ledger.head[0] == rows + 1
    assert caller.record(1).expires > own_end

    # it ends with fill.deadline after the lease's own time at the latest
    while caller.now < caller.record(1).expires:
        caller.now += 5.0
        if caller.now < caller.record(1).expires:
            assert caller.ask(1, 1) is not None
    assert caller.record(1).expires == own_end + POLICY.deadline_s


def test_a_deferral_is_for_one_submission_and_of_an_open_lease(caller: Caller):
    caller.submit(0, 1000)
    caller.ask(1, 1)
    lease, past = caller.record(1).digest, caller.record(1).lease.expires + 1.0

    for event in (
        SubmissionDeferred(past, lease, digest("another"), past + 60.0),
        SubmissionDeferred(past, lease, digest("s", lease), past + 6000.0),
        SubmissionDeferred(past, lease, digest("s", lease), past - 1.0),
        SubmissionDeferred(past, caller.record(0).digest, digest("s", lease), past + 60.0),
    ):
        with pytest.raises(IllegalTransition):
            apply(caller.journal.state, event)
    apply(caller.journal.state, SubmissionDeferred(past, lease, digest("s", lease), past + 90.0))


@pytest.mark.parametrize("looks", [0.5, 1.5, 2.5])
@pytest.mark.parametrize("deferred", [False, True])
async def test_at_the_end_of_a_lease_a_submission_waits_or_is_too_late(
    caller: Caller, looks: float, deferred: bool
) -> None:
    """By a clock that goes on between two looks at it: no event that cannot follow is recorded."""
    own_end, caller.tick, caller.free = caller.record(1).expires, TICK_S, 0
    if deferred:  # the lease was extended for another submission
        caller.now = own_end - 1.0
        assert (await caller.bring("first")).status == 429
        assert caller.record(1).expires > own_end
    caller.now = own_end - looks * TICK_S
    assert (await caller.bring("second")).status in (409, 429)
