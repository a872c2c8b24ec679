"""The validator: what it claims, signs and sends, and when it ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes
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
from verify.client import RunFinished, WorkItem
from verify.formats.submission import Rollout
from verify.formats.verdict import RolloutVerdict, VerdictEnvelope, decode_verdicts, open_verdict
from verify.recompute import PrefillNotFinite
from verify.validator import MAX_CLAIMS, MAX_FAULTS, Validator, is_drawn

WORKER, COORDINATOR, VALIDATOR = fixed_key(1), fixed_key(2), fixed_key(3)
LOG = logging.getLogger("validator")


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


@pytest.fixture
def coordinator() -> QueueCoordinator:
    return QueueCoordinator()


@pytest.fixture
def engine(tmp_path: Path) -> NumpyEngine:
    return NumpyEngine({0: MODEL}, tmp_path)


def serve(
    coordinator: QueueCoordinator,
    engine: NumpyEngine,
    share: float = 1.0,
    log: logging.Logger = LOG,
) -> Validator:
    spec = small_spec()
    spec = spec.model_copy(
        update={"verify": spec.verify.model_copy(update={"prefill_share": share})}
    )
    validator = Validator(
        spec, VALIDATOR, coordinator, engine, task_set_of=lambda directory: ParityTask(), log=log
    )
    validator.serve(threading.Event())
    return validator


def sample(index: int) -> tuple[list[Rollout], bytes, bytes, bytes]:
    """Honest rows for a lease, and their envelope, table and lease."""
    signed, lease = lease_for(WORKER, COORDINATOR, index=index)
    rollouts = Worker(WORKER, MODEL, small_spec(), ParityTask()).rollouts(signed, lease)
    return (rollouts, *packed(rollouts, signed, lease, WORKER), signed)


def test_each_submission_gets_one_signed_verdict(
    coordinator: QueueCoordinator, engine: NumpyEngine
) -> None:
    # given an honest submission, an edited one and one that is no table
    rollouts, *good = sample(index=0)
    rows, _, _, lease_bytes = sample(index=1)
    _, lease = lease_for(WORKER, COORDINATOR, index=1)
    edited = [replace(rows[0], task_reward=1.0), *rows[1:]]
    bad = (*packed(edited, lease_bytes, lease, WORKER), lease_bytes)
    digests = [coordinator.offer(*files) for files in (good, bad, (good[0], b"junk", good[2]))]

    # when the validator serves until the run is finished
    validator = serve(coordinator, engine)

    # then there is a verdict on each, and the accepted one carries what the learner needs
    assert validator.checked == 3 and validator.busy_s > 0
    (first, its_rows), (second, _), (third, none) = coordinator.opened()
    assert [v.submission for v in (first, second, third)] == digests
    assert (first.run, first.step, first.accepted, first.reason) == (RUN, 0, True, "")
    assert [row.row for row in its_rows] == list(range(len(rollouts)))
    assert all(row.logprobs is not None for row in its_rows)
    assert not second.accepted and second.reason.startswith("reward: row 0: claimed against")
    assert not third.accepted and none == []
    assert third.reason == "signature: the file is not the one that was signed"
    # and Prometheus sees what was rejected by which check
    figures = figures_of(validator)
    assert figures["runspec_validator_verdicts_total"] == 3.0
    assert figures["runspec_validator_rejected_submissions_total/reward"] == 1.0
    assert figures["runspec_validator_rejected_submissions_total/signature"] == 1.0
    assert figures["runspec_validator_busy_seconds_total"] == validator.busy_s
    assert figures["runspec_validator_stage_seconds_total/prefill"] > 0.0


def test_what_is_queued_is_claimed_together_and_prefilled_at_once(
    coordinator: QueueCoordinator, engine: NumpyEngine
) -> None:
    for index in range(MAX_CLAIMS + 1):
        coordinator.offer(*sample(index)[1:])

    serve(coordinator, engine)

    assert engine.prefills == [8 * MAX_CLAIMS, 8]
    assert coordinator.waits[0] > 0 and set(coordinator.waits[1:MAX_CLAIMS]) == {0.0}


def test_a_lease_of_another_coordinator_ends_the_process(
    coordinator: QueueCoordinator, engine: NumpyEngine
) -> None:
    """It is no worker's doing, so it must not look like one's."""
    signed, lease = lease_for(WORKER, VALIDATOR)
    rows = Worker(WORKER, MODEL, small_spec(), ParityTask()).rollouts(signed, lease)
    coordinator.offer(*packed(rows, signed, lease, WORKER), signed)
    with pytest.raises(UserError, match="has a bad lease"):
        serve(coordinator, engine)
    assert coordinator.verdicts == []


class Breaking(NumpyEngine):
    """An engine that a rollout of these first output tokens breaks."""

    poison: set[int] = set()
    error: Exception = ValueError("cannot reshape")

    def prefill(self, version, inputs, **options):
        if self.poison & {int(each.output_tokens[0]) for each in inputs}:
            raise self.error
        return super().prefill(version, inputs, **options)


@pytest.mark.parametrize("error", [ValueError("cannot do"), PrefillNotFinite("a NaN, cannot do")])
def test_a_file_at_which_a_check_breaks_takes_no_other_with_it(
    coordinator: QueueCoordinator,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    # given three submissions, the second of which breaks what computes
    engine = Breaking({0: MODEL}, tmp_path)
    samples = [sample(index) for index in range(3)]
    digests = [coordinator.offer(*files) for _, *files in samples]
    firsts = [{int(row.output_tokens[0]) for row in rows} for rows, *_ in samples]
    engine.poison, engine.error = firsts[1] - firsts[0] - firsts[2], error
    assert engine.poison

    serve(coordinator, engine)

    # then the others are judged, and it is given back with what went wrong
    assert [signed.submission for signed, _ in coordinator.opened()] == [digests[0], digests[2]]
    ((released, fault),) = coordinator.released
    assert (
        released == digests[1] and fault.startswith(type(error).__name__) and "cannot do" in fault
    )
    assert "3 submissions are examined one by one" in caplog.text


def test_a_validator_whose_checks_break_at_everything_ends(
    coordinator: QueueCoordinator, tmp_path: Path
) -> None:
    engine = Breaking({0: MODEL}, tmp_path)
    engine.poison = set(range(VOCAB))
    digests = [coordinator.offer(*sample(index)[1:]) for index in range(5)]
    with pytest.raises(ValueError, match="cannot reshape"):
        serve(coordinator, engine)
    assert coordinator.verdicts == []
    faults = [bool(fault) for _, fault in coordinator.released]
    assert ([submission for submission, _ in coordinator.released], faults) == (
        digests,
        [True] * MAX_FAULTS + [False] * 2,
    )


def test_what_a_validator_cannot_judge_for_its_own_fault_is_given_back_without_a_word(
    coordinator: QueueCoordinator, tmp_path: Path
) -> None:
    engine = Breaking({0: MODEL}, tmp_path)
    engine.poison, engine.error = set(range(VOCAB)), UserError("no weights", place="relay")
    digest = coordinator.offer(*sample(index=0)[1:])
    with pytest.raises(UserError, match="no weights"):
        serve(coordinator, engine)
    assert coordinator.released == [(digest, "")]


def test_of_files_that_cannot_be_had_the_others_are_given_back(
    coordinator: QueueCoordinator, engine: NumpyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [coordinator.offer(*sample(index)[1:]) for index in range(3)]
    tables = coordinator.tables

    def download(digest: str) -> bytes:
        if digest == digests[1]:
            raise UserError("404: gone from the disk", place="coordinator")
        return tables[digest]

    monkeypatch.setattr(coordinator, "download", download)
    with pytest.raises(UserError, match="gone from the disk"):
        serve(coordinator, engine)
    # it stays claimed: an attempt that counts, so that it is set aside after three
    assert coordinator.released == [(digests[0], ""), (digests[2], "")]


class Fetching(NumpyEngine):
    """An engine whose weights come after some attempts, each as long as it may be."""

    def __init__(self, directory: Path, attempts: int) -> None:
        super().__init__({0: MODEL}, directory)
        self.attempts, self.now = attempts, 0.0
        self.validator: Validator | None = None

    def ensure_version(self, version: int, manifest_digest: str, *, deadline_s: float) -> Path:
        # In no stage: no watch of a check that hangs takes a slow link for one.
        assert self.validator is not None and self.validator.stages.current is None
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
    coordinator, engine = Offering(), Fetching(tmp_path, attempts)
    digest = coordinator.offer(*files)
    monkeypatch.setattr("verify.validator.time.monotonic", lambda: engine.now)
    monkeypatch.setattr("verify.validator.WAIT_S", 0.001)
    spec = small_spec()
    spec = spec.model_copy(
        update={"verify": spec.verify.model_copy(update={"lease_timeout": lease})}
    )
    engine.validator = Validator(
        spec, VALIDATOR, coordinator, engine, task_set_of=lambda directory: ParityTask(), log=LOG
    )
    if attempts == tries:
        engine.validator.serve(threading.Event())
    else:
        with pytest.raises(UserError, match="the time was up"):
            engine.validator.serve(threading.Event())
    # then others could judge it after each attempt, and nothing speaks against it
    assert coordinator.released == [(digest, "")] * tries
    assert len(coordinator.verdicts) == (attempts == tries)


def digests(count: int) -> Sequence[str]:
    return [digest_bytes(str(number).encode()) for number in range(count)]


def test_the_draw_for_prefill_follows_the_share_and_the_key() -> None:
    share = [is_drawn(VALIDATOR, digest, 0.3) for digest in digests(2000)]
    other = [is_drawn(WORKER, digest, 0.3) for digest in digests(2000)]

    assert 0.25 < sum(share) / 2000 < 0.35  # 5 sigma
    assert share == [is_drawn(VALIDATOR, digest, 0.3) for digest in digests(2000)]
    agreement = sum(a == b for a, b in zip(share, other, strict=True)) / 2000
    assert 0.52 < agreement < 0.64  # 0.58 for independent draws
    assert all(is_drawn(VALIDATOR, digest, 1.0) for digest in digests(50))
    assert not any(is_drawn(VALIDATOR, digest, 0.0) for digest in digests(50))


@pytest.mark.parametrize(("asked", "floor"), [(0.0, 1.0), (1.0, 0.0)])
def test_the_coordinators_share_counts_where_it_is_not_below_the_floor(
    coordinator: QueueCoordinator, engine: NumpyEngine, asked: float, floor: float
) -> None:
    coordinator.share = asked
    coordinator.offer(*sample(index=0)[1:])
    serve(coordinator, engine, share=floor)
    assert len(engine.prefills) == 1
