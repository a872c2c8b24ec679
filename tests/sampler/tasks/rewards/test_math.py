"""What counts as the answer, and which answers are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sampler.tasks.grading.answers import Answer, Result
from sampler.tasks.grading.graders import Graders
from sampler.tasks.interfaces import Score
from sampler.tasks.rewards.math import MAX_EXPRESSION_CHARS, truths_of
from verify.plugins import GraderFault, Problem

pytestmark = pytest.mark.slow

PAIRS = yaml.safe_load(Path(__file__).with_name("math_answers.yaml").read_text())
"""Right and wrong (truth, answer), by the form of the answer."""
HOSTILE = {
    "a power tower": "9^9^9^9",
    "a boxed power tower": r"\boxed{9^{9^{9^9}}}",
    "a power tower in parentheses": r"\boxed{(((9^9)^9)^9)^{99999}}",
    "a factorial": r"\boxed{(10^9)!}",
    "a factorial tower": r"\boxed{9!!!!}",
    "open braces": r"\boxed{" * 500,
    "nested parentheses": r"\boxed{" + "(" * 400 + "1" + ")" * 400 + "}",
    "many digits": "1" * 100_000,
    "a long formula": r"\boxed{" + "1+" * 20_000 + "1}",
    "code": r"\boxed{__import__('os').system('touch /tmp/was-here')}",
    "code in an expression": "().__class__.__bases__[0].__subclasses__()",
    "a dot product of nothing": r"\boxed{\int_{0}^{\infty} e^{e^{e^{x}}} dx}",
}


def grade(graders: Graders, pairs: list[tuple[Any, str]]) -> list[Result]:
    return graders.score(
        [
            Answer(Problem(f"p{i}", "math", "", {"ground_truth": truth}), answer)
            for i, (truth, answer) in enumerate(pairs)
        ]
    )


@pytest.mark.parametrize("form", PAIRS["right"])
def test_a_right_answer_in_any_form_earns_1(graders: Graders, form: str) -> None:
    pairs = PAIRS["right"][form]
    missed = [p for p, r in zip(pairs, grade(graders, pairs), strict=True) if r != Score(1.0)]
    assert missed == []


@pytest.mark.parametrize("form", PAIRS["wrong"])
def test_a_wrong_answer_that_is_nearly_right_or_hedges_earns_0_with_the_reason(
    graders: Graders, form: str
) -> None:
    pairs = PAIRS["wrong"][form]
    results = grade(graders, pairs)
    assert [p for p, r in zip(pairs, results, strict=True) if getattr(r, "value", 1) != 0] == []
    assert all(isinstance(r, Score) and r.reason for r in results)


def test_hostile_answers_end_with_0_and_a_reason_and_harm_no_other(graders: Graders) -> None:
    texts = [("18", text) for text in HOSTILE.values()]
    [right, *_] = PAIRS["right"].values()
    results = grade(graders, [*texts, *right])
    verdicts = dict(zip(HOSTILE, results, strict=False))
    assert {name: getattr(r, "value", r) for name, r in verdicts.items()} == dict.fromkeys(
        HOSTILE, 0.0
    )
    assert all(isinstance(r, Score) and r.reason for r in verdicts.values())
    assert results[len(HOSTILE) :] == [Score(1.0)] * len(right)


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({}, "verification_info has no ground_truth"),
        ({"ground_truth": None}, "verification_info.ground_truth is NoneType"),
        ({"ground_truth": []}, "verification_info.ground_truth has 0 truths"),
        ({"ground_truth": [["1"]]}, "verification_info.ground_truth is list"),
        ({"ground_truth": ""}, "verification_info.ground_truth has 0 characters"),
        ({"ground_truth": "1" * 5000}, "verification_info.ground_truth has 5000 characters"),
        ({"ground_truth": True}, "verification_info.ground_truth is bool"),
        ({"ground_truth": float("nan")}, "verification_info.ground_truth is nan"),
    ],
)
def test_a_malformed_truth_is_a_fault_that_names_the_field(
    graders: Graders, info: dict[str, Any], says: str
) -> None:
    (result,) = graders.score([Answer(Problem("p", "math", "", info), "1")])
    assert isinstance(result, GraderFault)
    assert says in str(result)


def test_a_boxed_answer_over_the_limit_is_not_read(graders: Graders) -> None:
    formula = "0+" * MAX_EXPRESSION_CHARS + "18"
    ((result),) = grade(graders, [("18", rf"\boxed{{{formula}}}")])
    assert isinstance(result, Score) and result.value == 0.0
    assert "is not read" in result.reason


def test_the_key_answer_is_read_too() -> None:
    assert truths_of({"answer": "so\n#### 5"}) == ["5"]
