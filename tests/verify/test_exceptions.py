"""Rounding has tails: what a few tokens may be off by, and activations that a constant fits."""

from __future__ import annotations

import numpy as np
import pytest

from verify.checks.base import few_exceptions
from verify.checks.prefill import judge_proofs
from verify.formats.verdict import CheckResult
from verify.thresholds import BFLOAT16, Limits
from verify.toploc.codec import build_proofs
from verify.toploc.field import PRIME
from verify.toploc.statistics import verify_proofs


def judged(limits: Limits, tokens: int, *gaps: float) -> CheckResult:
    values = np.zeros(tokens, np.float32)
    values[: len(gaps)] = gaps
    return few_exceptions("gaps", values, limits, largest="token {token}", over="above")


@pytest.mark.parametrize(
    ("tokens", "gaps", "passes"),
    [
        (50, (0.09,), True),
        (50, (0.25,), True),  # one, too short a rollout for a share
        (50, (0.25, 0.11), False),
        (50, (0.31,), False),
        (250, (1.9, 1.9), True),  # 1 % of 250
        (250, (1.9, 0.11, 0.11), False),
        (250, (2.1,), False),
        (250, (float("nan"),), False),
        (50, (float("inf"),), False),
    ],
)
def test_few_tokens_in_bfloat16_may_be_off_by_more_than_rounding(
    tokens: int, gaps: tuple[float, ...], passes: bool
) -> None:
    assert judged(BFLOAT16, tokens, *gaps).passed == passes


def test_one_token_repeated_without_end_is_honest() -> None:
    # given 32 states that are alike, whose largest values lie within three units in the last
    # place, and the same a unit off here and there, as rounding does
    rng = np.random.default_rng(0)
    row = rng.integers(0x3E00, 0x3F00, 128).astype(np.uint16)
    row[:4] = np.arange(0x4080, 0x4084)
    states = np.tile(row, (32, 1))
    rounded = states + rng.integers(-1, 2, states.shape).astype(np.uint16)
    # when the proofs of the one are held against the other
    found = verify_proofs(rounded, build_proofs(states))
    # then a constant fits as well, and honest proofs pass
    assert found[0].error_median > BFLOAT16.constant_ratio * found[0].constant_error
    assert all(result.passed for result in judge_proofs(found, BFLOAT16))
    # and a constant's proof does not, for its polynomial
    forged = np.array([PRIME, int(row.max())] + [0] * 127, ">u2").tobytes()
    failed = [r for r in judge_proofs(verify_proofs(rounded, [forged]), BFLOAT16) if not r.passed]
    assert any("missing leading terms" in result.reason for result in failed)
