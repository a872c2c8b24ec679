"""How large an honest submission can be: what the spec says of a pool, as bytes and rows."""

from __future__ import annotations

from runspec.core.spec.schema import RunSpec, SamplerPool
from verify.toploc import CHUNK_ROWS, PROOF_BYTES

_ROW_BYTES = 4 * 1024
"""Texts, numbers and list offsets of a row, generously."""
_HEADER_BYTES = 16 * 1024
"""The header and the counts of a file, generously."""


def max_submission_rows(spec: RunSpec, pool: SamplerPool) -> int:
    return min(pool.groups_per_submission, spec.algorithm.prompts_per_step) * (
        spec.algorithm.group_size
    )


def max_submission_bytes(spec: RunSpec, pool: SamplerPool) -> int:
    """Bound of the bytes of a submission from `pool`.

    A row holds less than `max_model_len` prompt tokens as i32, and at most `max_new_tokens` of i32
    token, f32 log-prob, i32 version (in a pool with `in_flight_updates`) and their share of a
    proof.
    """
    return _bytes_of(max_submission_rows(spec, pool), pool.max_model_len, pool)


def largest_submission_bytes(spec: RunSpec) -> int:
    """The bound over all pools."""
    return max(max_submission_bytes(spec, pool) for pool in spec.samplers)


def largest_accepted_bytes(spec: RunSpec) -> int:
    """The bound of what lies in the run, whatever `groups_per_submission` and `max_model_len` were
    when it was judged: a restart may have changed both.

    No submission has more groups than a step, and no prompt is longer than the model's context.
    """
    rows = spec.algorithm.prompts_per_step * spec.algorithm.group_size
    context = spec.model.max_context
    return max(_bytes_of(rows, max(context, p.max_model_len), p) for p in spec.samplers)


def _bytes_of(rows: int, longest_prompt: int, pool: SamplerPool) -> int:
    prompt = 4 * longest_prompt
    proofs = (pool.max_new_tokens // CHUNK_ROWS + 1) * PROOF_BYTES
    token = 12 if pool.in_flight_updates else 8
    row = _ROW_BYTES + prompt + token * pool.max_new_tokens + proofs
    return _HEADER_BYTES + rows * row
