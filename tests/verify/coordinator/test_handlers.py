"""The coordinator's handlers: backlog, turns, clocks, what workers report, a relay's answers."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path

import pytest

from runspec.core.http_client import Answer, NoAnswer
from runspec.core.process import RunStopped
from runspec.core.roles import Latest, Roles, sign_latest
from runspec.core.schema import Backlog as Limits
from runspec.core.signed import SigningKey
from tests.verify.coordinator.deployment import DEADLINE_S, RUN, Site, submission, tiny_spec
from tests.verify.coordinator.filled import (
    POLICY,
    Filled,
    chunks,
    context_of,
    digest,
    journal_of,
    key,
    policy,
    submission_of,
)
from tests.verify.coordinator.over_http import check, granted, status
from tests.waiting import eventually
from verify.audit import audit
from verify.coordinator import handlers as backlog_module
from verify.coordinator import run as run_module
from verify.coordinator.handlers.leasing import Leasing
from verify.coordinator.handlers.workers import Activity
from verify.coordinator.journal import Journal
from verify.coordinator.machine import filling
from verify.coordinator.machine.events import SubmissionReceived, VersionPublished
from verify.coordinator.machine.leases import LeaseRecord
from verify.coordinator.requests import Refusal
from verify.coordinator.run import Closing
from verify.coordinator_http import ENVELOPE, sign_request
from verify.formats.submission import SubmissionEnvelope

# -- Too much waits for a verdict ----------------------------------------------------------------


def test_what_is_too_much_waits_before_its_body_is_read_and_all_of_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(backlog_module, "FIRST_RETRY_S", 1)
    backlog = {"backlog": {"submissions": 1}}
    site = Site(tmp_path, tiny_spec(lease_timeout="1h", verify=backlog))
    site.publish(0)
    with site.origin(), site.serving(), ThreadPoolExecutor(1) as threads:
        (one, first), (two, second) = site.worker(), site.worker()
        mine, late = submission(*granted(site, first), one), submission(*granted(site, second), two)
        first.submit(*mine)
        # given one submission that waits for its verdict, when the next comes, then it is deferred
        path, (envelope, table) = "/v1/submissions", late
        headers = sign_request(two, run=RUN, method="POST", path=path, body=table)
        headers[ENVELOPE] = base64.b64encode(envelope).decode()
        with closing(HTTPConnection(site.url.removeprefix("http://"))) as connection:
            connection.putrequest("POST", path)
            for name, value in {**headers, "Content-Length": str(len(table))}.items():
                connection.putheader(name, value)
            connection.endheaders()  # and not a byte of the body
            answer = connection.getresponse()
            assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
            assert b"wait for a verdict" in answer.read()
        submitting = threads.submit(second.submit, *late)
        eventually(lambda: status(site)["backlog"]["deferred"] == 1, "deferral")
        assert "verify.backlog.submissions is 1" in status(site)["backlog"]["withheld"]
        assert len(list((site.run_dir / "rollouts" / "step_0").iterdir())) == 2
        # and no lease is granted, and the same bytes again are no more than that
        assert site.worker()[1].lease(0.1) is None
        first.submit(*mine)
        # when a validator comes, then everything is taken, judged and trained
        check(site, site.client(site.validator)), check(site, site.client(site.validator))
        submitting.result(DEADLINE_S)
        assert len(site.batch(0).groups) == 4
        assert set(status(site)["backlog"].values()) == {0, None}
        before = status(site)["latency"]
        assert before["verdict"]["run"]["count"] == before["manifest"]["recent"]["count"] == 2
    with site.serving():  # and a restart keeps the latencies
        assert status(site)["latency"] == before
    assert audit(site.run_dir, root_key=site.root.public_hex).findings == []


class Caller:
    """A worker with two open leases, and the handlers that it calls, with a disk of their own."""

    def __init__(self, folder: Path) -> None:
        self.now, self.tick, self.free = 1000.0, 0.0, 10_000
        run = Filled(policy(groups_per_submission={"near": 2}))
        run.register("x", pool="near"), run.publish(0)
        run.lease("x"), run.further("x")
        self.journal = journal_of(run, folder, self._look)
        limits = Limits.model_validate(
            {"submissions": 10, "bytes": "1000B", "disk_reserve": "500B"}
        )
        context = context_of(self.journal, tiny_spec(), limits=limits, free_bytes=lambda: self.free)
        self.backlog, self.leasing = context.backlog, Leasing(context)

    def _look(self) -> float:
        self.now += self.tick
        return self.now

    def record(self, index: int) -> LeaseRecord:
        return list(self.journal.state.leases.values())[index]

    def submit(self, index: int, size: int) -> None:
        record = self.record(index)
        event = SubmissionReceived(self.now, record.digest, submission_of(record), size)
        self.journal.record(event)

    def envelope(self, index: int, size: int, what: str = "s") -> SubmissionEnvelope:
        record = self.record(index)
        brought = digest(what, record.digest)
        names = ("run", 0, record.lease.worker, index, record.digest, brought)
        return SubmissionEnvelope(*names, size)

    def ask(self, index: int, size: int) -> Refusal | None:
        try:
            with self.backlog.reserve(self.record(index), self.envelope(index, size), self.now):
                return None
        except Refusal as refusal:
            return refusal

    async def bring(self, what: str) -> int:
        """Brings a submission to the last lease, whose body must not be read; how it is refused."""
        with pytest.raises(Refusal) as refused:
            await self.leasing.submit(self.envelope(1, 10, what), b"signed", chunks(b"unread"))
        return refused.value.status


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[Caller]:
    caller = Caller(tmp_path)
    yield caller
    caller.journal.close()


def test_a_reserve_of_the_disk_is_left_free(caller: Caller):
    caller.free = 800
    assert caller.ask(0, 300) is None
    refusal = caller.ask(0, 301)
    assert refusal is not None and "verify.backlog.disk_reserve is 500" in refusal.words
    with caller.backlog.reserve(caller.record(0), caller.envelope(0, 200), caller.now):
        assert caller.ask(1, 101) is not None  # what is being uploaded counts
    assert caller.backlog.full() is None
    caller.free = 500
    assert caller.backlog.full() is not None


def test_when_to_come_again_follows_the_rate_of_verdicts(caller: Caller, monkeypatch):
    caller.submit(0, 1000)
    found = []
    for rate in (0.1, 0.1, 1e-6):  # the second waits behind the first: itself
        monkeypatch.setattr(caller.journal.history, "verdicts_per_s", lambda now, rate=rate: rate)
        found.append(caller.ask(1, 1))
    longest = backlog_module.LONGEST_RETRY_S
    assert [each and each.retry_after_s for each in found] == [10, 20, longest]
    # and a worker that does not come is not expected for ever
    assert caller.backlog.report()["deferred"] == 1
    caller.now += 2 * longest
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


@pytest.mark.parametrize("looks", [0.5, 1.5, 2.5])
@pytest.mark.parametrize("deferred", [False, True])
async def test_at_the_end_of_a_lease_a_submission_waits_or_is_too_late(caller, looks, deferred):
    """By a clock that goes on between two looks at it: no event that cannot follow is recorded."""
    own_end, caller.tick, caller.free = caller.record(1).expires, 1e-3, 0
    if deferred:  # the lease was extended for another submission
        caller.now = own_end - 1.0
        assert await caller.bring("first") == 429
        assert caller.record(1).expires > own_end
    caller.now = own_end - looks * caller.tick
    assert await caller.bring("second") in (409, 429)


# -- Turns and clocks ----------------------------------------------------------------------------


@pytest.mark.parametrize("comes", ["s1", "y"])
def test_a_request_that_comes_as_something_changes_waits_for_its_turn(tmp_path: Path, comes: str):
    """Else who asks very often would be served before those who wait already."""
    run, spec = Filled(policy(groups=2, groups_per_submission={"near": 2})), tiny_spec()
    run.register("x", "near")
    run.register(comes, "near", own=comes == "y")

    async def served() -> list[str]:
        with closing(journal_of(run, tmp_path)) as journal:
            leasing = Leasing(context_of(journal, spec))
            waits = asyncio.create_task(leasing.lease(key("x"), (), 1e6))
            await asyncio.sleep(0.0)
            # when there is work, and another asks before the first has heard of it
            journal.record(VersionPublished(run.now, 0, digest("manifest", 0)))
            await leasing.lease(key(comes), (), 0.0)
            await waits
            return [record.lease.worker for record in journal.state.leases.values()]

    assert asyncio.run(served())[0] == key("x")


def test_one_event_serves_all_that_wait_in_turn_and_a_few_at_a_time(tmp_path: Path):
    run = Filled(policy(groups=60, max_groups=60, groups_per_submission={"near": 2}))
    names = [str(number) for number in range(30)]
    for name in names:
        run.register(name, "near")

    async def served() -> list[str]:
        with closing(journal_of(run, tmp_path)) as journal:
            leasing = Leasing(context_of(journal, tiny_spec()))
            waits = [asyncio.create_task(leasing.lease(key(name), (), 1e6)) for name in names[::-1]]
            await asyncio.sleep(0.0)
            # when the work comes that all wait for
            journal.record(VersionPublished(run.now, 0, digest("manifest", 0)))
            # then others are answered before the last have it
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            assert not all(wait.done() for wait in waits)
            assert None not in await asyncio.gather(*waits)
            return [record.lease.worker for record in journal.state.leases.values()]

    assert asyncio.run(served()) == list(map(key, names))


@pytest.mark.parametrize(("jump", "counts"), [(7200.0, False), (-7200.0, False), (5.0, True)])
def test_a_jump_of_the_clock_counts_for_no_deadline(tmp_path, jump: float, counts: bool):
    """A laptop that is shut, or a clock that is set: nobody could work then. A clock that is a
    little off is no reason for more time."""
    run, longest = Filled(), filling.IDLE_DEADLINE_S
    clock = steady = run.now
    with closing(journal_of(run, tmp_path, lambda: clock)) as journal:
        clockwork = Closing(context_of(journal, tiny_spec()), steady=lambda: steady)
        clock, steady = clock + longest - 1.0, steady + longest - 1.0
        clockwork._advance(clock)
        clock += jump
        if not counts:
            clockwork._advance(clock)  # nothing stalls: the time begins anew
            clock, steady = clock + longest, steady + longest
        with pytest.raises(RunStopped, match="step 0 stalled"):
            clockwork._advance(clock)


# -- What workers report -------------------------------------------------------------------------


def test_rates_count_from_one_heartbeat_to_the_next_once_an_engine_has_a_version():
    """Mean busy fraction of the living, and tokens a second of each."""
    activity = Activity()
    for name, version, busy_s, tokens, now, expected in (
        ("x", -1, 0.0, 0, 0.0, (None, [None])),  # its engine starts
        ("x", 0, 5.0, 100, 10.0, (None, [None])),
        ("x", 0, 5.1, 110, 10.1, (None, [None])),  # too soon for a rate
        ("y", 0, 0.0, 0, 10.0, (None, [None, None])),
        ("x", 0, 10.0, 300, 20.0, (0.5, [20.0, None])),
        ("y", 0, 10.0, 50, 20.0, (0.75, [20.0, 5.0])),
        ("x", 0, 0.5, 10, 30.0, (1.0, [None, 5.0])),  # it started again
        ("x", 0, 3.0, 110, 40.0, (0.625, [10.0, 5.0])),
        ("y", 0, float("nan"), 1e300, 40.0, (0.25, [10.0, None])),  # odd numbers are none
        ("x", 0, 3.0, 110, 50.0, (0.0, [0.0, None])),  # an idle one has a rate, which is 0
        ("x", -1, 3.0, 110, 60.0, (None, [None, None])),
    ):
        activity.heartbeat(name, {"version": version, "busy_s": busy_s, "tokens": tokens}, now)
        found = [peer.tokens_per_s for peer in activity.peers.values()]
        assert (activity.busy_fraction(now), found) == expected
    activity.heartbeat("x", {"version": 0, "busy_s": 3.0, "tokens": 110}, 60.0)
    activity.heartbeat("x", {"version": 0, "busy_s": 8.0, "tokens": 110}, 70.0)
    assert (activity.busy_fraction(99.9), activity.busy_fraction(100.0)) == (0.5, None)


def test_many_workers_send_heartbeats_so_rarely_that_all_send_fifty_a_second():
    activity = Activity()
    for count, every_s in ((500, 10.0), (2000, 40.0)):
        for number in range(count):
            activity.seen(str(number), 100.0 * count)
        # when one sends a heartbeat, then it is told when to send the next
        assert activity.heartbeat("0", {"version": 0}, 100.0 * count) == every_s
        # and counts as dead when it has missed three of these
        assert activity.peers["0"].alive(100.0 * count + 3 * every_s - 1.0)
        assert not activity.peers["0"].alive(100.0 * count + 3 * every_s)


# -- A relay that nobody has to trust ------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        NoAnswer("cannot be reached"),
        Answer(HTTPStatus.NOT_FOUND, "", b""),  # nothing is published yet
        Answer(HTTPStatus.NO_CONTENT, "", b""),
        Answer(HTTPStatus.OK, "", b"nothing that anybody signed"),
        Answer(HTTPStatus.OK, "", sign_latest(RUN, 3, "ab" * 32, SigningKey.generate())),
    ],
)
async def test_whatever_a_relay_answers_the_coordinator_waits_for_a_version(
    answer, tmp_path, monkeypatch
):
    monkeypatch.setattr(run_module, "_LEAST_PERIOD_S", 0.0)
    publisher, nobody = SigningKey.generate(), frozenset[str]()
    good = Answer(HTTPStatus.OK, "", sign_latest(RUN, 0, digest("m"), publisher))
    found: asyncio.Future[Latest] = asyncio.get_running_loop().create_future()
    answers, asked = [answer], list[str]()

    async def fetch(session: object, method: str, url: str, **how: object) -> Answer:
        asked.append(url)
        if len(asked) > 2:
            await asyncio.Future()
        given = answers.pop() if answers else good
        if isinstance(given, NoAnswer):
            raise given
        return given

    monkeypatch.setattr(run_module, "fetch", fetch)
    roles = Roles(RUN, 0.0, 1e12, frozenset({publisher.public_hex}), nobody, nobody)
    with closing(Journal(tmp_path, POLICY)) as journal:
        clockwork = Closing(context_of(journal, tiny_spec(), roles=roles))
        monkeypatch.setattr(clockwork, "published", found.set_result)
        task = asyncio.create_task(clockwork.watch_latest("http://relay/"))
        await asyncio.wait({task, found}, return_when=asyncio.FIRST_COMPLETED)
        assert not task.done() and found.result().version == 0
        assert asked[:2] == [f"http://relay/{RUN}/latest.json"] * 2
        task.cancel()
