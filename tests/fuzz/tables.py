"""Lanes: tables of submissions and verdicts, and what is made of their rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tests.fuzz.bounds import OPEN, bounded
from tests.fuzz.mutate import damaged
from verify.coordinator.machine.verdicts import (
    Seen,
    VerdictMismatch,
    grade_groups,
    repeated_submission,
)
from verify.formats import submission, verdict
from verify.formats.lease import Lease
from verify.formats.submission import Rollout, decode_rollouts, encode_rollouts
from verify.formats.tables import MalformedTable, Schema, _layout
from verify.formats.verdict import (
    MAX_CHECKS,
    MAX_FINGERPRINTS,
    CheckResult,
    RolloutVerdict,
    decode_verdicts,
    encode_verdicts,
    read_fingerprints,
)

MAX_ROWS, MAX_BYTES = 32, 1 << 18
MEMORY = 2 << 20
"""Rows as Python's objects take more than their bytes in a column."""
LEASE = Lease("demo", 3, "cd" * 32, "ab" * 32, "near", 0, 1, 1, "ef" * 32, 1.5, 61.5)
_NUMBERS = [0, 1, -1, 2, 3, 40, 258, 2**31 - 1, -(2**31), 2**24]
_COUNTS = [0, 0, 1, 1, 2, 3, 5, 40, 1000, -1, 2**31, 2**40, 2**63 - 1, -(2**63)]
_PIECES = [
    *(b'"shape":[0]', b'"dtype":"I64"', b"}}", b" ", b"\0" * 8, b"\xff" * 8, b"\xff\xff\xff\x7f"),
    *(b"\x01\0\0\0", b"\x80", b"\xc3", b"PAR1", b'"__metadata__":{"format":"x"},'),
]
Case = Callable[[Random], bool]


def rollouts() -> list[Rollout]:
    """Two groups of two."""
    return [
        Rollout(
            run="tiny",
            step=1,
            worker="ab" * 32,
            lease="cd" * 32,
            problem_id="é" if row else "p",
            group=row // 2,
            sample=row % 2,
            version=1,
            prompt_tokens=np.arange(3 + row // 2, dtype=np.int32),
            output_tokens=np.full(40, 4, np.int32),
            logprobs=np.full(40, -0.5, np.float32),
            finish_reason="stop",
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            target=None if row else 8,
            task_reward=1.0,
            length_penalty=-0.5,
            proofs=[bytes([row]) * 258] * 2,
            versions=None if row else np.full(40, 1, np.int32),
        )
        for row in range(4)
    ]


def verdicts() -> list[RolloutVerdict]:
    """On one group of two, of which the second was not recomputed."""
    checks = [CheckResult("logprobs", True, 0.25, 0.5), CheckResult("proofs", False, 9.0, 0.5, "é")]
    first = RolloutVerdict(
        *("ab" * 32, 0, 0, 1.0, -0.5, 0.5, 40, 8, np.full(40, -0.5, np.float32), 0.125, checks),
        fingerprints=[7, -(2**63), 2**63 - 1, 7],
        gap_excess=0.5,
    )
    unknown = {"target": None, "logprobs": None, "logprob_diff": None, "gap_excess": None}
    return [first, replace(first, row=1, checks=[], fingerprints=[], **unknown)]


@dataclass(frozen=True)
class Kind:
    """A kind of table, a sound file of it, and its reader and writer."""

    schema: Schema
    rows: Sequence[Any]
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], list[Any]]

    @property
    def file(self) -> bytes:
        return self.encode(self.rows)


def _read(data: bytes) -> list[Rollout]:
    return decode_rollouts(data, max_rows=MAX_ROWS, max_bytes=MAX_BYTES)


SUBMISSION = Kind(submission.SCHEMA, rollouts(), encode_rollouts, _read)
VERDICT = Kind(verdict.SCHEMA, verdicts(), encode_verdicts, decode_verdicts)
KINDS = {"submission": SUBMISSION, "verdict": VERDICT}


def check_row(row: object) -> None:
    """Every field has its type and its bounds."""
    match row:
        case Rollout():
            assert isinstance(row.run, str) and isinstance(row.finish_reason, str)
            assert type(row.step) is type(row.group) is type(row.version) is int
            assert row.prompt_tokens.dtype == row.output_tokens.dtype == np.int32
            assert row.logprobs.dtype == np.float32 and row.logprobs.ndim == 1
            assert all(type(proof) is bytes and len(proof) == 258 for proof in row.proofs)
            assert row.versions is None or row.versions.dtype == np.int32
        case RolloutVerdict():
            assert type(row.row) is type(row.group) is type(row.length) is int
            assert type(row.reward) is type(row.task_reward) is float
            assert row.logprobs is None or row.logprobs.dtype == np.float32
            assert len(row.checks) <= MAX_CHECKS and len(row.fingerprints) <= MAX_FINGERPRINTS
            assert all(isinstance(check, CheckResult) for check in row.checks)
            assert all(type(check.passed) is bool for check in row.checks)
            assert all(type(f) is int and -(2**63) <= f < 2**63 for f in row.fingerprints)
        case _:
            raise AssertionError(row)


