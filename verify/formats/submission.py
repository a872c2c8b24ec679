"""A submission: one worker's rollouts for one lease, in a signed table with one row a rollout."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from pydantic import TypeAdapter

from runspec.core.canonical import digest_bytes
from runspec.core.schema import RunSpec, SamplerPool
from runspec.core.signed import (
    STRICT,
    BadSignature,
    Digest,
    Natural,
    SigningKey,
    open_payload,
    sign_document,
)
from verify.formats.tables import Column, Schema, decode_table, encode_table, text
from verify.toploc import CHUNK_ROWS, PROOF_BYTES

KIND = "submission"
MAX_ENVELOPE_BYTES = 8 * 1024
SCHEMA = Schema(
    "runspec submission 2",
    (
        text("run"),
        Column("step", "I32"),
        text("worker"),
        text("lease"),
        text("problem_id"),
        Column("group", "I32"),
        Column("sample", "I32"),
        Column("version", "I32"),
        Column("prompt_tokens", "I32", ("index", "offsets")),  # a group shares its prompt
        Column("output_tokens", "I32", ("offsets",)),
        Column("logprobs", "F32", ("offsets",)),
        text("finish_reason"),
        Column("temperature", "F32"),
        Column("top_p", "F32"),
        Column("top_k", "I32"),
        Column("target", "I32", ("valid",)),
        Column("task_reward", "F32"),
        Column("length_penalty", "F32"),
        Column("proofs", "U8", ("offsets",), width=PROOF_BYTES),
        Column("versions", "I32", ("valid", "offsets")),
        Column("turns", "I32", ("valid", "offsets")),
    ),
)
_ROW_BYTES = 4 * 1024
"""Bytes allowed for texts, numbers and list offsets of a row."""
_HEADER_BYTES = 16 * 1024
"""Bytes allowed for the header and the counts of a file."""


@dataclass(frozen=True)
class Rollout:
    """One row: a prompt, the policy's output, and the worker's claims.

    The output has the policy's tokens alone. What stands between its turns is the validator's to
    say (`verify.formats.turns`).
    """

    run: str
    step: int
    worker: str
    lease: str
    """Digest of the signed lease."""
    problem_id: str
    group: int
    sample: int
    version: int
    """Policy version that the lease names."""
    prompt_tokens: np.ndarray
    """i32 [P]."""
    output_tokens: np.ndarray
    """i32 [n], of all turns, the end tokens included."""
    logprobs: np.ndarray
    """f32 [n]: log_softmax(logits / T) after top-k / top-p, before noise."""
    finish_reason: str
    """Of the last turn: `stop` (the end token) or `length`."""
    temperature: float
    top_p: float
    top_k: int
    target: int | None
    task_reward: float
    length_penalty: float
    proofs: list[bytes]
    """TOPLOC proofs, one for each 32 output tokens begun."""
    versions: np.ndarray | None = None
    """i32 [n]: the policy version that sampled each token, only in pools with `in_flight_updates`.
    In other pools every token is of `version`."""
    turns: np.ndarray | None = None
    """i32: tokens of each turn, which add up to n; None if the task has one turn."""

    @property
    def oldest_version(self) -> int:
        """Oldest version of a token; the lag counts from it."""
        return self.version if self.versions is None else int(self.versions.min())

    @property
    def is_of_its_version(self) -> bool:
        """Whether `version` sampled all tokens, so that a prefill can reproduce them."""
        return self.versions is None or bool((self.versions == self.version).all())


@dataclass(frozen=True)
class SubmissionEnvelope:
    """The signed statement that goes with the table."""

    __pydantic_config__ = STRICT

    run: str
    step: Natural
    worker: str
    index: Natural
    lease: Digest
    digest: Digest
    """BLAKE3 of the table's bytes, which names the submission."""
    bytes: Natural


_CODEC = TypeAdapter(SubmissionEnvelope)


def encode_rollouts(rollouts: list[Rollout]) -> bytes:
    """Return the bytes of a submission's table.

    Raises:
        ValueError: a proof has a wrong length.
    """
    names = [column.name for column in SCHEMA.columns]
    return encode_table({name: [getattr(r, name) for r in rollouts] for name in names}, SCHEMA)


def decode_rollouts(data: bytes, *, max_rows: int, max_bytes: int) -> list[Rollout]:
    """Read an untrusted submission's table; arrays of the rows are read-only views of `data`.

    Raises:
        MalformedTable: `data` is not a table of this format within the limits.
    """
    columns = decode_table(data, SCHEMA, max_rows=max_rows, max_bytes=max_bytes)
    return [Rollout(*row) for row in zip(*columns.values(), strict=True)]


def sign_submission(
    data: bytes, *, run: str, step: int, index: int, lease: str, key: SigningKey
) -> bytes:
    """Return the signed envelope of a submission's table."""
    digest, size = digest_bytes(data), len(data)
    envelope = SubmissionEnvelope(run, step, key.public_hex, index, lease, digest, size)
    return sign_document(KIND, asdict(envelope), key)


def open_submission(data: bytes) -> SubmissionEnvelope:
    """Check an envelope and return it: its worker must have signed it, with valid fields.

    The coordinator checks whether that worker holds the lease. The reader of the table checks
    whether its bytes match `digest`.

    Raises:
        BadSignature: the envelope is not valid.
    """
    envelope, key = open_payload(_CODEC, data, kind=KIND, keys=None, max_bytes=MAX_ENVELOPE_BYTES)
    if envelope.worker != key:
        raise BadSignature("submission: signed by another key than its worker's")
    return envelope


def max_submission_rows(spec: RunSpec, pool: SamplerPool) -> int:
    """Return the rows of the largest submission from `pool`."""
    return min(pool.groups_per_submission, spec.grpo.prompts_per_step) * (spec.grpo.group_size)


def max_submission_bytes(spec: RunSpec, pool: SamplerPool) -> int:
    """Return the bytes of the largest submission from `pool`.

    A row holds less than `max_model_len` prompt tokens as i32, and at most `max_new_tokens` of i32
    token, f32 log-prob, i32 length of a turn, i32 version (in a pool with `in_flight_updates`) and
    their share of a proof.
    """
    return _bytes_of(max_submission_rows(spec, pool), pool.max_model_len, pool)


def largest_submission_bytes(spec: RunSpec) -> int:
    """Return the bytes of the largest submission from any pool."""
    return max(max_submission_bytes(spec, pool) for pool in spec.samplers)


def largest_accepted_bytes(spec: RunSpec) -> int:
    """Return the bytes of the largest submission that the run may hold.

    A restart may have changed `groups_per_submission` and `max_model_len` since a submission was
    judged. No submission has more groups than a step, and no prompt is longer than the model's
    context.
    """
    rows = spec.grpo.prompts_per_step * spec.grpo.group_size
    context = spec.model.max_context
    return max(_bytes_of(rows, max(context, p.max_model_len), p) for p in spec.samplers)


def _bytes_of(rows: int, longest_prompt: int, pool: SamplerPool) -> int:
    proofs = (pool.max_new_tokens // CHUNK_ROWS + 1) * PROOF_BYTES
    token = 16 if pool.in_flight_updates else 12
    row = _ROW_BYTES + 4 * longest_prompt + token * pool.max_new_tokens + proofs
    return _HEADER_BYTES + rows * row
