"""A lease alone says what is sampled; what was sampled becomes rows that survive the file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from runspec.core.errors import UserError
from runspec.core.spec.schema import SamplerPool
from sampler.engine.requests import Sampled
from sampler.worker.rollouts import FinishedRollout, claim_rewards, make_rollouts, plan_rollouts
from tests.sampler.worker.obedient import Counting
from verify.formats.lease import Lease, assignments
from verify.formats.submission import decode_rollouts, encode_rollouts
from verify.noise import noise_key
from verify.plugins import Graded, GradeItem, GraderFault
from verify.toploc.codec import build_proofs_of
from verify.toploc.selection import select, split
from verify.toploc.statistics import verify_proofs

GROUPS, SIZE = 3, 2


class CountingTask(Counting):
    """Problem i asks for its number; a reward is the share of its digits in the output."""

    def grade_all(self, items: Sequence[GradeItem]) -> list[Graded | GraderFault]:
        return [self._grade(item) for item in items]

    def _grade(self, item: GradeItem) -> Graded | GraderFault:
        if 13 in item.output_tokens:
            return GraderFault("thirteen")
        task = float(item.problem in item.output_tokens)
        penalty = -0.1 * abs(item.target - len(item.output_tokens))
        return Graded(task, penalty, task + penalty)


TASKS = CountingTask()


def lease(**changes) -> Lease:
    fields = {
        "run": "counting",
        "step": 4,
        "nonce": "ab" * 32,
        "worker": "cd" * 32,
        "pool": "home",
        "index": 1,
        "groups": GROUPS,
        "version": 3,
        "manifest_digest": "ef" * 32,
        "issued": 0.0,
        "expires": 60.0,
    }
    return Lease(**(fields | changes))


def pool(**changes) -> SamplerPool:
    fields = {
        "name": "home",
        "hardware": {"kind": "cpu"},
        "max_model_len": 64,
        "max_new_tokens": 40,
        "sampling": {"temperature": 0.5},
    }
    return SamplerPool.model_validate(fields | changes)


def plan(**changes):
    return plan_rollouts(lease(**changes), TASKS, pool(), group_size=SIZE)


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


def test_a_pools_truncation_and_want_of_a_seed_reach_the_engine():
    cut = pool(trust="trusted", sampling={"top_p": 0.9, "top_k": 40, "seeded": False})

    requests = [p.request for p in plan_rollouts(lease(), TASKS, cut, group_size=SIZE)]

    assert {(r.top_p, r.top_k, r.noise_key) for r in requests} == {(0.9, 40, None)}


def test_the_same_lease_gives_the_same_plan_and_no_two_leases_share_noise():
    assert plan() == plan()
    keys = {p.request.noise_key for index in range(20) for p in plan(index=index)}
    assert len(keys) == 20 * GROUPS * SIZE


def test_a_prompt_without_room_for_an_answer_is_named():
    with pytest.raises(UserError, match="2 tokens leaves 39 of 41 for the 40 new ones"):
        plan_rollouts(lease(), TASKS, pool(max_model_len=41), group_size=SIZE)


def test_rollouts_survive_the_file_with_claims_and_proofs():
    planned = plan()
    results = sampled([[p.problem, *range(60, 60 + 9 * i), 0] for i, p in enumerate(planned)])

    claims = claim_rewards(planned, results, TASKS)
    made = zip(
        planned, results, claims, build_proofs_of([each.selection for each in results]), strict=True
    )
    finished = [FinishedRollout(*parts) for parts in made]
    rows = make_rollouts(lease(), "12" * 32, finished, TASKS, pool())

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


def test_a_fault_of_the_grader_claims_nothing_and_stops_nothing():
    planned = plan()
    results = sampled([[13, 0]] + [[p.problem, 0] for p in planned[1:]])

    claims = claim_rewards(planned, results, TASKS)

    assert (claims[0].task_reward, claims[0].length_penalty) == (0.0, 0.0)
    assert claims[0].reason == "thirteen"
    assert all(claim.task_reward == 1.0 for claim in claims[1:])


def test_a_grader_that_failed_once_is_asked_again():
    class Stumbling(CountingTask):
        asked = 0

        def grade_all(self, items):
            self.asked += 1
            if self.asked == 1:
                return [GraderFault("hung"), *super().grade_all(items[1:])]
            return super().grade_all(items)

    planned = plan()
    claims = claim_rewards(planned, sampled([[p.problem, 0] for p in planned]), Stumbling())

    assert all(claim.task_reward == 1.0 for claim in claims)
