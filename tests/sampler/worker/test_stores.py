"""What a worker hands in: rollouts as the lease says, and work that outlives its process."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.schema import SamplerPool
from runspec.core.signed import SigningKey
from sampler.engine.requests import Sampled
from sampler.worker.rollouts import claim_rewards, make_rollouts, plan_rollouts
from sampler.worker.stores import Made, Outbox
from tests.sampler.worker.works import LONG_S, Counting, outbox_in, site_of
from tests.verify.coordinator.deployment import RUN, Site, submission, tiny_spec, verdict
from tests.waiting import eventually
from verify.client import CoordinatorClient
from verify.formats.lease import Lease, assignments, lease_digest, open_lease
from verify.formats.submission import decode_rollouts, encode_rollouts, sign_submission
from verify.noise import noise_key
from verify.plugins import Graded, GradeItem, GraderFault
from verify.toploc import build_proofs_of, select, split
from verify.toploc.statistics import verify_proofs

# -- The outbox's folder ---------------------------------------------------------------------------

LEASES = [f"{number:02x}" * 32 for number in range(4)]
KEY = SigningKey.generate()


def made(lease: str, *, key: SigningKey = KEY, run: str = RUN, table: bytes = b"table") -> Made:
    envelope = sign_submission(table, run=run, step=0, index=0, lease=lease, key=key)
    return Made(envelope, table)


class Deliveries(RuleBasedStateMachine):
    """A worker makes submissions, settles them, stores the rest when it stops, and starts again."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.outbox = outbox_in(Path(self.folder.name), KEY)
        self.open: dict[str, Made] = {}
        self.stored: dict[str, Made] = {}

    @rule(lease=st.sampled_from(LEASES), table=st.binary(max_size=3))
    def put(self, lease: str, table: bytes) -> None:
        self.open[lease] = made(lease, table=table)
        self.outbox.put(lease, self.open[lease])

    @rule(lease=st.sampled_from(LEASES))
    def settle(self, lease: str) -> None:
        self.outbox.settle(lease)
        self.open.pop(lease, None)
        self.stored.pop(lease, None)

    @rule()
    def stop(self) -> None:
        assert sorted(self.outbox.keep()) == sorted(self.open)
        self.stored |= self.open

    @rule()
    def start_again(self) -> None:
        self.outbox = outbox_in(Path(self.folder.name), KEY)
        self.open = dict(self.stored)
        assert self.outbox.load() == self.open

    @invariant()
    def what_is_stored_lies_there(self) -> None:
        files = Path(self.folder.name).rglob("*.submission")
        assert {path.stem: path.read_bytes() for path in files} == {
            lease: each.envelope + b"\n" + each.table for lease, each in self.stored.items()
        }

    def teardown(self) -> None:
        self.folder.cleanup()


FEW = settings(max_examples=30, stateful_step_count=12, derandomize=True, deadline=None)
Deliveries.TestCase.settings = settings(FEW, suppress_health_check=list(HealthCheck))
test_what_is_stored_comes_back_until_it_is_settled = Deliveries.TestCase


