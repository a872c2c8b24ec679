"""Every check of a submission, cheap ones first, behind one interface."""

from runspec.core.spec.schema import SamplerPool
from verify.checks.base import Check, Examination, Subject, examine
from verify.checks.distribution import (
    CHOSEN_TOKENS,
    CHOSEN_TOKENS_SUBMISSION,
    ENDS,
    ENDS_SUBMISSION,
    KeptTokensCheck,
)
from verify.checks.duplicates import DuplicateCheck, fingerprints
from verify.checks.prefill import (
    ProofCheck,
    RolloutLogprobCheck,
    SeededSamplingCheck,
    SubmissionLogprobCheck,
    SubmissionSamplingCheck,
    logprob_diff,
    several_versions,
)
from verify.checks.rows import (
    BOUNDS,
    PROOF_FORMAT,
    TERMINATION,
    VERSIONS,
    AssignmentCheck,
    Rejected,
    RewardCheck,
    open_rows,
)

__all__ = [
    "DUPLICATE_CHECKS",
    "GRADE_CHECKS",
    "ROW_CHECKS",
    "Check",
    "Examination",
    "Rejected",
    "Subject",
    "examine",
    "fingerprints",
    "logprob_diff",
    "open_rows",
    "prefill_checks",
    "several_versions",
]

ROW_CHECKS: list[Check] = [AssignmentCheck(), BOUNDS, VERSIONS, TERMINATION, PROOF_FORMAT]
"""Checks that need the rows alone."""
GRADE_CHECKS: list[Check] = [RewardCheck()]
"""Checks that need the validator's grades."""
DUPLICATE_CHECKS: list[Check] = [DuplicateCheck()]
"""Checks that need the rows' fingerprints, and so their log-probs."""


def prefill_checks(pool: SamplerPool) -> list[Check]:
    """Return the checks that need the prefill."""
    seeded: list[Check] = [SeededSamplingCheck(), SubmissionSamplingCheck()]
    unseeded: list[Check] = [
        KeptTokensCheck(),
        ENDS_SUBMISSION,
        ENDS,
        CHOSEN_TOKENS_SUBMISSION,
        CHOSEN_TOKENS,
    ]
    return [
        SubmissionLogprobCheck(),
        RolloutLogprobCheck(),
        *(seeded if pool.sampling.seeded else unseeded),
        ProofCheck(),
    ]
