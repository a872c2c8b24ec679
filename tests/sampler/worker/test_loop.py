"""The loop with a real coordinator and an engine that does as it is told."""

from __future__ import annotations

import logging
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from runspec.common.errors import UserError
from runspec.common.hashing import digest_bytes
from runspec.common.invite import make_invite
from runspec.common.keys import SigningKey
from runspec.spec.schema import RunSpec
from sampler.engine.engine import EngineDied
from sampler.worker.meter import Meter
from sampler.worker.worker import Worker
from tests.sampler.worker.obedient import LENGTH, Counting, ObedientEngine, Shelf, outbox_in
from tests.verify.coordinator.deployment import Site, tiny_spec
from tests.waiting import eventually
from verify.client import CoordinatorClient
from verify.coordinator.events import LeaseGranted, SubmissionReceived
from verify.coordinator.filling import MAX_OPEN_LEASES
from verify.formats.layout import STATE_FILE
from verify.formats.submission import Rollout, decode_rollouts
from verify.ledger import Ledger

LOG = logging.getLogger("test-worker")
DEADLINE_S = 20.0
KILLS = 6


class Member:
    """A worker in a thread, and what it ended with."""

    def __init__(
        self, site: Site, spec: RunSpec, key: SigningKey, client: CoordinatorClient
    ) -> None:
        self.engine, self.shelf, self.stop, self.meter = (
            ObedientEngine(),
            Shelf(),
            threading.Event(),
            Meter(),
        )
        self.failure: BaseException | None = None
        pool = next(pool for pool in spec.samplers if pool.name == "near")
        self._worker = Worker(
            client=client,
            key=key,
            versions=self.shelf,  # type: ignore[arg-type]
            engine=self.engine,  # type: ignore[arg-type]
            tasks=Counting(),
            spec=spec,
            pool=pool,
            meter=self.meter,
            outbox=outbox_in(site.run_dir.parent / "worker", key),
            log=LOG,
        )
        self._thread = threading.Thread(target=self._run)

    def start(self, *, loaded: int = 0) -> None:
        """Works; `loaded` is the version that it begins with."""
        self._first = loaded
        self._thread.start()

    @property
    def leaving(self) -> bool:
        return self._worker._leaving

    def ended(self) -> bool:
        return not self._thread.is_alive()

    def leave(self) -> None:
        self.stop.set()
        self._thread.join(DEADLINE_S)
        assert self.ended()

    def _run(self) -> None:
        try:
            self._worker.load(self._first, Path(f"v{self._first}"))
            self._worker.run(self.stop)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.failure = error


class Works:
    """A site that serves, and the workers of a test."""

    def __init__(self, site: Site, spec: RunSpec) -> None:
        self.site, self.spec = site, spec
        self.members: list[Member] = []

    def member(self, key: SigningKey | None = None, *, deadline_s: float = DEADLINE_S) -> Member:
        key = key or SigningKey.generate()
        member = Member(self.site, self.spec, key, self.joined(key, deadline_s=deadline_s))
        self.members.append(member)
        return member

    def joined(self, key: SigningKey, *, deadline_s: float = DEADLINE_S) -> CoordinatorClient:
        """A registered key's client; it was invited, for the pool may be a trusted one."""
        client = self.site.client(key, deadline_s=deadline_s)
        invite = make_invite(
            self.spec.name, pool="near", uses=1, valid_s=60.0, coordinator=self.site.coordinator
        )
        client.register("near", {}, invite=invite)
        return client

    def submissions(self) -> list[Path]:
        return sorted(self.site.run_dir.glob("rollouts/step_*/*.parquet"))

    def rows(self) -> list[list[Rollout]]:
        return [
            decode_rollouts(path.read_bytes(), max_rows=9, max_bytes=1 << 20)
            for path in self.submissions()
        ]


def spec_with(**pool: object) -> RunSpec:
    spec = tiny_spec()
    pools = [each.model_copy(update=pool) for each in spec.samplers]
    return spec.model_copy(update={"samplers": pools})


@contextmanager
def site_of(folder: Path, spec: RunSpec) -> Iterator[Works]:
    site = Site(folder, spec)
    works = Works(site, spec)
    with site.origin():
        site.publish(0)
        try:
            yield works
        finally:
            for member in works.members:
                member.leave()


@pytest.fixture
def works(tmp_path: Path) -> Iterator[Works]:
    with site_of(tmp_path, tiny_spec()) as works, works.site.serving():
        yield works
        for member in works.members:
            member.leave()


def test_the_next_lease_goes_into_the_engine_while_the_last_one_is_sampled(works: Works):
    member = works.member()
    member.engine.at_once = False

    member.start()

    eventually(lambda: len(member.engine.submitted) == 2, "two leases are in the engine")
    assert works.submissions() == []


