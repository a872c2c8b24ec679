"""Pure functions of a worker: its next action, and from a lease to rows of a submission.

The engine stays full across leases. The next lease is requested while the last ones are still being
sampled. If it is of the loaded version, it goes into the engine at once. If not, a pool whose
rollouts must be of one version lets the engine run empty and then loads. A pool with
`in_flight_updates` loads during sampling, and loads newer versions as soon as they are fetched.

A worker chooses nothing of its rollouts: problem, target length and noise follow from the lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from runspec.core.schema import SamplerPool
from sampler.engine.requests import Sampled, SampleRequest, sample_requests
from verify.formats.lease import MAX_OPEN_LEASES, Lease, assignments, episode_seed
from verify.formats.submission import Rollout
from verify.noise import noise_key
from verify.plugins import Graded, GradeItem, GraderFault, TaskSet

MAX_SAMPLING = 2
"""Leases in the engine: the newest, and one whose last sequences are left. More leases would be
missing for other workers in a small step, and older than if requested later."""

Stage = Literal["waiting", "sampling", "finishing"]
"""`waiting` for the engine; `sampling` in it; `finishing`: being graded, proved and submitted."""


@dataclass
class OpenLease:
    """An open lease of the worker."""

    digest: str
    version: int
    stage: Stage


@dataclass(frozen=True)
class Situation:
    """Everything that the next action follows from."""

    leases: Sequence[OpenLease]
    """In the order of their grants."""
    loaded: int | None
    """Version that the engine samples from."""
    running: int
    """Sequences in the engine."""
    capacity: int
    """Number of sequences that the engine runs at once."""
    asking: bool
    """Whether a request for a lease is under way."""
    in_flight: bool
    """Whether a version may change in the middle of a rollout."""
    newest: int
    """Newest version on this machine; used if `in_flight`."""


@dataclass(frozen=True)
class Ask:
    """Ask for the next lease, in the background."""


@dataclass(frozen=True)
class Load:
    """Switch the engine to a version."""

    version: int


@dataclass(frozen=True)
class Submit:
    """Give a lease's requests to the engine."""

    digest: str


@dataclass(frozen=True)
class Wait:
    """Nothing can be done until something happens."""


Action = Ask | Load | Submit | Wait


def next_action(now: Situation) -> Action:
    """Return the next action; call it again after each action until it is `Wait`."""
    waiting = [lease for lease in now.leases if lease.stage == "waiting"]
    if now.in_flight:
        wanted = max([now.newest, *(lease.version for lease in waiting)])
        if now.loaded is None or wanted > now.loaded:
            return Load(wanted)
        if waiting:
            return Submit(waiting[0].digest)
    else:
        for lease in waiting:
            if lease.version == now.loaded:
                return Submit(lease.digest)
        if waiting and now.running == 0:
            return Load(waiting[0].version)
    sampling = sum(lease.stage == "sampling" for lease in now.leases)
    room = 2 * now.running < now.capacity and sampling < MAX_SAMPLING
    if room and not (waiting or now.asking) and len(now.leases) < MAX_OPEN_LEASES:
        return Ask()
    return Wait()


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
        seed = episode_seed(lease, group)
        requests = sample_requests(pool, tasks, problem, target, keys, seed=seed)
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
        GradeItem(
            planned.problem,
            planned.target,
            result.output_tokens.tolist(),
            planned.request.episode,
        )
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
            turns=np.array(sampled.turns, np.int32) if planned.request.episode else None,
        )
        for planned, sampled, claim, proofs in rows
    ]
