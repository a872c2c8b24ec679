"""The validator: what it claims, signs, sends and gives back, and how its watchdog ends it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.process import EXIT_INTERNAL
from runspec.core.roles import Roles
from tests.figures import figures_of
from tests.verify.bench import MODEL, lease_for, packed
from tests.verify.small_model import (
    RUN,
    VOCAB,
    NumpyEngine,
    ParityTask,
    Worker,
    fixed_key,
    small_spec,
)
from verify import watchdog
from verify.client import RunFinished, WorkItem
from verify.formats.submission import Rollout
from verify.formats.verdict import RolloutVerdict, VerdictEnvelope, decode_verdicts, open_verdict
from verify.recompute import PrefillNotFinite
from verify.validator import MAX_CLAIMS, MAX_FAULTS, Validator
from verify.watchdog import Stages

WORKER, COORDINATOR, VALIDATOR = fixed_key(1), fixed_key(2), fixed_key(3)
LOG = logging.getLogger("validator")
HANG_S = 1200.0
"""After which a thread that should have ended counts as hanging."""


@dataclass
class QueueCoordinator:
    """The coordinator's side in memory: hands out a queue of submissions, then says finished."""

    queue: list[WorkItem] = field(default_factory=list)
    share: float = 1.0
    tables: dict[str, bytes] = field(default_factory=dict)
    verdicts: list[tuple[bytes, bytes]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    released: list[tuple[str, str]] = field(default_factory=list)
    """Submission and fault."""
    claims: list[str] = field(default_factory=list)
    engine: Any = None
    """Prefill engine of its validator."""

    def offer(self, envelope: bytes, table: bytes, lease: bytes) -> str:
        digest = digest_bytes(table)
        self.queue.append(WorkItem(digest, lease, envelope, self.share))
        self.tables[digest] = table
        return digest

    def roles(self) -> Roles:
        held = {"publisher": (), "coordinator": (COORDINATOR,), "validator": (VALIDATOR,)}
        return Roles(RUN, 0.0, 1e12, **{r: frozenset(k.public_hex for k in held[r]) for r in held})

    def next_submission(self, wait_s: float) -> WorkItem | None:
        self.waits.append(wait_s)
        if self.queue:
            return self.queue.pop(0)
        if wait_s:
            raise RunFinished
        return None

    def download(self, digest: str) -> bytes:
        if digest not in self.tables:
            raise UserError("404: gone from the disk", place="coordinator")
        return self.tables[digest]

    def verdict(self, envelope: bytes, table: bytes) -> None:
        self.verdicts.append((envelope, table))

    def release_claims(self, submissions: Sequence[str], fault: str = "") -> None:
        self.released += [(submission, fault) for submission in submissions]

    def opened(self) -> list[tuple[VerdictEnvelope, list[RolloutVerdict]]]:
        """The verdicts as the learner reads them: signatures, digests, rows."""
        result = []
        for envelope, table in self.verdicts:
            signed = open_verdict(envelope, validators=self.roles().validator)
            assert (signed.digest, signed.bytes) == (digest_bytes(table), len(table))
            result.append((signed, decode_verdicts(table)))
        return result


class Breaking(NumpyEngine):
    """An engine that a rollout of these first output tokens breaks."""

    poison: set[int] = set()
    error: Exception = ValueError("cannot reshape")

    def prefill(self, version, inputs, **options):
        if self.poison & {int(each.output_tokens[0]) for each in inputs}:
            raise self.error
        return super().prefill(version, inputs, **options)


@pytest.fixture
def coordinator(tmp_path: Path) -> QueueCoordinator:
    return QueueCoordinator(engine=Breaking({0: MODEL}, tmp_path))


def validator_of(coordinator: QueueCoordinator, **verify: object) -> Validator:
    """Keyword arguments replace fields of the spec's `verify`."""
    spec = small_spec()
    spec = spec.model_copy(update={"verify": spec.verify.model_copy(update=verify)})
    return Validator(
        spec,
        VALIDATOR,
        coordinator,
        coordinator.engine,
        task_set_of=lambda folder: ParityTask(),
        log=LOG,
    )


def serve(coordinator: QueueCoordinator, **verify: object) -> Validator:
    validator = validator_of(coordinator, **verify)
    validator.serve(threading.Event())
    return validator


def sample(index: int) -> tuple[list[Rollout], bytes, bytes, bytes]:
    """Honest rows for a lease, and their envelope, table and lease."""
    signed, lease = lease_for(WORKER, COORDINATOR, index=index)
    rollouts = Worker(WORKER, MODEL, small_spec(), ParityTask()).rollouts(signed, lease)
    return (rollouts, *packed(rollouts, signed, lease, WORKER), signed)


# --- verdicts -----------------------------------------------------------------------------------


def test_each_submission_gets_one_signed_verdict(coordinator: QueueCoordinator) -> None:
    # given an honest submission, an edited one and one that is no table
    rollouts, *good = sample(index=0)
    rows, _, _, lease_bytes = sample(index=1)
    _, lease = lease_for(WORKER, COORDINATOR, index=1)
    edited = [replace(rows[0], task_reward=1.0), *rows[1:]]
    bad = (*packed(edited, lease_bytes, lease, WORKER), lease_bytes)
    digests = [coordinator.offer(*files) for files in (good, bad, (good[0], b"junk", good[2]))]
    # when the validator serves until the run is finished
    validator = serve(coordinator)
    # then there is a verdict on each, and the accepted one carries what the learner needs
    assert validator.checked == 3 and validator.busy_s > 0
    (first, its_rows), (second, _), (third, none) = coordinator.opened()
    assert [v.submission for v in (first, second, third)] == digests
    assert (first.run, first.step, first.accepted, first.reason) == (RUN, 0, True, "")
    assert [row.row for row in its_rows] == list(range(len(rollouts)))
    assert all(row.logprobs is not None for row in its_rows)
    assert not second.accepted and second.reason.startswith("reward: row 0: claimed against")
    assert not third.accepted and none == []
    # and Prometheus sees what was rejected by which check
    figures = figures_of(validator)
    assert figures["runspec_validator_verdicts_total"] == 3.0
    assert figures["runspec_validator_rejected_submissions_total/signature"] == 1.0


def test_what_is_queued_is_claimed_together_and_prefilled_at_once(
    coordinator: QueueCoordinator,
) -> None:
    for index in range(MAX_CLAIMS + 1):
        coordinator.offer(*sample(index)[1:])
    serve(coordinator)
    assert coordinator.engine.prefills == [8 * MAX_CLAIMS, 8]
    assert coordinator.waits[0] > 0 and set(coordinator.waits[1:MAX_CLAIMS]) == {0.0}


@pytest.mark.parametrize(("asked", "floor", "drawn"), [(0.0, 1.0, 1), (1.0, 0.0, 1), (0.0, 0.0, 0)])
def test_the_coordinators_share_counts_where_it_is_not_below_the_floor(
    coordinator: QueueCoordinator, asked: float, floor: float, drawn: int
) -> None:
    coordinator.share = asked
    coordinator.offer(*sample(index=0)[1:])
    serve(coordinator, prefill_share=floor)
    assert len(coordinator.engine.prefills) == drawn


# --- faults -------------------------------------------------------------------------------------


def test_a_lease_of_another_coordinator_ends_the_process(coordinator: QueueCoordinator) -> None:
    """It is no worker's doing, so it must not look like one's."""
    signed, lease = lease_for(WORKER, VALIDATOR)
    rows = Worker(WORKER, MODEL, small_spec(), ParityTask()).rollouts(signed, lease)
    coordinator.offer(*packed(rows, signed, lease, WORKER), signed)
    with pytest.raises(UserError, match="has a bad lease"):
        serve(coordinator)
    assert coordinator.verdicts == []


@pytest.mark.parametrize("error", [ValueError("cannot do"), PrefillNotFinite("a NaN, cannot do")])
def test_a_file_at_which_a_check_breaks_takes_no_other_with_it(
    coordinator: QueueCoordinator, error: Exception
) -> None:
    # given three submissions, the second of which breaks what computes
    samples = [sample(index) for index in range(3)]
    offered = [coordinator.offer(*files) for _, *files in samples]
    firsts = [{int(row.output_tokens[0]) for row in rows} for rows, *_ in samples]
    coordinator.engine.poison, coordinator.engine.error = firsts[1] - firsts[0] - firsts[2], error
    assert coordinator.engine.poison
    serve(coordinator)
    # then the others are judged, and it is given back with what went wrong
    assert [signed.submission for signed, _ in coordinator.opened()] == [offered[0], offered[2]]
    ((released, fault),) = coordinator.released
    assert released == offered[1]
    assert fault.startswith(type(error).__name__) and "cannot do" in fault


@pytest.mark.parametrize(
    ("error", "words", "faults"),
    [
        (ValueError("cannot reshape"), "cannot reshape", MAX_FAULTS),
        (UserError("no weights", place="relay"), "no weights", 0),  # the validator's own fault
    ],
)
def test_a_validator_whose_checks_break_at_everything_ends_and_gives_all_back(
    coordinator: QueueCoordinator, error: Exception, words: str, faults: int
) -> None:
    coordinator.engine.poison, coordinator.engine.error = set(range(VOCAB)), error
    offered = [coordinator.offer(*sample(index)[1:]) for index in range(5)]
    with pytest.raises(type(error), match=words):
        serve(coordinator)
    assert coordinator.verdicts == []
    assert [submission for submission, _ in coordinator.released] == offered
    blamed = [bool(fault) for _, fault in coordinator.released]
    assert blamed == [True] * faults + [False] * (5 - faults)


def test_of_files_that_cannot_be_had_the_others_are_given_back(
    coordinator: QueueCoordinator,
) -> None:
    offered = [coordinator.offer(*sample(index)[1:]) for index in range(3)]
    del coordinator.tables[offered[1]]
    with pytest.raises(UserError, match="gone from the disk"):
        serve(coordinator)
    # it stays claimed: an attempt that counts, so that it is set aside after three
    assert coordinator.released == [(offered[0], ""), (offered[2], "")]


class Fetching(NumpyEngine):
    """An engine whose weights come after some attempts, each as long as it may be."""

    attempts, now = 0, 0.0
    validator: Validator

    def ensure_version(self, version: int, manifest_digest: str, *, deadline_s: float) -> Path:
        # In no stage: no watch of a check that hangs takes a slow link for one.
        assert self.validator.stages.current is None
        self.attempts -= 1
        if self.attempts >= 0:
            self.now += deadline_s
            raise UserError("the time was up", place="relay")
        return super().ensure_version(version, manifest_digest, deadline_s=deadline_s)


@pytest.mark.parametrize(
    ("lease", "attempts", "tries"), [(3600.0, 5, 5), (3600.0, 99, 6), (60.0, 99, 1)]
)
def test_weights_may_take_as_long_as_a_workers_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lease: float, attempts: int, tries: int
) -> None:
    """A worker of that lease fetches them too; 62 GB at 590 Mb/s are 14 minutes."""

    class Offering(QueueCoordinator):
        def release_claims(self, submissions: Sequence[str], fault: str = "") -> None:
            super().release_claims(submissions, fault)
            self.offer(*files)

    _, *files = sample(0)
    engine = Fetching({0: MODEL}, tmp_path)
    coordinator = Offering(engine=engine)
    engine.attempts, digest = attempts, coordinator.offer(*files)
    monkeypatch.setattr("verify.validator.time.monotonic", lambda: engine.now)
    monkeypatch.setattr("verify.validator.WAIT_S", 0.001)
    engine.validator = validator_of(coordinator, lease_timeout=lease)
    if attempts == tries:
        engine.validator.serve(threading.Event())
    else:
        with pytest.raises(UserError, match="the time was up"):
            engine.validator.serve(threading.Event())
    # then others could judge it after each attempt, and nothing speaks against it
    assert coordinator.released == [(digest, "")] * tries
    assert len(coordinator.verdicts) == (attempts == tries)


