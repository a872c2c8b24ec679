"""The sampler's side: leases, the engine, and submissions as a worker hands them in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.sampler_engine import WAIT_S
from runspec.core import schema
from runspec.core.canonical import digest_bytes
from runspec.core.signed import SigningKey
from sampler.engine.engine import Engine
from sampler.worker.rollouts import claim_rewards, make_rollouts, plan_rollouts
from verify.client import WorkItem
from verify.formats.lease import Lease, lease_digest, sign_lease
from verify.formats.submission import encode_rollouts, sign_submission
from verify.plugins import TaskSet
from verify.toploc import build_proofs_of

LEASES_IN_FLIGHT = 2
WORKER, COORDINATOR = SigningKey.generate(), SigningKey.generate()


@dataclass(frozen=True)
class Handed:
    """A submission as a coordinator has it."""

    item: WorkItem
    table: bytes
    tokens: int
    """Output tokens."""
    prompts: int
    """Prompt tokens."""


class Sampler:
    """Samples leases of so many groups, and makes submissions of the last ones."""

    def __init__(
        self, engine: Engine, tasks: TaskSet, spec: schema.RunSpec, *, groups: int, leases: int
    ) -> None:
        self._engine, self._tasks, self._spec = engine, tasks, spec
        self._pool, self._groups, self._leases = spec.samplers[0], groups, leases
        self._index = 0
        self._done: list[tuple[bytes, Lease, Any, Any, Any]] = []

    def sample(self) -> int:
        """Samples and proves so many leases, two in flight; counts output tokens."""
        left = [self._lease() for _ in range(self._leases)]
        flying, self._done, tokens = [], [], 0
        while left or flying:
            while left and len(flying) < LEASES_IN_FLIGHT:
                signed, lease = left.pop()
                plan = plan_rollouts(
                    lease, self._tasks, self._pool, group_size=self._spec.algorithm.group_size
                )
                flying.append((signed, lease, plan, self._engine.submit([p.request for p in plan])))
            signed, lease, plan, future = flying.pop(0)
            sampled = future.result(WAIT_S)
            tokens += sum(len(each.output_tokens) for each in sampled)
            proofs = build_proofs_of([each.selection for each in sampled])
            self._done.append((signed, lease, plan, sampled, proofs))
        return tokens

    def submissions(self) -> list[Handed]:
        """What was sampled last, as a worker hands it in."""
        return [self._submission(*each) for each in self._done]

    def _lease(self) -> tuple[bytes, Lease]:
        spec, index = self._spec, self._index
        self._index += 1
        lease = Lease(
            run=spec.name,
            step=0,
            nonce="0a" * 32,
            worker=WORKER.public_hex,
            pool=self._pool.name,
            index=index,
            groups=self._groups,
            version=0,
            manifest_digest="ab" * 32,
            issued=0.0,
            expires=1e12,
        )
        return sign_lease(lease, COORDINATOR), lease

    def _submission(
        self, signed: bytes, lease: Lease, plan: Any, sampled: Any, proofs: Any
    ) -> Handed:
        digest = lease_digest(signed)
        claims = claim_rewards(plan, sampled, self._tasks)
        made = zip(plan, sampled, claims, proofs, strict=True)
        rows = make_rollouts(lease, digest, made, self._tasks, self._pool)
        table = encode_rollouts(rows)
        envelope = sign_submission(
            table, run=lease.run, step=lease.step, index=lease.index, lease=digest, key=WORKER
        )
        item = WorkItem(digest_bytes(table), signed, envelope, 1.0)
        tokens, prompts = (
            sum(len(getattr(row, name)) for row in rows)
            for name in ("output_tokens", "prompt_tokens")
        )
        return Handed(item, table, tokens, prompts)
