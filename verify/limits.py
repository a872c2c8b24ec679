"""How large an honest submission can be: what the spec says of a pool, as bytes and rows."""

from __future__ import annotations

from runspec.spec.schema import RunSpec, SamplerPool

_PROOF_BYTES = 258
_TOKENS_PER_PROOF = 32
_ROW_BYTES = 4 * 1024
"""Names, numbers and list offsets of a row, generously."""
_FILE_BYTES = 256 * 1024
"""Parquet's own: footer, page headers, dictionaries."""


def max_submission_rows(spec: RunSpec, pool: SamplerPool) -> int:
    return min(pool.groups_per_submission, spec.algorithm.prompts_per_step) * (
        spec.algorithm.group_size
    )


def max_submission_bytes(spec: RunSpec, pool: SamplerPool) -> int:
    """Bound of the Parquet bytes and of the decoded columns of a submission from `pool`.

    A row holds less than `max_model_len` prompt tokens as i32, and at most `max_new_tokens` of i32
    token, f32 log-prob, i32 version (in a pool with `in_flight_updates`) and their share of a
    proof.
    """
    prompt = 4 * pool.max_model_len
    proofs = (pool.max_new_tokens // _TOKENS_PER_PROOF + 1) * (_PROOF_BYTES + 16)
    token = 12 if pool.in_flight_updates else 8
    row = _ROW_BYTES + prompt + token * pool.max_new_tokens + proofs
    # Dictionary pages may repeat what plain pages hold: twice the columns bounds both.
    return _FILE_BYTES + 2 * max_submission_rows(spec, pool) * row


def largest_submission_bytes(spec: RunSpec) -> int:
    """The bound over all pools."""
    return max(max_submission_bytes(spec, pool) for pool in spec.samplers)