def test_an_engine_that_died_is_started_once_and_samples_the_same_again(
    works: Works, caplog: pytest.LogCaptureFixture
):
    member = works.member()
    member.engine.at_once = False
    member.start()
    eventually(lambda: len(member.engine.submitted) == 2, "two leases are in the engine")

    member.engine.die()

    eventually(lambda: len(member.engine.submitted) == 4, "both are sampled again")
    assert member.engine.submitted[2:] == member.engine.submitted[:2]
    assert [version for version, _ in member.engine.loads] == [0, 0]
    member.engine.at_once = True
    member.engine.finish()
    eventually(lambda: len(works.submissions()) >= 2, "both are handed in")
    assert "sampling 2 leases again with a new one" in caplog.text


def test_a_second_death_under_the_same_lease_stops_the_worker_with_its_message(works: Works):
    member = works.member()
    member.engine.at_once = False
    member.start()
    for deaths in (2, 4):
        eventually(lambda n=deaths: len(member.engine.submitted) == n, "leases are in the engine")
        member.engine.die()

    eventually(member.ended, "its end")
    assert isinstance(member.failure, EngineDied)
    assert "the engine core ended" in str(member.failure)
    assert works.submissions() == []


def test_an_engine_that_dies_just_before_it_is_given_a_lease_is_started_once(
    works: Works, caplog: pytest.LogCaptureFixture
):
    # given an engine that dies after the worker has looked at it
    member = works.member()
    member.engine.deaths_before_submit = 1

    member.start()

    # then it is started again, and the same lease is sampled and handed in
    eventually(lambda: len(works.submissions()) >= 2, "work of the new engine")
    assert [version for version, _ in member.engine.loads] == [0, 0]
    assert "sampling 1 leases again with a new one" in caplog.text
    assert member.failure is None


def test_an_engine_that_dies_before_the_same_lease_again_stops_the_worker(works: Works):
    member = works.member()
    member.engine.deaths_before_submit = 2

    member.start()

    eventually(member.ended, "its end")
    assert isinstance(member.failure, EngineDied)
    assert (member.engine.submitted, works.submissions()) == ([], [])


def test_weights_that_fail_their_checks_stop_the_worker_with_the_tensors_name(works: Works):
    member = works.member()
    member.engine.refuses = UserError("other bytes in model.layers.0.mlp.gate_proj.weight")

    member.start(loaded=3)  # and the leases are of version 0

    eventually(member.ended, "its end")
    assert "model.layers.0.mlp.gate_proj.weight" in str(member.failure)
    assert (member.engine.submitted, works.submissions()) == ([], [])


