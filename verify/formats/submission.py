"""A submission: one worker's rollouts for one lease, a signed Parquet file, one row a rollout."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import numpy as np

from runspec.core.hashing import digest_bytes, is_digest
from runspec.core.keys import SigningKey
from runspec.core.signed import BadSignature, open_document, sign_document
from verify.formats.submission_columns import NEWER_COLUMNS, SCHEMA
from verify.formats.tables import decode_table, encode_table

__all__ = [
    "SCHEMA",
    "Rollout",
    "SubmissionEnvelope",
    "decode_rollouts",
    "encode_rollouts",
    "open_submission",
    "sign_submission",
]

KIND = "submission"
MAX_ENVELOPE_BYTES = 8 * 1024


@dataclass(frozen=True)
class Rollout:
    """One row: a prompt, what the policy made of it, and what the worker claims of that."""

    run: str
    step: int
    worker: str
    lease: str
    """Digest of the signed lease."""
    problem_id: str
    group: int
    sample: int
    version: int
    """That the lease names."""
    prompt_tokens: np.ndarray
    """i32 [P]."""
    output_tokens: np.ndarray
    """i32 [n], the end token included where there is one."""
    logprobs: np.ndarray
    """f32 [n]: of log_softmax(logits / T) after top-k / top-p, before noise."""
    finish_reason: str
    """`stop` (the end token) or `length`."""
    temperature: float
    top_p: float
    top_k: int
    target: int | None
    task_reward: float
    length_penalty: float
    proofs: list[bytes]
    """TOPLOC proofs, one for each 32 output tokens begun."""
    versions: np.ndarray | None = None
    """i32 [n]: the policy version that sampled each token. Pools with `in_flight_updates` have
    them, and no others: there every token is of `version`."""

    @property
    def oldest_version(self) -> int:
        """From which the lag counts."""
        return self.version if self.versions is None else int(self.versions.min())

    @property
    def is_of_its_version(self) -> bool:
        """Whether `version` sampled all of it, so that a prefill can reproduce it."""
        return self.versions is None or bool((self.versions == self.version).all())


@dataclass(frozen=True)
class SubmissionEnvelope:
    """The signed statement that goes with the Parquet bytes."""

    run: str
    step: int
    worker: str
    index: int
    lease: str
    digest: str
    """BLAKE3 of the Parquet bytes: the submission's name from here on."""
    bytes: int


def encode_rollouts(rollouts: list[Rollout]) -> bytes:
    names = [f.name for f in fields(Rollout)]
    return encode_table([{n: getattr(r, n) for n in names} for r in rollouts], SCHEMA)


def decode_rollouts(data: bytes, *, max_rows: int, max_bytes: int) -> list[Rollout]:
    """Reads a submission's Parquet bytes, in this process: for whoever trusts the bytes not to end
    it. Validators and the learner ask `verify.decoder` instead.

    Raises:
        MalformedTable: not a table of this format within the limits.
    """
    table = decode_table(data, SCHEMA, max_rows=max_rows, max_bytes=max_bytes, newer=NEWER_COLUMNS)
    rows = []
    for row in table.to_pylist():
        for name, dtype in (
            ("prompt_tokens", np.int32),
            ("output_tokens", np.int32),
            ("logprobs", np.float32),
        ):
            row[name] = np.asarray(row[name], dtype=dtype)
        if row["versions"] is not None:
            row["versions"] = np.asarray(row["versions"], dtype=np.int32)
        rows.append(Rollout(**row))
    return rows


def sign_submission(
    data: bytes, *, run: str, step: int, index: int, lease: str, key: SigningKey
) -> bytes:
    """The signed envelope of a submission's Parquet bytes."""
    envelope = SubmissionEnvelope(
        run, step, key.public_hex, index, lease, digest_bytes(data), len(data)
    )
    return sign_document(KIND, asdict(envelope), key)


def open_submission(data: bytes) -> SubmissionEnvelope:
    """Checks an envelope: signed by the worker that it names, fields of the right form.

    Whether that worker holds the lease is the coordinator's question, whether the Parquet bytes
    match `digest` the reader's.

    Raises:
        BadSignature: for every reason not to believe it.
    """
    document = open_document(data, kind=KIND, keys=None, max_bytes=MAX_ENVELOPE_BYTES)
    try:
        envelope = SubmissionEnvelope(**document.payload)
    except TypeError as error:
        raise BadSignature(f"submission: {error}") from error
    if envelope.worker != document.key:
        raise BadSignature("submission: signed by another key than its worker's")
    if not (is_digest(envelope.digest) and is_digest(envelope.lease)):
        raise BadSignature("submission: digest and lease must be 64 hex characters")
    integers = (envelope.step, envelope.index, envelope.bytes)
    if not all(type(n) is int and 0 <= n < 2**31 for n in integers):
        raise BadSignature("submission: step, index and bytes must be natural numbers")
    if not isinstance(envelope.run, str):
        raise BadSignature("submission: run must be a name")
    return envelope