def decoded(kind: Kind, data: bytes) -> list[Any] | None:
    """Rows of the right types, which written again are the same; None where it is refused."""
    with bounded(MEMORY):
        try:
            rows = kind.decode(data)
        except MalformedTable as error:
            assert len(str(error)) < 300
            return None
    for row in rows:
        check_row(row)
    assert repr(kind.decode(kind.encode(rows))) == repr(rows)
    return rows


def changed(rng: Random, kind: Kind) -> bytes:
    """A file with damage anywhere, or with other numbers behind its own header."""
    file = kind.file
    if rng.random() < 0.3:
        return damaged(rng, file, [each.file for each in KINDS.values()], _PIECES)
    data, start = bytearray(file), 8 + int.from_bytes(file[:8], "little")
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(start, len(data) - 3)
        if rng.random() < 0.8:
            at -= (at - start) % 4
            data[at : at + 4] = rng.choice(_NUMBERS).to_bytes(4, "little", signed=True)
        else:
            data[at] = rng.randrange(256)
    return bytes(data)


def made_up(rng: Random, kind: Kind) -> bytes:
    """A header that follows from some counts; behind it zeros, noise or sound-looking offsets."""
    counts = [rng.choice(_COUNTS) for _ in range(kind.schema.counts)]
    if rng.random() < 0.8:
        counts = [count if 0 <= count < 50 else 1 for count in counts]
    layout = _layout(kind.schema, counts)
    size = min(max(end for _, end in layout.tensors.values()), MAX_BYTES) - len(layout.head)
    body = rng.choice((bytes, rng.randbytes, lambda n: b"\0\0\0\0\x01\0\0\0" * (n // 8 + 1)))
    sent = np.array(counts, "<i8").tobytes()
    data = layout.head + sent + body(max(0, size - len(sent)))[: max(0, size - len(sent))]
    return data + bytes(rng.choice((0, 0, 0, 1, 8)))


def tables(name: str) -> Case:
    """Files of a kind: changed ones, and made-up ones."""
    kind = KINDS[name]

    def case(rng: Random) -> bool:
        make = changed if rng.random() < 0.6 else made_up
        return decoded(kind, make(rng, kind)) is not None

    return case


def fingerprints() -> Case:
    """A restart reads of an accepted file what was compared when it came, whatever that is."""
    path = Path(OPEN.enter_context(TemporaryDirectory())) / "verdict.safetensors"

    def case(rng: Random) -> bool:
        data = changed(rng, VERDICT)
        rows = decoded(VERDICT, data)
        if rows is None:
            return False
        path.write_bytes(data)
        seen = Seen()
        with bounded(MEMORY):
            found = read_fingerprints(path)
            seen.add(3, "ab" * 32, found)
            fault = seen.fault(rows)
        assert found == [row.fingerprints for row in rows]
        assert bool(fault) == any(found)
        assert not fault or repeated_submission(fault) == "ab" * 32
        return True

    return case


def grades() -> Case:
    """Whatever rows a verdict's table has: a grade of each group, or `VerdictMismatch`."""

    def graded(rows: list[RolloutVerdict], dropped: list[int], rng: Random) -> bool:
        with bounded(MEMORY):
            try:
                found = grade_groups(
                    rows,
                    submission="ab" * 32,
                    lease=LEASE,
                    group_size=2,
                    dropped=dropped,
                    zero_variance_filter=rng.random() < 0.5,
                )
            except VerdictMismatch:
                return False
        assert [grade.group for grade in found] == [0]
        assert set(dropped) <= {0} and found[0].rollouts == 2
        assert math.isfinite(found[0].task_reward) and math.isfinite(found[0].reward)
        return True

    def case(rng: Random) -> bool:
        dropped = [rng.randint(-1, 3) for _ in range(rng.choice((0, 0, 0, 1, 2)))]
        rows = decoded(VERDICT, changed(rng, VERDICT)) or []
        whole = [replace(row, group=n // 2, row=n) for n, row in enumerate(rows)]
        return any([graded(rows, dropped, rng), graded(whole, dropped, rng)])

    return case
