"""Pure functions from a lease to requests, and from sampled sequences to rows of a submission.

The worker makes no choices: problem, target length and noise all follow from the lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from runspec.core.spec.schema import SamplerPool
from sampler.engine.requests import Sampled, SampleRequest, sample_requests
from verify.formats.lease import Lease, assignments
from verify.formats.submission import Rollout
from verify.noise import noise_key
from verify.plugins import Graded, GradeItem, GraderFault, TaskSet


@dataclass(frozen=True)
class PlannedRollout:
    """One rollout that a lease asks for."""

    group: int
    sample: int
    problem: int
    """Index into the task set."""
    target: int | None
    request: SampleRequest


def plan_rollouts(
    lease: Lease, tasks: TaskSet, pool: SamplerPool, *, group_size: int
) -> list[PlannedRollout]:
    """Return the rollouts of a lease, group by group, sample by sample.

    Raises:
        UserError: a prompt leaves no room for an answer in the pool's context.
    """
    plan = []
    for assignment in assignments(lease, n_problems=len(tasks), targets=tasks.targets):
        group, problem, target = assignment.group, assignment.problem, assignment.target
        keys = [
            noise_key(lease.seed, group, sample) if pool.sampling.seeded else None
            for sample in range(group_size)
        ]
        prompt = tasks.prompt_tokens(problem, target)
        requests = sample_requests(pool, prompt, tasks.eos_token_id, keys)
        plan += [
            PlannedRollout(group, sample, problem, target, request)
            for sample, request in enumerate(requests)
        ]
    return plan


def claim_rewards(
    plan: Sequence[PlannedRollout], sampled: Sequence[Sampled], tasks: TaskSet
) -> list[Graded]:
    """Grade each rollout.

    If the grader fails twice, the claim is 0: the validator's grader fails as well, and the
    validator drops the group. A single failure may have a local cause, and claiming 0 for it would
    be a false claim.
    """
    items = [
        GradeItem(planned.problem, planned.target, result.output_tokens.tolist())
        for planned, result in zip(plan, sampled, strict=True)
    ]
    results = tasks.grade_all(items)
    failed = [index for index, result in enumerate(results) if isinstance(result, GraderFault)]
    again = dict(zip(failed, tasks.grade_all([items[index] for index in failed]), strict=True))
    claims = [again.get(index, result) for index, result in enumerate(results)]
    return [
        Graded(0.0, 0.0, 0.0, reason=str(claim)) if isinstance(claim, GraderFault) else claim
        for claim in claims
    ]


def make_rollouts(
    lease: Lease,
    lease_digest: str,
    rows: Iterable[tuple[PlannedRollout, Sampled, Graded, list[bytes]]],
    tasks: TaskSet,
    pool: SamplerPool,
) -> list[Rollout]:
    """Return the rows of a submission, in the order of the plan.

    Args:
        lease, lease_digest: of the plan.
        rows: for each planned rollout what was sampled, the claimed rewards, and the proofs.
        tasks: the problems.
        pool: settings of sampling.
    """
    return [
        Rollout(
            run=lease.run,
            step=lease.step,
            worker=lease.worker,
            lease=lease_digest,
            problem_id=tasks.problem(planned.problem).problem_id,
            group=planned.group,
            sample=planned.sample,
            version=lease.version,
            prompt_tokens=np.asarray(planned.request.prompt_tokens, dtype=np.int32),
            output_tokens=sampled.output_tokens,
            logprobs=sampled.logprobs,
            finish_reason=sampled.finish_reason,
            temperature=pool.sampling.temperature,
            top_p=pool.sampling.top_p,
            top_k=pool.sampling.top_k,
            target=planned.target,
            task_reward=claim.task_reward,
            length_penalty=claim.length_penalty,
            proofs=proofs,
            versions=sampled.versions if pool.in_flight_updates else None,
        )
        for planned, sampled, claim, proofs in rows
    ]
