"""The worker's loop: what it does next, versions, deaths of engines and coordinators, its end."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runspec.core.errors import UserError
from runspec.core.process import RunStopped
from runspec.core.signed import SigningKey
from sampler import worker
from sampler.engine.engine import EngineDied
from sampler.worker import stores
from sampler.worker import worker as worker_module
from sampler.worker.rollouts import (
    MAX_SAMPLING,
    Ask,
    Load,
    OpenLease,
    Situation,
    Submit,
    Wait,
    next_action,
)
from sampler.worker.stores import Meter, Versions
from tests.broadcast.conftest import ModelVersions, Run
from tests.broadcast.fake_relay import Request, held_until, not_there
from tests.figures import figures_of
from tests.sampler.worker.works import LENGTH, LOG, LONG_S, site_of
from tests.verify.coordinator.deployment import tiny_spec
from tests.waiting import eventually
from verify.client import CoordinatorClient, RunFinished, SubmissionRefused
from verify.coordinator.authentication import RATES
from verify.formats.lease import MAX_OPEN_LEASES
from verify.plugins import WeightsLocation

# -- What it does next -----------------------------------------------------------------------------

IDLE = Situation(
    leases=(), loaded=3, running=0, capacity=100, asking=False, in_flight=False, newest=3
)


def situation(*leases: tuple[int, str], **changes: object) -> Situation:
    held = [OpenLease(f"lease-{i}", version, stage) for i, (version, stage) in enumerate(leases)]
    return replace(IDLE, leases=held, **changes)


@pytest.mark.parametrize(
    ("now", "action"),
    [
        (situation(), Ask()),
        (situation(asking=True), Wait()),
        (situation((3, "sampling"), running=90), Wait()),
        (situation((3, "sampling"), running=50), Wait()),
        (situation((3, "sampling"), running=49), Ask()),
        (situation((3, "sampling"), (3, "waiting"), running=40), Submit("lease-1")),
        # an untrusted pool drains and then loads, and goes back to its lease's version
        (situation((3, "sampling"), (4, "waiting"), running=1), Wait()),
        (situation((3, "finishing"), (4, "waiting")), Load(4)),
        (situation((2, "waiting")), Load(2)),
        (situation((4, "waiting"), loaded=4), Submit("lease-0")),
        (situation((3, "sampling"), running=90, newest=4), Wait()),
        # one with in-flight updates loads in the middle of rollouts
        (situation((3, "sampling"), running=90, in_flight=True, newest=4), Load(4)),
        (situation((3, "sampling"), running=90, in_flight=True, newest=4, loaded=4), Wait()),
        (situation((5, "waiting"), running=90, in_flight=True, newest=4, loaded=4), Load(5)),
        (situation((3, "waiting"), loaded=4, in_flight=True, newest=4), Submit("lease-0")),
        # a submission on its way does not keep the engine from being filled
        (situation((3, "finishing"), (3, "sampling"), running=10), Ask()),
        (situation((3, "finishing"), (3, "sampling"), (3, "sampling"), running=10), Wait()),
        (situation(*[(3, "finishing")] * MAX_OPEN_LEASES), Wait()),
    ],
)
def test_the_next_action_follows_from_leases_and_engine(now, action):
    assert next_action(now) == action


STAGES = st.sampled_from(["waiting", "sampling", "finishing"])
SITUATIONS = st.builds(
    Situation,
    leases=st.lists(
        st.builds(OpenLease, digest=st.uuids().map(str), version=st.integers(0, 4), stage=STAGES),
        max_size=4,
    ),
    loaded=st.none() | st.integers(0, 4),
    running=st.integers(0, 200),
    capacity=st.integers(1, 200),
    asking=st.booleans(),
    in_flight=st.booleans(),
    newest=st.integers(-1, 5),
)


@settings(derandomize=True)
@given(SITUATIONS)
def test_whatever_happens_a_rollout_has_one_version_and_no_lease_waits_for_an_idle_engine(now):
    match next_action(now):
        case Load():
            assert now.in_flight or now.running == 0
        case Submit(digest):
            (lease,) = [lease for lease in now.leases if lease.digest == digest]
            assert lease.stage == "waiting"
            assert lease.version == now.loaded or now.in_flight
        case Ask():  # never for more than it may hold or can sample
            assert not now.asking
            assert len(now.leases) < MAX_OPEN_LEASES
            assert sum(lease.stage == "sampling" for lease in now.leases) < MAX_SAMPLING
            assert not any(lease.stage == "waiting" for lease in now.leases)
    idle = replace(now, running=0)
    if any(lease.stage == "waiting" for lease in idle.leases):
        assert isinstance(next_action(idle), Load | Submit)


# -- The loop, with a real coordinator -------------------------------------------------------------


@pytest.fixture(autouse=True)
def timeouts(monkeypatch):
    """A worker asks often, and one that leaves waits little for its engine, and long for its
    coordinator."""
    monkeypatch.setattr(worker_module, "LEASE_POLL_S", 0.05)
    monkeypatch.setattr(worker_module, "FINISH_S", 0.05)
    monkeypatch.setattr(worker_module, "RELEASE_S", LONG_S)
    monkeypatch.setattr(worker_module, "LAST_SUBMISSIONS_S", LONG_S)


@pytest.fixture
def works(tmp_path):
    with site_of(tmp_path, tiny_spec()) as works, works.site.serving():
        yield works
        for member in works.members:
            member.leave()


def test_weights_that_fail_their_checks_stop_the_worker_with_the_tensors_name(works):
    member = works.member()
    member.engine.refuses = UserError("other bytes in model.layers.0.mlp.gate_proj.weight")

    member.start(loaded=3)  # and the leases are of version 0

    eventually(member.ended, "its end")
    assert "model.layers.0.mlp.gate_proj.weight" in str(member.failure)
    assert (member.engine.submitted, works.submissions()) == ([], [])


def test_an_untrusted_pool_never_changes_a_version_under_a_rollout(works):
    member = works.busy(loaded=3)

    member.shelf.newest = 4
    member.engine.finish()

    eventually(lambda: len(member.engine.submitted) >= 3, "the next lease is in the engine")
    assert member.engine.loads == [(3, 0), (0, 0)]


def test_a_pool_with_in_flight_updates_takes_a_version_over_in_the_middle(tmp_path):
    spec = tiny_spec()
    trusted = {"in_flight_updates": True, "trust": "trusted"}
    pools = [pool.model_copy(update=trusted) for pool in spec.samplers]
    spec = spec.model_copy(update={"samplers": pools})
    with site_of(tmp_path, spec) as works, works.site.serving():
        member = works.busy()

        member.shelf.newest = 1

        eventually(lambda: member.engine.version == 1, "version 1 is loaded")
        assert member.engine.loads[1] == (1, 8)
        member.engine.at_once = True
        member.engine.finish()
        eventually(lambda: len(works.submissions()) >= 2, "both are handed in")
        (first, *_) = [row for rows in works.rows() for row in rows]
        assert (first.version, first.versions.tolist()) == (0, [1] * LENGTH)
        member.leave()


def test_a_submission_that_is_refused_is_logged_and_work_goes_on(works, caplog, monkeypatch):
    submit, refusals = CoordinatorClient.submit, iter([SubmissionRefused("the lease expired")])

    def first_refused(client: CoordinatorClient, envelope: bytes, table: bytes) -> None:
        for refusal in refusals:
            raise refusal
        submit(client, envelope, table)

    monkeypatch.setattr(CoordinatorClient, "submit", first_refused)
    member = works.member()
    member.start()

    def answers(kind: str) -> float:
        return figures_of(member.meter)[f"runspec_worker_submissions_total/{kind}"]

    eventually(lambda: answers("accepted") >= 2, "the next ones are taken")
    assert "the lease expired" in caplog.text
    assert not member.ended()
    assert answers("refused") == 1.0


@pytest.mark.parametrize("failure", [RunFinished("done"), UserError("the disk is full")])
def test_how_a_submission_ends_the_worker(works, monkeypatch, failure):
    """The end of the run is no failure; whatever else goes wrong is told."""

    def failing(client: CoordinatorClient, envelope: bytes, table: bytes) -> None:
        raise failure

    monkeypatch.setattr(CoordinatorClient, "submit", failing)
    member = works.member()
    member.start()

    eventually(member.ended, "its end")
    assert member.failure is (failure if isinstance(failure, UserError) else None)


def test_an_engine_that_died_is_started_once_and_samples_the_same_again(works, caplog):
    member = works.busy()

    member.engine.die()

    eventually(lambda: len(member.engine.submitted) == 4, "both are sampled again")
    assert member.engine.submitted[2:] == member.engine.submitted[:2]
    assert [version for version, _ in member.engine.loads] == [0, 0]
    member.engine.at_once = True
    member.engine.finish()
    eventually(lambda: len(works.submissions()) >= 2, "both are handed in")
    # Two threads find the death, at once or one after the other.
    found = re.findall(r"sampling (\d) leases again with a new one", caplog.text)
    assert sum(map(int, found)) == 2


HEADS = "RuntimeError: Unsupported CPU attention configuration: head_dim=16"


@pytest.mark.parametrize(
    ("reasons", "failure"),
    [
        (("", ""), EngineDied),
        ((HEADS, HEADS), RunStopped),
        # Another fault, or none that is known, may be gone at the next start of the worker,
        (("RuntimeError: other", HEADS), EngineDied),
        (("", HEADS), EngineDied),
        ((HEADS, ""), EngineDied),
        # and so may a want of memory, and faults of devices and disks.
        (("OutOfMemoryError: CUDA out of memory",) * 2, EngineDied),
        (("AcceleratorError: CUDA error: unspecified launch failure",) * 2, EngineDied),
        (("OSError: [Errno 28] No space left on device",) * 2, EngineDied),
    ],
)
def test_a_second_death_under_the_same_lease_stops_the_worker_with_its_message(
    works, reasons, failure
):
    member = works.member()
    member.engine.at_once = False
    member.start()
    for deaths, reason in zip((2, 4), reasons, strict=True):
        eventually(lambda n=deaths: len(member.engine.submitted) == n, "leases are in the engine")
        member.engine.die(reason)

    eventually(member.ended, "its end")
    assert type(member.failure) is failure
    assert "the engine core ended" in member.failure.thing
    assert reasons[1] in member.failure.thing
    assert works.submissions() == []


@pytest.mark.parametrize(("reason", "failure"), [(HEADS, RunStopped), ("", EngineDied)])
def test_a_second_death_in_a_load_has_the_message_of_the_engine(works, reason, failure):
    member = works.member()
    member.engine.refuses = EngineDied("the engine core ended (code 1)", exit_reason=reason)
    member.engine.at_once = False
    member.start()
    eventually(lambda: len(member.engine.submitted) == 2, "leases are in the engine")
    member.engine.die()
    eventually(member.ended, "its end")
    assert type(member.failure) is failure and reason in member.failure.thing
    assert len(member.engine.loads) == 3


def test_an_engine_that_dies_just_before_it_is_given_a_lease_is_started_once(works, caplog):
    # given an engine that dies after the worker has looked at it
    member = works.member()
    member.engine.deaths_before_submit = 1

    member.start()

    # then it is started again, and the same lease is sampled and handed in
    eventually(lambda: len(works.submissions()) >= 2, "work of the new engine")
    assert [version for version, _ in member.engine.loads] == [0, 0]
    assert "sampling 1 leases again with a new one" in caplog.text
    assert member.failure is None


def test_a_worker_that_leaves_gives_its_leases_back_and_gets_others_when_it_returns(works, caplog):
    caplog.set_level(logging.INFO)
    key = SigningKey.generate()
    first = works.busy(key)

    first.leave()

    assert "stopped; 2 leases were given back" in caplog.text
    assert first.failure is None
    second = works.busy(key)
    assert not any(each in first.engine.submitted for each in second.engine.submitted)
    second.engine.at_once = True
    second.engine.finish()
    eventually(lambda: len(works.submissions()) >= 2, "both are handed in, once")


def test_what_is_sampled_when_it_is_told_to_leave_is_still_handed_in(works, monkeypatch):
    monkeypatch.setattr(worker_module, "FINISH_S", LONG_S)
    member = works.busy()

    member.stop.set()
    eventually(lambda: member.leaving, "it leaves")
    member.engine.finish()
    member.leave()

    assert len(works.submissions()) == 2


def test_a_worker_of_a_finished_run_waits_for_its_last_submissions(works, monkeypatch):
    # given two sampled leases, whose submissions are on their way when the run is finished
    sampled, finished, handed_in = threading.Event(), threading.Event(), list[int]()
    submit, lease = CoordinatorClient.submit, CoordinatorClient.lease
    hand_in = worker_module.Worker._hand_in_the_last

    def slowly(client: CoordinatorClient, envelope: bytes, table: bytes) -> None:
        assert finished.wait(LONG_S)
        submit(client, envelope, table)

    def until_two_are_sampled(client: CoordinatorClient, wait_s: float) -> bytes | None:
        if sampled.is_set():
            raise RunFinished
        return lease(client, wait_s) if len(works.members[0].engine.submitted) < 2 else None

    def counted(worker: worker_module.Worker) -> None:
        finished.set()
        hand_in(worker)
        handed_in.append(len(works.submissions()))

    monkeypatch.setattr(CoordinatorClient, "submit", slowly)
    monkeypatch.setattr(CoordinatorClient, "lease", until_two_are_sampled)
    monkeypatch.setattr(worker_module.Worker, "_hand_in_the_last", counted)
    # when the worker learns of the end, then both were taken before it ended
    member = works.busy()
    member.engine.finish()
    sampled.set()
    eventually(member.ended, "its end")
    assert handed_in == [2] and member.failure is None


@pytest.mark.parametrize("dies", ["before", "during"])
def test_an_engine_that_dies_while_its_worker_leaves_is_not_started_again(
    works, caplog, monkeypatch, dies
):
    # given a worker that is told to leave
    caplog.set_level(logging.INFO)
    if dies == "before":
        monkeypatch.setattr(worker_module, "FINISH_S", LONG_S)
    member = works.busy()
    member.engine.dies_of_abort = dies == "during"
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


# -- Coordinators that go away, and workers that are killed ----------------------------------------


@pytest.mark.slow
def test_a_coordinator_that_stays_away_is_awaited_and_ends_workers(tmp_path, caplog, monkeypatch):
    # given a clock that passes every deadline once the wait is reported
    said = "waiting for the coordinator"
    clock = SimpleNamespace(monotonic=lambda: 1e9 * (said in caplog.text), sleep=lambda _: None)
    with site_of(tmp_path, tiny_spec()) as works:
        with works.site.serving():
            member = works.busy()
        monkeypatch.setattr("runspec.core.http_client.time", clock)
        member.engine.finish()

        eventually(member.ended, "its end")
        assert isinstance(member.failure, UserError)
        assert said in caplog.text
        assert member.failure.place == f"coordinator {works.site.url}"


# -- Versions: what is fetched ahead holds up neither the current one nor its sampling -------------


@pytest.fixture
def run(tmp_path):
    (tmp_path / "store").mkdir()
    with ExitStack() as stack:
        yield Run(tmp_path, stack)


@pytest.fixture
def server(run):
    return run.static()


@pytest.fixture
def versions(run, server):
    cache = run.folder / "own" / "weights"
    source = WeightsLocation(run.name, [server.url], run.root, cache)
    with closing(Versions(source, LONG_S, LOG)) as made:
        yield made


def test_old_versions_go_but_never_while_another_is_fetched(run, server, versions):
    model, cache = ModelVersions(run), run.folder / "own" / "weights"
    asked, go_on = threading.Event(), threading.Event()

    def hold_back(request: Request) -> None:
        asked.set()
        held_until(go_on)(request)

    def cached() -> set[str]:
        return {path.name for path in cache.iterdir() if path.name.startswith("v")}

    # given versions 0 and 1, the second fetched ahead
    model.publish(0)
    assert versions.first() == (0, cache / "v0")
    digest = model.publish(1)
    eventually(lambda: cached() == {"v0", "v1"}, "version 1 is prefetched")

    # when the worker switches to 1 while version 2 is on its way
    server.answer("/versions/2/", hold_back)
    model.publish(2)
    assert asked.wait(LONG_S)
    assert versions.get(1, digest) == cache / "v1"  # does not wait for what is held back
    versions.keep(1)

    # then the old version goes with a later switch
    assert cached() == {"v0", "v1"}
    go_on.set()
    eventually(lambda: "v2" in cached(), "version 2 is fetched")
    eventually(lambda: versions.keep(2) is None and cached() == {"v2"}, "old versions are removed")


def test_what_the_next_delta_starts_from_is_never_removed(run, versions, caplog):
    caplog.set_level(logging.INFO)
    model = ModelVersions(run)
    # given a worker that samples with version 0 and has 1 already
    model.publish(0)
    versions.first()
    model.publish(1, base=0)
    eventually(lambda: "version 1 fetched" in caplog.text, "version 1 is prefetched")

    # when it tidies up, and versions go on coming, as deltas alone
    for number in (2, 3):
        versions.keep(0)
        model.publish(number, base=number - 1)
        eventually(lambda n=number: f"version {n} fetched" in caplog.text, f"version {number}")

    # then each is made of the one before, and has the numbers that were published
    assert "version 3 fetched from held version 2 and deltas 3" in caplog.text
    made = (run.folder / "own" / "weights" / "v3" / "model.safetensors").read_bytes()
    assert made == model.files(3)["model.safetensors"]


def test_chunks_come_from_volunteers_whom_the_directory_names(run, server, versions, monkeypatch):
    monkeypatch.setattr(stores, "DIRECTORY_EVERY_S", 0.01)
    ModelVersions(run).publish(0)
    server.answer("/chunks/", not_there)
    volunteer, tries = run.static(), iter(range(2))

    def directory() -> list[str]:
        if next(tries, None) is not None:
            raise UserError("the coordinator is away")
        return [volunteer.url]

    versions.follow(directory, public_only=False)
    versions.first()
    assert volunteer.asked() == len(volunteer.paths) > 0


# -- Heartbeats ------------------------------------------------------------------------------------


class Heard:
    """A coordinator that only listens."""

    def __init__(self, *troubles: Exception) -> None:
        self.troubles = list(troubles)
        self.states: list[dict[str, float]] = []

    def heartbeat(self, state: dict[str, float]) -> float:
        self.states.append(state)
        if self.troubles:
            raise self.troubles.pop(0)
        return 3600.0


@contextmanager
def beating(heard: Heard, meter: Meter) -> Iterator[threading.Thread]:
    stop = threading.Event()
    thread = threading.Thread(target=worker._heartbeats, args=(heard, meter, stop, LOG))
    thread.start()
    yield thread
    stop.set()
    thread.join()


def test_the_coordinator_takes_all_heartbeats_that_are_sent():
    taken = RATES["key", "heartbeat"].per_s
    assert taken * worker._LOOK_S >= 2.0  # between two of a worker's, however often it loads


def test_the_first_comes_at_once_and_a_load_is_told_soon(monkeypatch):
    monkeypatch.setattr(worker, "_LOOK_S", 0.001)
    heard, meter = Heard(), Meter()
    with beating(heard, meter):
        eventually(lambda: heard.states, "a first heartbeat")
        meter.loaded(3, 0.5)
        eventually(lambda: len(heard.states) == 2, "a heartbeat that tells of the load")
    assert [state["version"] for state in heard.states] == [-1, 3]


def test_they_go_on_after_a_coordinator_that_was_away_and_end_with_the_run(monkeypatch, caplog):
    monkeypatch.setattr(worker, "HEARTBEAT_S", 0.002)
    monkeypatch.setattr(worker, "_LOOK_S", 0.001)
    heard = Heard(UserError("is away"), RunFinished())
    with caplog.at_level(logging.WARNING), beating(heard, Meter()) as thread:
        thread.join()
    assert len(heard.states) == 2 and "heartbeat: is away" in caplog.text


def test_the_meter_counts_busy_time_while_any_lease_is_sampled(monkeypatch):
    clock = SimpleNamespace(monotonic=iter([100.0, 101.0, 104.0, 106.0, *[110.0] * 9]).__next__)
    monkeypatch.setattr("sampler.worker.stores.time", clock)
    meter = Meter()
    meter.lease_began()
    meter.lease_began()
    meter.lease_ended(5)
    assert meter.state()["busy_s"] == 3.0  # time that counts before the end
    meter.lease_ended(7)
    meter.loaded(2, 0.5)
    meter.loaded(3, 0.25)
    counts = {"tokens": 12, "version": 3, "loads": 2, "pause_s": 0.75}
    assert meter.state() == {"busy_s": 5.0, "uptime_s": 10.0, **counts}
    # and Prometheus sees the same
    assert figures_of(meter) == {
        "runspec_worker_version": 3.0,
        "runspec_worker_leases": 0.0,
        "runspec_worker_tokens_total": 12.0,
        "runspec_worker_busy_seconds_total": 5.0,
        "runspec_worker_loads_total": 2.0,
        "runspec_worker_pause_seconds_total": 0.75,
        "runspec_worker_submissions_total/accepted": 0.0,
        "runspec_worker_submissions_total/refused": 0.0,
    }
