"""The checks of a submission, cheap ones first, behind one interface (`verify.checks.base`)."""

from runspec.core.spec.schema import SamplerPool
from verify.checks import distribution, prefill, rows
from verify.checks.base import Check
from verify.checks.duplicates import DuplicateCheck

ROW_CHECKS: list[Check] = [
    rows.AssignmentCheck(),
    rows.BOUNDS,
    rows.VERSIONS,
    rows.TERMINATION,
    rows.PROOF_FORMAT,
]
"""Checks that need the rows alone."""
GRADE_CHECKS: list[Check] = [rows.RewardCheck()]
"""Checks that need the validator's grades."""
DUPLICATE_CHECKS: list[Check] = [DuplicateCheck()]
"""Checks that need the rows' fingerprints, and so their log-probs."""
_SEEDED: list[Check] = [prefill.SeededSamplingCheck(), prefill.SubmissionSamplingCheck()]
_UNSEEDED: list[Check] = [
    distribution.KeptTokensCheck(),
    distribution.ENDS_SUBMISSION,
    distribution.ENDS,
    distribution.CHOSEN_TOKENS_SUBMISSION,
    distribution.CHOSEN_TOKENS,
]


def prefill_checks(pool: SamplerPool) -> list[Check]:
    """Return the checks that need the prefill."""
    tokens = _SEEDED if pool.sampling.seeded else _UNSEEDED
    logprobs: list[Check] = [prefill.SubmissionLogprobCheck(), prefill.RolloutLogprobCheck()]
    return [*logprobs, *tokens, prefill.ProofCheck()]