@pytest.mark.parametrize("flaw", ["table", "envelope", "run", "worker", "name", "size", "no table"])
def test_what_is_damaged_or_not_ours_is_removed_and_said(tmp_path, flaw, caplog):
    lease = LEASES[0]
    right = made(lease)
    wrong = {
        "table": Made(right.envelope, b"tablf"),
        "envelope": Made(right.envelope[:-1], right.table),
        "run": made(lease, run="other"),
        "worker": made(lease, key=SigningKey.generate()),
        "name": made(LEASES[1]),
        "size": made(lease, table=bytes((1 << 20) + 1)),
        "no table": right,
    }[flaw]
    outbox = outbox_in(tmp_path, KEY)
    outbox.put(lease, wrong)
    outbox.keep()
    if flaw == "no table":
        next(tmp_path.rglob("*.submission")).write_bytes(right.envelope)

    with caplog.at_level(logging.WARNING):
        assert outbox_in(tmp_path, KEY).load() == {}
    assert "is no submission to send" in caplog.text
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_disk_that_is_full_loses_the_submission_and_says_so(tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")
    folder = tmp_path / "file" / "outbox"
    full = Outbox(folder, run=RUN, worker=KEY.public_hex, max_bytes=9, log=logging.root)
    full.put(LEASES[0], made(LEASES[0]))
    assert full.keep() == []
    assert "its lease can be sampled again" in caplog.text


# -- With a real coordinator -----------------------------------------------------------------------


@pytest.fixture
def works(tmp_path):
    with site_of(tmp_path, tiny_spec()) as works, works.site.serving():
        yield works
        for member in works.members:
            member.leave()


def judge(site: Site, validator: CoordinatorClient) -> str:
    """The next submission's verdict; its digest."""
    item = validator.next_submission(LONG_S)
    assert item is not None
    lease = open_lease(item.lease, coordinators=validator.roles().coordinator)
    validator.verdict(*verdict(item.submission, lease, site.validator))
    return item.submission


def test_what_was_not_taken_when_a_worker_had_to_end_is_sent_at_its_next_start(works, tmp_path):
    site, key, asked = works.site, SigningKey.generate(), threading.Event()
    validator = site.client(site.validator, deadline_s=LONG_S)

    def never_taken(envelope: bytes, table: bytes) -> None:
        asked.set()
        threading.Event().wait()

    # given a worker whose submission is not taken, as where too many wait for their verdicts
    first = works.member(key)
    first.client.submit = never_taken
    first.start()
    assert asked.wait(LONG_S)
    # when it is told to end
    first.leave()
    assert first.failure is None
    # then the submission is in its folder, and its lease is not given back
    (kept,) = tmp_path.glob("worker/outbox/*/*.submission")
    table = kept.read_bytes().partition(b"\n")[2]
    status = httpx.get(f"{site.url}/v1/status", trust_env=False, timeout=None).json()
    assert status["workers"][0]["open_leases"] >= 1
    assert works.submissions() == []
    # and when it starts again, then those bytes are sent, once, and nobody samples them again
    second = works.member(key)
    second.start()
    assert judge(site, validator) == digest_bytes(table)
    eventually(lambda: not kept.exists(), "it is forgotten")
    second.leave()
    received = [path.read_bytes() for path in works.submissions()]
    assert received.count(table) == 1


def test_a_held_lease_does_not_come_again_and_is_not_released(works):
    key, first = works.site.worker()
    data = first.lease(LONG_S)
    assert data is not None
    lease = open_lease(data, coordinators=first.roles().coordinator)
    second = works.site.client(key)  # the next process
    second.hold(lease_digest(data))
    other = second.lease(LONG_S)
    assert other is not None and other != data
    assert second.release(but=[lease_digest(data)]) == 1
    second.submit(*submission(data, lease, key))


# -- From a lease to rows --------------------------------------------------------------------------

GROUPS, SIZE = 3, 2


class CountingTask(Counting):
    """Problem i asks for its number; a penalty for the length; the grader fails on 13, and does so
    as often as it is told to."""

    failing = 0

    def grade_all(self, items: Sequence[GradeItem]) -> list[Graded | GraderFault]:
        self.failing -= 1
        return [self._grade(item) for item in items]

    def _grade(self, item: GradeItem) -> Graded | GraderFault:
        if 13 in item.output_tokens or self.failing >= 0:
            return GraderFault("thirteen")
        task = float(item.problem in item.output_tokens)
        penalty = -0.1 * abs(item.target - len(item.output_tokens))
        return Graded(task, penalty, task + penalty)


TASKS = CountingTask()


def lease(index: int = 1) -> Lease:
    made = ("counting", 4, "ab" * 32, "cd" * 32, "home", index, GROUPS, 3, "ef" * 32)
    return Lease(*made, issued=0.0, expires=60.0)


def pool(**changes: object) -> SamplerPool:
    fields = {"max_model_len": 64, "max_new_tokens": 40, "sampling": {"temperature": 0.5}}
    named = {"name": "home", "hardware": {"kind": "cpu"}}
    return SamplerPool.model_validate({**named, **fields, **changes})


def plan(index: int = 1, **changes: object) -> list[Any]:
    return list(plan_rollouts(lease(index), TASKS, pool(**changes), group_size=SIZE))


def sampled(outputs: Sequence[Sequence[int]]) -> list[Sampled]:
    rng = np.random.default_rng(0)
    return [
        Sampled(
            np.array(tokens, dtype=np.int32),
            -rng.random(len(tokens), dtype=np.float32),
            "stop" if tokens[-1] == 0 else "length",
            np.full(len(tokens), 3, dtype=np.int32),
            select(split(hidden(len(tokens)))),
        )
        for tokens in outputs
    ]


def hidden(length: int) -> np.ndarray:
    """The states behind an output, bits of bf16: u16 [length, 16]."""
    rng = np.random.default_rng(length)
    return rng.integers(0x3C00, 0x4000, (length, 16)).astype(np.uint16)


def test_the_plan_is_the_lease_spelt_out():
    wanted = assignments(lease(), n_problems=len(TASKS), targets=TASKS.targets)

    planned = plan()

    assert [(p.group, p.sample) for p in planned] == [(g, s) for g in range(3) for s in range(2)]
    for rollout in planned:
        assignment = wanted[rollout.group]
        assert (rollout.problem, rollout.target) == (assignment.problem, assignment.target)
        assert rollout.request.prompt_tokens == [assignment.problem, assignment.target]
        assert rollout.request.noise_key == noise_key(lease().seed, rollout.group, rollout.sample)
        assert (rollout.request.temperature, rollout.request.end_token) == (0.5, 0)
        assert (rollout.request.top_p, rollout.request.top_k) == (1.0, -1)
    # the same lease gives the same plan, and no two leases share noise
    assert plan() == planned
    keys = {p.request.noise_key for index in range(20) for p in plan(index)}
    assert len(keys) == 20 * GROUPS * SIZE
    # a pool's truncation and want of a seed reach the engine
    cut = plan(trust="trusted", sampling={"top_p": 0.9, "top_k": 40, "seeded": False})
    requests = {(p.request.top_p, p.request.top_k, p.request.noise_key) for p in cut}
    assert requests == {(0.9, 40, None)}
    # and a prompt without room for an answer is named
    with pytest.raises(UserError, match="2 tokens leaves 39 of 41 for the 40 new ones"):
        plan(max_model_len=41)


def test_rollouts_survive_the_file_with_claims_and_proofs():
    planned = plan()
    results = sampled([[p.problem, *range(60, 60 + 9 * i), 0] for i, p in enumerate(planned)])

    claims = claim_rewards(planned, results, TASKS)
    proofs = build_proofs_of([each.selection for each in results])
    made = zip(planned, results, claims, proofs, strict=True)
    rows = make_rollouts(lease(), "12" * 32, made, TASKS, pool())

    read = decode_rollouts(encode_rollouts(rows), max_rows=6, max_bytes=1 << 20)
    for row, want, result in zip(read, planned, results, strict=True):
        assert (row.group, row.sample, row.target) == (want.group, want.sample, want.target)
        assert row.problem_id == f"count-{want.problem}"
        assert (row.version, row.step, row.lease) == (3, 4, "12" * 32)
        assert row.output_tokens.tolist() == result.output_tokens.tolist()
        assert row.logprobs.tolist() == result.logprobs.tolist()
        assert row.task_reward == 1.0
        penalty = -0.1 * abs(want.target - len(result.output_tokens))
        assert row.length_penalty == pytest.approx(penalty)
        statistics = verify_proofs(hidden(len(result.output_tokens)), row.proofs)
        assert len(statistics) == -(-len(result.output_tokens) // 32)
        assert all(s.exponent_mismatches == 0 and s.error_median == 0 for s in statistics)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_fault_of_the_grader_claims_nothing_and_is_asked_again_once(failing):
    planned, tasks = plan(), CountingTask()
    tasks.failing = failing
    results = sampled([[13, 0]] + [[p.problem, 0] for p in planned[1:]])

    claims = claim_rewards(planned, results, tasks)

    assert (claims[0].task_reward, claims[0].length_penalty) == (0.0, 0.0)
    assert claims[0].reason == "thirteen"
    assert all(claim.task_reward == 1.0 for claim in claims[1:])
