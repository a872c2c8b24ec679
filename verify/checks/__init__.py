"""The checks of a submission, cheap ones first; each is one function (`verify.checks.base`)."""

from runspec.core.schema import SamplerPool
from verify.checks import prefill, rows
from verify.checks.base import Check
from verify.checks.rows import duplicates

ROW_CHECKS: list[Check] = [
    rows.assignment,
    rows.bounds,
    rows.versions,
    rows.termination,
    rows.proof_format,
]
"""Checks that need the rows alone."""
GRADE_CHECKS: list[Check] = [rows.reward]
"""Checks that need the validator's grades."""
DUPLICATE_CHECKS: list[Check] = [duplicates]
"""Checks that need the rows' fingerprints, and so their log-probs."""


def prefill_checks(pool: SamplerPool) -> list[Check]:
    """Return the checks that need the prefill."""
    seeded = [prefill.seeded_sampling, prefill.seeded_sampling_submission]
    unseeded = [
        prefill.kept_tokens,
        prefill.ends_submission,
        prefill.ends,
        prefill.chosen_tokens_submission,
        prefill.chosen_tokens,
    ]
    tokens = seeded if pool.sampling.seeded else unseeded
    return [prefill.logprobs_submission, prefill.logprobs, *tokens, prefill.toploc]
