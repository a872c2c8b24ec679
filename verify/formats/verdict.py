"""A verdict file: a validator's verdict on one submission, in a signed table, a row a rollout."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from runspec.core.canonical import digest_bytes
from runspec.core.errors import one_line
from runspec.core.signed import (
    STRICT,
    BadSignature,
    Digest,
    Natural,
    SigningKey,
    open_payload,
    sign_document,
)
from verify.formats.tables import Column, MalformedTable, Schema, decode_table, encode_table, text

KIND = "verdict"
MAX_ENVELOPE_BYTES = 16 * 1024
MAX_BYTES = 256 * 1024 * 1024
MAX_ROWS = 65536
MAX_FINGERPRINTS = 17
"""Largest number of fingerprints of a row: one of its output, and 16 of runs of tokens."""

MAX_FAULT = 400
"""Largest number of characters of a fault of the grader."""
MAX_CHECKS = 64
"""Largest number of checks of a row."""
SCHEMA = Schema(
    "runspec verdict 2",
    (
        text("submission"),
        Column("row", "I32"),
        Column("group", "I32"),
        Column("task_reward", "F32"),
        Column("length_penalty", "F32"),
        Column("reward", "F32"),
        Column("length", "I32"),
        Column("target", "I32", ("valid",)),
        Column("logprobs", "F32", ("valid", "offsets")),
        Column("logprob_diff", "F32", ("valid",)),
        text("checks.name", "offsets", most=MAX_CHECKS),
        Column("checks.passed", "BOOL", ("offsets",), most=MAX_CHECKS),
        Column("checks.value", "F64", ("offsets",), most=MAX_CHECKS),
        Column("checks.limit", "F64", ("offsets",), most=MAX_CHECKS),
        text("checks.reason", "offsets", most=MAX_CHECKS),
        Column("fingerprints", "I64", ("offsets",), most=MAX_FINGERPRINTS),
        Column("gap_excess", "F64", ("valid",)),
        Column("answered", "BOOL"),
        Column("between", "I32", ("valid", "offsets")),
        Column("between_lengths", "I32", ("valid", "offsets")),
    ),
)


@dataclass(frozen=True)
class CheckResult:
    """Result of one check of one rollout, with the deciding number and its limit."""

    name: str
    passed: bool
    value: float
    limit: float
    reason: str = ""

    @property
    def measured(self) -> str:
        """The reason, with the number and its limit."""
        return f"{self.reason} (measured {self.value:.6g}, limit {self.limit:.6g})"


@dataclass(frozen=True)
class RolloutVerdict:
    """Numbers that the validator computed for one row of a submission."""

    submission: str
    row: int
    group: int
    task_reward: float
    length_penalty: float
    reward: float
    length: int
    """Output tokens, the end token included."""
    target: int | None
    """Length that the prompt asked for."""
    logprobs: np.ndarray | None
    """f32 [n] under the sampled version, at the sampling temperature; None if not prefilled."""
    logprob_diff: float | None
    """Mean |claimed - recomputed| log-prob over the output tokens; None if not prefilled."""
    checks: list[CheckResult]
    fingerprints: list[int] = field(default_factory=list)
    """Hashes of runs of tokens that no other rollout can share by chance. The coordinator compares
    them across submissions (`verify.checks.rows`). Empty if an earlier check failed."""
    gap_excess: float | None = None
    """Excess of its gaps over a worker's long-run budget, nats (`verify.thresholds.GapNoise`); None
    if the pool was not calibrated or the rollout not recomputed."""
    answered: bool = True
    """Whether the output has an answer in the form that the run asks for."""
    between: np.ndarray | None = None
    """i32: tokens that stand between the turns, by the validator's replay; None where the task has
    one turn, or the replay failed."""
    between_lengths: np.ndarray | None = None
    """i32 [turns - 1]: how many stand after each turn but the last."""


@dataclass(frozen=True)
class VerdictEnvelope:
    """The signed statement that goes with the table."""

    __pydantic_config__ = STRICT

    run: str
    step: Natural
    submission: Digest
    accepted: bool
    reason: str
    """Why it was rejected: the failed check, the row, the number; empty if accepted."""
    dropped_groups: list[Natural]
    """Groups lost to a fault of the grader."""
    fault: str
    """The grader's error at the last dropped group, as one printable line."""
    digest: Digest
    bytes: Natural


_CODEC = TypeAdapter(VerdictEnvelope)


def encode_verdicts(rows: list[RolloutVerdict]) -> bytes:
    """Return the bytes of a verdict file's table."""
    columns: dict[str, list[Any]] = {}
    for column in SCHEMA.columns:
        name, _, of_check = column.name.partition(".")
        values = [getattr(row, name) for row in rows]
        columns[column.name] = (
            [[getattr(check, of_check) for check in checks] for checks in values]
            if of_check
            else values
        )
    return encode_table(columns, SCHEMA)


def decode_verdicts(data: bytes) -> list[RolloutVerdict]:
    """Read a verdict file's table; arrays of the rows are read-only views of `data`.

    Raises:
        MalformedTable: `data` is not a table of this format.
    """
    columns = decode_table(data, SCHEMA, max_rows=MAX_ROWS, max_bytes=MAX_BYTES)
    fields = [columns.pop(name) for name in list(columns) if name.startswith("checks.")]
    try:
        columns["checks"] = [
            [CheckResult(*check) for check in zip(*map(_plain, row), strict=True)]
            for row in zip(*fields, strict=True)
        ]
    except ValueError as error:
        raise MalformedTable(f"checks: {error}") from error
    columns["fingerprints"] = [row.tolist() for row in columns["fingerprints"]]
    names = list(columns)
    return [
        RolloutVerdict(**dict(zip(names, row, strict=True)))
        for row in zip(*columns.values(), strict=True)
    ]


def read_fingerprints(path: Path) -> list[list[int]]:
    """Return the fingerprints of each row of a verdict file; only that column is decoded.

    Raises:
        OSError: the file cannot be read.
        MalformedTable: it is not a table of this format.
    """
    columns = decode_table(
        *(path.read_bytes(), SCHEMA),
        max_rows=MAX_ROWS,
        max_bytes=MAX_BYTES,
        only=("fingerprints",),
    )
    return [row.tolist() for row in columns["fingerprints"]]


def _plain(values: list[Any] | np.ndarray) -> list[Any]:
    return values if isinstance(values, list) else values.tolist()


def sign_verdict(
    data: bytes,
    *,
    run: str,
    step: int,
    submission: str,
    accepted: bool,
    reason: str,
    dropped_groups: list[int],
    fault: str = "",
    key: SigningKey,
) -> bytes:
    """Return the signed envelope of a verdict file's table."""
    digest, size = digest_bytes(data), len(data)
    envelope = VerdictEnvelope(
        run, step, submission, accepted, reason, dropped_groups, fault, digest, size
    )
    return sign_document(KIND, asdict(envelope), key)


def open_verdict(data: bytes, *, validators: frozenset[str]) -> VerdictEnvelope:
    """Check an envelope and return it.

    Raises:
        BadSignature: it is not signed by a validator, or its fields are not valid.
    """
    envelope, _ = open_payload(
        _CODEC, data, kind=KIND, keys=validators, max_bytes=MAX_ENVELOPE_BYTES
    )
    if envelope.accepted == bool(envelope.reason):
        raise BadSignature("verdict: a rejection must have a reason, an acceptance must have none")
    if envelope.fault != one_line(envelope.fault, MAX_FAULT):
        raise BadSignature(f"verdict: a fault is one printable line of {MAX_FAULT} characters")
    return envelope