def test_a_worker_that_leaves_gives_its_leases_back_and_goes_on_with_them_when_it_returns(
    works: Works, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    key = SigningKey.generate()
    first = works.member(key)
    first.engine.at_once = False
    first.start()
    eventually(lambda: len(first.engine.submitted) == 2, "two leases are in the engine")

    first.leave()

    assert "stopped; 2 leases were given back" in caplog.text
    assert first.failure is None
    second = works.member(key)
    second.engine.at_once = False
    second.start()
    eventually(lambda: len(second.engine.submitted) == 2, "two leases are in the engine")
    assert second.engine.submitted == first.engine.submitted
    second.engine.at_once = True
    second.engine.finish()
    eventually(lambda: len(works.submissions()) >= 2, "both are handed in, once")


def test_what_is_sampled_when_it_is_told_to_leave_is_still_handed_in(works: Works):
    member = works.member()
    member.engine.at_once = False
    member.start()
    eventually(lambda: len(member.engine.submitted) == 2, "two leases are in the engine")

    member.stop.set()
    member.engine.finish()
    member.leave()

    assert len(works.submissions()) == 2


@pytest.mark.parametrize("dies", ["before", "during"])
def test_an_engine_that_dies_while_its_worker_leaves_is_not_started_again(
    works: Works, caplog: pytest.LogCaptureFixture, dies: str
):
    # given a worker that is told to leave
    caplog.set_level(logging.INFO)
    member = works.member()
    member.engine.at_once, member.engine.dies_of_abort = False, dies == "during"
    member.start()
    eventually(lambda: len(member.engine.submitted) == 2, "two leases are in the engine")
    member.stop.set()
    # when its engine dies, before or in the abort of what is left
    if dies == "before":
        eventually(lambda: member.leaving, "it leaves")
        member.engine.die()
    member.leave()
    # then it leaves all the same, and gives its leases back
    assert member.failure is None
    assert "stopped; 2 leases were given back" in caplog.text
    assert [version for version, _ in member.engine.loads] == [0]


def test_the_pause_of_a_switch_is_told_in_the_heartbeat(works: Works):
    member = works.member()
    member.start()
    eventually(lambda: len(works.submissions()) >= 2, "work under version 0")

    state = member.meter.state()

    assert (state["loads"], state["pause_s"]) == (1, 0.25)


def test_an_untrusted_pool_never_changes_a_version_under_a_rollout(works: Works):
    member = works.member()
    member.engine.at_once = False
    member.start(loaded=3)
    eventually(lambda: len(member.engine.submitted) == 2, "two leases are in the engine")

    member.shelf.newest = 4
    member.engine.finish()

    eventually(lambda: len(member.engine.submitted) >= 3, "the next lease is in the engine")
    assert member.engine.loads == [(3, 0), (0, 0)]


def test_a_pool_with_in_flight_updates_takes_a_version_over_in_the_middle(tmp_path: Path):
    spec = spec_with(in_flight_updates=True, trust="trusted")
    with site_of(tmp_path, spec) as works, works.site.serving():
        member = works.member()
        member.engine.at_once = False
        member.start()
        eventually(lambda: len(member.engine.submitted) == 2, "two leases are in the engine")

        member.shelf.newest = 1

        eventually(lambda: member.engine.version == 1, "version 1 is loaded")
        assert member.engine.loads[1] == (1, 8)
        member.engine.at_once = True
        member.engine.finish()
        eventually(lambda: len(works.submissions()) >= 2, "both are handed in")
        (first, *_) = [row for rows in works.rows() for row in rows]
        assert (first.version, first.versions.tolist()) == (0, [1] * LENGTH)
        member.leave()


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def until_answers(site: Site) -> Callable[[], bool]:
    port = int(site.url.rsplit(":", 1)[1])

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    return answers


@pytest.mark.slow
def test_a_coordinator_that_is_gone_is_waited_for_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with site_of(tmp_path, tiny_spec()) as works:
        port = free_port()
        with ended(works.site.process(port)):
            eventually(until_answers(works.site), "the coordinator")
            member = works.member()
            member.engine.at_once = False
            member.start()
            eventually(lambda: len(member.engine.submitted) == 2, "two leases are in the engine")
        member.engine.at_once = True
        member.engine.finish()
        eventually(
            lambda: "waiting for the coordinator" in caplog.text, "it says for whom it waits"
        )
        assert not member.ended()

        with ended(works.site.process(port)):
            eventually(lambda: len(works.submissions()) >= 2, "what it had is handed in")
            member.leave()
        assert member.failure is None


@pytest.mark.slow
def test_a_coordinator_that_stays_away_ends_the_worker_with_its_address(tmp_path: Path):
    with site_of(tmp_path, tiny_spec()) as works:
        with ended(works.site.process(free_port())):
            eventually(until_answers(works.site), "the coordinator")
            member = works.member(deadline_s=1.0)
            member.engine.at_once = False
            member.start()
            eventually(lambda: len(member.engine.submitted) == 2, "two leases are in the engine")
        member.engine.finish()

        eventually(member.ended, "its end")
        assert isinstance(member.failure, UserError)
        assert member.failure.place == f"coordinator {works.site.url}"


@pytest.mark.slow
def test_a_worker_that_is_killed_at_any_moment_leaves_whole_submissions_and_repeats_none(
    tmp_path: Path,
):
    # given a step that is so large that there is always something to do
    algorithm = tiny_spec().algorithm.model_copy(update={"prompts_per_step": 10_000})
    spec = tiny_spec().model_copy(update={"algorithm": algorithm})
    key, rng = SigningKey.generate(), random.Random(6)
    key.save(tmp_path / "worker.key")
    with site_of(tmp_path, spec) as works, works.site.serving():
        command = [
            *(sys.executable, "-m", "tests.sampler.worker.obedient", works.site.url, spec.name),
            *(works.site.root.public_hex, str(tmp_path / "worker.key"), "near"),
        ]
        # when a worker is killed again and again
        for _ in range(KILLS):
            before = len(works.submissions())
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            with ended(process):
                assert process.stdout is not None
                assert process.stdout.readline() == "working\n"
                threading.Event().wait(rng.uniform(0.0, 0.5))
            assert len(works.submissions()) >= before
        with ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)):
            count = len(works.submissions())
            eventually(lambda: len(works.submissions()) >= count + MAX_OPEN_LEASES, "its last work")
        submissions = works.submissions()

    # then each submission is whole, and each lease was granted once and answered once
    with closing(Ledger(works.site.run_dir / STATE_FILE)) as ledger:
        events = list(ledger.events())
    granted = [event for event in events if isinstance(event, LeaseGranted)]
    received = [event for event in events if isinstance(event, SubmissionReceived)]
    assert len({event.lease.seed for event in granted}) == len(granted)
    assert len({event.lease for event in received}) == len(received) >= len(submissions) - 1
    unanswered = {event.digest for event in granted} - {event.lease for event in received}
    assert len(unanswered) <= MAX_OPEN_LEASES
    for path in submissions:
        assert digest_bytes(path.read_bytes()) == path.stem
        rows = decode_rollouts(path.read_bytes(), max_rows=9, max_bytes=1 << 20)
        assert [(row.group, row.sample) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
