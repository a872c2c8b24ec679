"""Every check of a submission, cheap ones first, behind one interface."""

from runspec.spec.schema import SamplerPool
from verify.checks.assignment import AssignmentCheck
from verify.checks.base import Check, Examination, Subject, examine
from verify.checks.intake import Rejected, open_rows
from verify.checks.prefill import (
    ProofCheck,
    RolloutLogprobCheck,
    SeededSamplingCheck,
    SubmissionLogprobCheck,
    SubmissionSamplingCheck,
    logprob_diff,
    several_versions,
)
from verify.checks.rewards import RewardCheck
from verify.checks.values import BoundsCheck, ProofFormatCheck, TerminationCheck, VersionsCheck

__all__ = [
    "GRADE_CHECKS",
    "ROW_CHECKS",
    "Check",
    "Examination",
    "Rejected",
    "Subject",
    "examine",
    "logprob_diff",
    "open_rows",
    "prefill_checks",
    "several_versions",
]

ROW_CHECKS: list[Check] = [
    AssignmentCheck(),
    BoundsCheck(),
    VersionsCheck(),
    TerminationCheck(),
    ProofFormatCheck(),
]
"""What the rows alone must satisfy."""
GRADE_CHECKS: list[Check] = [RewardCheck()]
"""What needs the validator's grades."""


def prefill_checks(pool: SamplerPool) -> list[Check]:
    """What needs the prefill."""
    seeded: list[Check] = [SeededSamplingCheck(), SubmissionSamplingCheck()]
    return [
        SubmissionLogprobCheck(),
        RolloutLogprobCheck(),
        *(seeded if pool.sampling.seeded else []),
        ProofCheck(),
    ]
