"""The files that the Parquet lanes damage are sound; one damaged file that ended pyarrow."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.fuzz.bounds import bounded
from tests.fuzz.tables import damaged, variants
from verify.coordinator.duplicates import Seen, repeated_submission
from verify.coordinator.grading import VerdictMismatch, grade_groups
from verify.formats import submission, verdict
from verify.formats.lease import Lease
from verify.formats.submission import Rollout, decode_rollouts
from verify.formats.tables import MalformedTable
from verify.formats.verdict import (
    MAX_FINGERPRINTS,
    CheckResult,
    RolloutVerdict,
    decode_verdicts,
    read_fingerprints,
)

MAX_ROWS, MAX_BYTES = 32, 1 << 18
MEMORY = 64 * MAX_BYTES
"""Rows as Python's objects take more than their bytes in a column."""
ARROW_BYTES = 64 << 20
POOL = pa.default_memory_pool()
Decode = Callable[[bytes], list[Any]]


def submission_rows() -> list[dict[str, Any]]:
    return [
        {
            "run": "tiny",
            "step": 1,
            "worker": "ab" * 32,
            "lease": "cd" * 32,
            "problem_id": "p",
            "group": row // 2,
            "sample": row % 2,
            "version": 1,
            "prompt_tokens": [1, 2, 3],
            "output_tokens": [4] * 40,
            "logprobs": [-0.5] * 40,
            "finish_reason": "stop",
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "target": None if row else 8,
            "task_reward": 1.0,
            "length_penalty": -0.5,
            "proofs": [bytes(258)] * 2,
            "versions": None if row else [1] * 40,
        }
        for row in range(4)
    ]


def verdict_rows() -> list[dict[str, Any]]:
    check = {"name": "logprobs", "passed": True, "value": 0.25, "limit": 0.5, "reason": ""}
    row = {
        "submission": "ab" * 32,
        "group": 0,
        "task_reward": 1.0,
        "length_penalty": -0.5,
        "reward": 0.5,
        "length": 40,
        "target": 8,
        "logprob_diff": 0.1,
        "checks": [check] * 3,
        "fingerprints": [7, -(2**63), 2**63 - 1, 7],
        "logprobs": [-0.5] * 40,
    }
    unknown = {"target": None, "logprobs": None, "logprob_diff": None, "checks": []}
    unknown |= {"fingerprints": None}
    return [{"row": 0, **row}, {"row": 1, **row, **unknown}]


def table(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    """Columns that the rows lack are null, or empty lists where they may not be."""
    empty = {field.name: None if field.nullable else [] for field in schema}
    return pa.Table.from_pylist([{**empty, **row} for row in rows], schema=schema)


@dataclass(frozen=True)
class Kind:
    name: str
    schema: pa.Schema
    files: Sequence[bytes]
    decode: Decode


KINDS = [
    Kind(
        "submission",
        submission.SCHEMA,
        variants(table(submission_rows(), submission.SCHEMA)),
        lambda data: decode_rollouts(data, max_rows=MAX_ROWS, max_bytes=MAX_BYTES),
    ),
    Kind(
        "verdict",
        verdict.SCHEMA,
        variants(table(verdict_rows(), verdict.SCHEMA)),
        decode_verdicts,
    ),
]
VERDICT = KINDS[1]
LEASE = Lease("demo", 3, "cd" * 32, "ab" * 32, "near", 0, 1, 1, "ef" * 32, 1.5, 61.5)
EVERY_FILE = [file for kind in KINDS for file in kind.files]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])


def check_row(row: object) -> None:
    match row:
        case Rollout():
            assert isinstance(row.run, str) and isinstance(row.finish_reason, str)
            assert type(row.step) is type(row.group) is type(row.version) is int
            assert row.prompt_tokens.dtype == row.output_tokens.dtype == np.int32
            assert row.logprobs.dtype == np.float32 and row.logprobs.ndim == 1
            assert all(type(proof) is bytes for proof in row.proofs)
            assert row.versions is None or row.versions.dtype == np.int32
        case RolloutVerdict():
            assert type(row.row) is type(row.group) is type(row.length) is int
            assert type(row.reward) is type(row.task_reward) is float
            assert row.logprobs is None or row.logprobs.dtype == np.float32
            assert all(isinstance(check, CheckResult) for check in row.checks)
            assert len(row.fingerprints) <= MAX_FINGERPRINTS
            assert all(type(f) is int and -(2**63) <= f < 2**63 for f in row.fingerprints)
        case _:
            raise AssertionError(row)


def decoded(kind: Kind, data: bytes) -> list[Any] | None:
    before = POOL.max_memory()
    with bounded(MEMORY):
        try:
            rows = kind.decode(data)
        except MalformedTable as error:
            assert len(str(error)) < 1000
            rows = None
    assert POOL.max_memory() <= max(before, ARROW_BYTES)
    for row in rows or []:
        check_row(row)
    return rows


@each_kind
def test_the_files_that_are_damaged_are_sound(kind: Kind) -> None:
    first, *others = [decoded(kind, file) for file in kind.files]
    assert first is not None and len(first) in (2, 4)
    assert [repr(rows) for rows in others] == [repr(first)] * len(others)


def check_fingerprints(path: Path, rng: random.Random) -> bool:
    """A restart reads of an accepted file what was compared when it came, whatever that is."""
    data = damaged(rng.choice(VERDICT.files), rng, VERDICT.files)
    rows = decoded(VERDICT, data)
    if rows is None:
        return False
    path.write_bytes(data)
    with bounded(MEMORY):
        found = read_fingerprints(path)
    assert found == [row.fingerprints for row in rows]
    seen = Seen()
    with bounded(MEMORY):
        seen.add(3, "ab" * 32, found)
        fault = seen.fault(rows)
    assert bool(fault) == any(found)
    assert not fault or repeated_submission(fault) == "ab" * 32
    return True


def check_grades(rng: random.Random, dropped: list[int]) -> bool:
    """Whatever rows a verdict's sound file has: a grade of each group, or `VerdictMismatch`."""
    graded = False
    rows = decoded(VERDICT, damaged(VERDICT.files[1], rng, VERDICT.files))
    for made in (rows, [replace(row, group=n // 2, row=n) for n, row in enumerate(rows or [])]):
        with bounded(MEMORY):
            try:
                grades = grade_groups(
                    made or [],
                    submission="ab" * 32,
                    lease=LEASE,
                    group_size=2,
                    dropped=dropped,
                    zero_variance_filter=rng.random() < 0.5,
                )
            except VerdictMismatch:
                continue
        assert [grade.group for grade in grades] == [0]
        assert set(dropped) <= {0} and grades[0].rollouts == 2
        assert math.isfinite(grades[0].task_reward) and math.isfinite(grades[0].reward)
        graded = True
    return graded


@each_kind
def test_a_file_whose_size_statistic_ended_pyarrow_is_refused(kind: Kind) -> None:
    rng = random.Random(213843475017391)
    decoded(kind, damaged(rng.choice(kind.files), rng, EVERY_FILE))