# --- the watchdog -------------------------------------------------------------------------------


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue[int]]:
    """Exit codes of a process that goes on all the same."""
    found = Queue[int]()
    monkeypatch.setattr(watchdog, "os", SimpleNamespace(_exit=found.put))
    monkeypatch.setattr(watchdog.logging, "shutdown", lambda: None)
    monkeypatch.setattr(watchdog, "GRACE_S", 0.01)
    monkeypatch.setattr(watchdog, "RELEASE_S", HANG_S)
    before = threading.enumerate()
    yield found
    for thread in threading.enumerate():
        if thread not in before:
            thread.join(HANG_S)
            assert not thread.is_alive()


def test_one_that_computes_for_long_gives_back_what_it_has_claimed(codes: Queue[int]) -> None:
    client, stop = QueueCoordinator(claims=["ab", "cd"]), threading.Event()
    with watchdog.leaving(stop, client, LOG):
        stop.set()
        assert codes.get(timeout=HANG_S) == 0
    assert client.released == [("ab", ""), ("cd", "")]


def test_one_that_cannot_give_back_ends_all_the_same(
    codes: Queue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, away, client = threading.Event(), threading.Event(), QueueCoordinator(claims=["ab"])
    monkeypatch.setattr(client, "release_claims", lambda *_: away.wait(HANG_S))
    monkeypatch.setattr(watchdog, "RELEASE_S", 0.01)
    with watchdog.leaving(stop, client, LOG):
        stop.set()
        assert codes.get(timeout=HANG_S) == 0
    away.set()


def test_one_that_is_soon_done_hands_in_what_it_has_judged(
    codes: Queue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "GRACE_S", HANG_S)
    client, stop, before = QueueCoordinator(claims=["ab"]), threading.Event(), threading.enumerate()
    with watchdog.leaving(stop, client, LOG):
        stop.set()
    for thread in set(threading.enumerate()).difference(before):
        thread.join(HANG_S)
    assert codes.empty() and client.released == []


def test_a_validator_whose_check_hangs_names_the_submission_and_ends(
    codes: Queue[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the run is finished meanwhile."""
    clock, beats, client = [100.0], Queue[object](), QueueCoordinator()

    def heartbeat(state: dict[str, object]) -> None:
        beats.put(state)
        raise RunFinished

    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(watchdog, "HEARTBEAT_S", 0.001)
    monkeypatch.setattr(client, "heartbeat", heartbeat, raising=False)
    checking, stage_s = SimpleNamespace(busy_s=0.0, checked=0, stages=Stages()), 300.0
    with (
        watchdog.heartbeats(client, checking, LOG),
        checking.stages.of("prefill checks", "ab" * 32),
    ):
        clock[0] += stage_s - 1
        for _ in range(3):  # one heartbeat at least began by that clock
            assert beats.get(timeout=HANG_S) == {"busy_s": 0.0, "checked": 0}
        assert codes.empty()
        clock[0] += 1
        assert codes.get(timeout=HANG_S) == EXIT_INTERNAL
    assert set(client.released) == {("ab" * 32, "prefill checks did not end after 300 s")}
    assert "at submission abababababab: this process ends" in caplog.text
