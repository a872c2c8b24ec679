"""A part of GSM8K and HumanEval: what is right earns 1, what is nearly right or wrong earns 0.

`tests/campaigns/sampler.py` grades all of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from sampler.tasks.grading.graders import Graders
from tests.campaigns.sampler import (
    COMPLETIONS,
    NEAR_MISSES,
    RIGHT,
    make_graders,
    maths,
    programming_problems,
    programs,
    worked_solutions,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gsm8k() -> list[str]:
    if not (worked := worked_solutions()):
        pytest.skip("no files of GSM8K")
    assert len(worked) == 8792
    return worked[::60]


@pytest.fixture(scope="module")
def human_eval() -> list[dict[str, Any]]:
    if not (rows := programming_problems()):
        pytest.skip("no file of HumanEval")
    assert len(rows) == 164
    return rows[::12]


@pytest.fixture(scope="module")
def graders() -> Iterator[Graders]:
    with closing(make_graders()) as made:
        yield made


@pytest.mark.parametrize("form", RIGHT)
def test_gold_answers_of_gsm8k_earn_1(graders: Graders, gsm8k: list[str], form: str) -> None:
    rewards = maths(graders, gsm8k, RIGHT[form])
    assert [w[-40:] for w, r in zip(gsm8k, rewards, strict=True) if r != 1.0] == []


@pytest.mark.parametrize("miss", NEAR_MISSES)
def test_near_misses_of_gsm8k_earn_0(graders: Graders, gsm8k: list[str], miss: str) -> None:
    rewards = maths(graders, gsm8k, NEAR_MISSES[miss])
    assert [w[-40:] for w, r in zip(gsm8k, rewards, strict=True) if r != 0.0] == []


@pytest.mark.parametrize("form", COMPLETIONS)
def test_reference_solutions_of_humaneval_pass(
    graders: Graders, human_eval: list[dict[str, Any]], form: str
) -> None:
    assert set(programs(graders, human_eval, COMPLETIONS[form])) == {1.0}


def test_a_wrong_body_fails_problems_of_humaneval(
    graders: Graders, human_eval: list[dict[str, Any]]
) -> None:
    assert set(programs(graders, human_eval, lambda row: "    return None\n")) == {0.0}
