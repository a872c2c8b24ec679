"""What each check of a submission costs beside the prefill; prints JSON, milliseconds of one core.

    python -m benchmarks.check_costs

A submission of 64 rollouts of 1000 tokens, hidden size 1024, a vocabulary of 151,936: random
tokens and states, proofs of those very states. What a check takes depends on their number alone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy is first imported

import numpy as np

from runspec.core.canonical import digest_bytes
from runspec.core.schema import SamplerPool
from runspec.core.signed import SigningKey
from verify.checks import Subject
from verify.checks.prefill import prefill_checks
from verify.checks.rows import GRADE_CHECKS, ROW_CHECKS, TURN_CHECKS, duplicates, fingerprints
from verify.formats.lease import Lease, assignments, lease_digest, open_lease, sign_lease
from verify.formats.submission import (
    Rollout,
    decode_rollouts,
    encode_rollouts,
    open_submission,
    sign_submission,
)
from verify.plugins import Graded, GradeItem, Problem, TaskSet
from verify.recompute import Recomputed
from verify.thresholds import BFLOAT16
from verify.toploc import build_proofs_batch
from verify.toploc.statistics import verify_proofs_batch

GROUPS, GROUP_SIZE, TOKENS, HIDDEN, VOCAB, END = 4, 16, 1000, 1024, 151_936, 0
REPEATS = 5


class Task(TaskSet):
    """A thousand problems of a hundred tokens."""

    eos_token_id, targets = END, [1000, 2000]

    def __len__(self) -> int:
        return 1000

    def problem(self, index: int) -> Problem:
        return Problem(f"p{index}", "none", "", {})

    def prompt_tokens(self, index: int, target: int | None, seed: int = 0) -> list[int]:
        return [1 + (index * 31 + place) % (VOCAB - 1) for place in range(100)]

    def grade_all(self, items: Sequence[GradeItem]) -> list[Any]:
        return [Graded(1.0, 0.0, 1.0) for _ in items]

    def close(self) -> None:
        """Nothing is open."""


def submission() -> tuple[Subject, bytes, bytes, bytes, SigningKey]:
    """One submission as rows, as a table; its envelope, its lease, the coordinator's key."""
    worker, coordinator = SigningKey.generate(), SigningKey.generate()
    lease = Lease(
        "run", 0, "12" * 32, worker.public_hex, "pool", 0, GROUPS, 0, "ab" * 32, 0.0, 1e9
    )  # fmt: skip
    signed, task, rng = sign_lease(lease, coordinator), Task(), np.random.default_rng(0)
    given = assignments(lease, n_problems=len(task), targets=task.targets)
    pool = SamplerPool.model_validate(
        {
            "name": "pool",
            "hardware": {"kind": "cpu"},
            "max_model_len": 4096,
            "max_new_tokens": TOKENS,
            "sampling": {"temperature": 0.6, "seeded": True},
        }
    )
    rows, states = [], []
    for group in range(GROUPS):
        for sample in range(GROUP_SIZE):
            hidden = rng.standard_normal((TOKENS, HIDDEN), np.float32)
            states.append((hidden.view(np.uint32) >> 16).astype(np.uint16))
            rows.append(row(lease, lease_digest(signed), given[group], sample, task, pool, rng))
    proofs = build_proofs_batch(states)
    rows = [replace(r, proofs=p) for r, p in zip(rows, proofs, strict=True)]
    found = verify_proofs_batch(states, proofs)
    subject = Subject(
        submission="cd" * 32,
        rollouts=rows,
        lease=lease,
        lease_digest=lease_digest(signed),
        pool=pool,
        group_size=GROUP_SIZE,
        vocab_size=VOCAB,
        task_set=task,
        assignments=given,
        limits=BFLOAT16,
        last_version=100,
        grades=task.grade_all([None] * len(rows)),  # type: ignore[list-item]
        recomputed=[
            Recomputed(r.logprobs, np.zeros(TOKENS, np.float32), statistics)
            for r, statistics in zip(rows, found, strict=True)
        ],
    )
    table = encode_rollouts(rows)
    envelope = sign_submission(
        table, run="run", step=0, index=0, lease=subject.lease_digest, key=worker
    )
    return subject, table, envelope, signed, coordinator


def row(
    lease: Lease,
    digest: str,
    given: Any,
    sample: int,
    task: Task,
    pool: SamplerPool,
    rng: np.random.Generator,
) -> Rollout:
    return Rollout(
        run=lease.run,
        step=lease.step,
        worker=lease.worker,
        lease=digest,
        problem_id=task.problem(given.problem).problem_id,
        group=given.group,
        sample=sample,
        version=lease.version,
        prompt_tokens=np.array(task.prompt_tokens(given.problem, given.target), np.int32),
        output_tokens=rng.integers(1, VOCAB, TOKENS).astype(np.int32),
        logprobs=-rng.exponential(1.0, TOKENS).astype(np.float32),
        finish_reason="length",
        temperature=float(np.float32(pool.sampling.temperature)),
        top_p=pool.sampling.top_p,
        top_k=pool.sampling.top_k,
        target=given.target,
        task_reward=1.0,
        length_penalty=0.0,
        proofs=[],
    )


def milliseconds(work: Callable[[], Any]) -> float:
    """The best of a few."""
    best = float("inf")
    for _ in range(REPEATS):
        begun = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begun)
    return round(1e3 * best, 3)


def main() -> None:
    subject, table, envelope, signed, coordinator = submission()
    keys, limits = frozenset({coordinator.public_hex}), {"max_rows": 64, "max_bytes": 1 << 28}
    found = {
        "envelope": milliseconds(lambda: open_submission(envelope)),
        "lease": milliseconds(lambda: open_lease(signed, coordinators=keys)),
        "digest": milliseconds(lambda: digest_bytes(table)),
        "decode": milliseconds(lambda: decode_rollouts(table, **limits)),
    }
    for check in [*ROW_CHECKS, *TURN_CHECKS, *GRADE_CHECKS, *prefill_checks(subject.pool)]:
        found[check(subject)[0].name] = milliseconds(partial(check, subject))
    pairs = [(r.output_tokens, r.logprobs) for r in subject.rollouts]
    found["fingerprints"] = milliseconds(lambda: [fingerprints(*pair) for pair in pairs])
    alike = replace(subject, fingerprints=[fingerprints(*pair) for pair in pairs])
    found["duplicates"] = milliseconds(lambda: duplicates(alike))
    shape = {"rollouts": len(pairs), "tokens": TOKENS, "hidden": HIDDEN, "bytes": len(table)}
    print(json.dumps({"submission": shape, "milliseconds": found}, indent=2))


if __name__ == "__main__":
    main()
