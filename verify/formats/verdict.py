"""A verdict file: a validator's findings on one submission, signed Parquet, a row a rollout."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from runspec.core.hashing import digest_bytes, is_digest
from runspec.core.keys import SigningKey
from runspec.core.signed import BadSignature, open_document, sign_document
from verify.formats.tables import MalformedTable, decode_table, encode_table

KIND = "verdict"
MAX_ENVELOPE_BYTES = 16 * 1024
MAX_BYTES = 256 * 1024 * 1024
MAX_ROWS = 65536
MAX_FINGERPRINTS = 17
"""Of a row: its output, and 16 runs of tokens."""

_CHECK = pa.struct(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("passed", pa.bool_(), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
        pa.field("limit", pa.float64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
    ]
)
SCHEMA = pa.schema(
    [
        pa.field("submission", pa.string(), nullable=False),
        pa.field("row", pa.int32(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),
        pa.field("task_reward", pa.float32(), nullable=False),
        pa.field("length_penalty", pa.float32(), nullable=False),
        pa.field("reward", pa.float32(), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("target", pa.int32()),
        pa.field("logprobs", pa.list_(pa.field("element", pa.float32(), nullable=False))),
        pa.field("logprob_diff", pa.float32()),
        pa.field("checks", pa.list_(pa.field("element", _CHECK, nullable=False)), nullable=False),
        pa.field("fingerprints", pa.list_(pa.field("element", pa.int64(), nullable=False))),
        pa.field("gap_excess", pa.float64()),
    ]
)
_NEWER_COLUMNS = ("fingerprints", "gap_excess")
"""A run that goes on after an upgrade reads what was judged before it."""


@dataclass(frozen=True)
class CheckResult:
    """One check's verdict on one rollout, with the number that decided it and its limit."""

    name: str
    passed: bool
    value: float
    limit: float
    reason: str = ""


@dataclass(frozen=True)
class RolloutVerdict:
    """What the validator computed for one row of a submission."""

    submission: str
    row: int
    group: int
    task_reward: float
    length_penalty: float
    reward: float
    length: int
    """Output tokens, the end token included."""
    target: int | None
    """Length asked for."""
    logprobs: np.ndarray | None
    """f32 [n] under the sampled version, at the sampling temperature; None where not prefilled."""
    logprob_diff: float | None
    """Mean |claimed - recomputed| log-prob over the output tokens; None where not prefilled."""
    checks: list[CheckResult]
    fingerprints: list[int] = field(default_factory=list)
    """Hashes of runs of tokens that no other rollout can share by chance, which the coordinator
    compares across submissions (`verify.checks.duplicates`); empty where nothing was accepted."""
    gap_excess: float | None = None
    """By how much its gaps exceed what a worker's may come to for ever, nats (`verify.gap_noise`);
    None where the pool was not calibrated, or the rollout not recomputed."""


@dataclass(frozen=True)
class VerdictEnvelope:
    """The signed statement that goes with the Parquet bytes."""

    run: str
    step: int
    submission: str
    accepted: bool
    reason: str
    """Why it was rejected: the failed check, the row, the number; empty when accepted."""
    dropped_groups: list[int]
    """Groups lost to a fault of the grader, without blame."""
    digest: str
    bytes: int


def encode_verdicts(rows: list[RolloutVerdict]) -> bytes:
    # `asdict` would copy every number: five microseconds an output token.
    plain = [{**vars(row), "checks": [vars(check) for check in row.checks]} for row in rows]
    return encode_table(plain, SCHEMA)


def decode_verdicts(data: bytes) -> list[RolloutVerdict]:
    """Reads a verdict file's Parquet bytes.

    Raises:
        MalformedTable: not a table of this format.
    """
    rows = decode_table(
        data, SCHEMA, max_rows=MAX_ROWS, max_bytes=MAX_BYTES, newer=_NEWER_COLUMNS
    ).to_pylist()
    for row in rows:
        row["fingerprints"] = row["fingerprints"] or []
        if len(row["fingerprints"]) > MAX_FINGERPRINTS:
            raise MalformedTable(f"{len(row['fingerprints'])} fingerprints of a row")
        row["checks"] = [CheckResult(**check) for check in row["checks"]]
        if row["logprobs"] is not None:
            row["logprobs"] = np.asarray(row["logprobs"], dtype=np.float32)
    return [RolloutVerdict(**row) for row in rows]


def read_fingerprints(path: Path) -> list[list[int]]:
    """Of each row of a verdict file that was accepted once: that column alone is read.

    Raises:
        OSError: the file cannot be read.
        MalformedTable: it is no Parquet file.
    """
    try:
        file = pq.ParquetFile(path)
        if "fingerprints" not in file.schema_arrow.names:
            return []
        rows = file.read(columns=["fingerprints"]).column(0).to_pylist()
    except pa.ArrowException as error:
        raise MalformedTable(str(error)[:200]) from error
    return [row or [] for row in rows]


def sign_verdict(
    data: bytes,
    *,
    run: str,
    step: int,
    submission: str,
    accepted: bool,
    reason: str,
    dropped_groups: list[int],
    key: SigningKey,
) -> bytes:
    """The signed envelope of a verdict file's Parquet bytes."""
    envelope = VerdictEnvelope(
        run, step, submission, accepted, reason, dropped_groups, digest_bytes(data), len(data)
    )
    return sign_document(KIND, asdict(envelope), key)


def open_verdict(data: bytes, *, validators: frozenset[str]) -> VerdictEnvelope:
    """Checks an envelope and returns it.

    Raises:
        BadSignature: not signed by a validator, or its fields are not a verdict's.
    """
    document = open_document(data, kind=KIND, keys=validators, max_bytes=MAX_ENVELOPE_BYTES)
    try:
        envelope = VerdictEnvelope(**document.payload)
    except TypeError as error:
        raise BadSignature(f"verdict: {error}") from error
    if not (is_digest(envelope.submission) and is_digest(envelope.digest)):
        raise BadSignature("verdict: submission and digest must be 64 hex characters")
    if not isinstance(envelope.dropped_groups, list):
        raise BadSignature("verdict: dropped_groups must be a list")
    integers = (envelope.step, envelope.bytes, *envelope.dropped_groups)
    if not all(type(n) is int and 0 <= n < 2**31 for n in integers):
        raise BadSignature("verdict: step, bytes and dropped_groups must be natural numbers")
    if not (isinstance(envelope.run, str) and isinstance(envelope.reason, str)):
        raise BadSignature("verdict: run must be a name, reason a text")
    if not isinstance(envelope.accepted, bool):
        raise BadSignature("verdict: accepted must be true or false")
    if envelope.accepted == bool(envelope.reason):
        raise BadSignature("verdict: a rejection has a reason, and nothing else has one")
    return envelope
