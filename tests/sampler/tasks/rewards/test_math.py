"""What counts as the answer, and which answers are equal."""

from __future__ import annotations

from typing import Any

import pytest

from sampler.grading.answers import Answer, Result
from sampler.grading.graders import Graders
from sampler.tasks.interfaces import Score
from sampler.tasks.rewards.math import MAX_EXPRESSION_CHARS, truths_of
from verify.plugins import GraderFault, Problem

pytestmark = pytest.mark.slow

RIGHT = [
    ("18", "18"),
    ("18", "The answer is 18."),
    ("18", "She has 3 hens.\n**Answer:** $18$"),
    ("18", r"First \boxed{17}, no: \boxed{18}."),
    ("18", "18 dollars"),
    ("18", "$18"),
    ("18", r"\boxed{\$18}"),
    ("18", r"\boxed{18 \text{ dollars}}"),
    ("18", "She makes $18 every day.\n#### 18"),
    ("9 * 2 = <<9*2=18>>18 dollars.\n#### 18", "18"),
    ("#### 1,234", "1234"),
    ("1234", "1,234"),
    ("1234", r"\boxed{1{,}234}"),
    ("-3", r"\boxed{-3}"),
    (18, "18"),
    (0.5, r"\boxed{\frac12}"),
    ("1/2", "0.5"),
    (r"\frac{3}{4}", "3/4"),
    (r"\frac{1}{2}", r"\boxed{0.5}"),
    ("1/3", r"\boxed{0.333333}"),
    (r"50\%", r"\boxed{0.5}"),
    ("50%", "50"),
    ("5", "5 km"),
    ("90", r"\boxed{90^\circ}"),
    ("5", "x = 5"),
    ("x=5", r"\boxed{5}"),
    (r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{1}{\sqrt{2}}}"),
    ("x^2+2x+1", r"\boxed{(x+1)^2}"),
    (r"2\pi", r"\boxed{2\pi}"),
    ("[0,1)", r"\boxed{[0, 1)}"),
    (r"(-\infty, 2]", r"\boxed{(-\infty,2]}"),
    (r"\{1,2\}", r"\boxed{\{2,1\}}"),
    ("1, 2", r"\boxed{1} and \boxed{2}"),
    ("(1,2)", r"\boxed{(1, 2)}"),
    (r"\text{Monday}", r"\boxed{\text{Monday}}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}"),
    ("1000000", r"\boxed{10^6}"),
    ("10^{10^{10}}", r"\boxed{10^{10^{10}}}"),
    (["3", "7"], r"\boxed{7}"),
    (r"\boxed{7}", "7"),
    ("3/2", r"\boxed{1\frac{1}{2}}"),
    ("3/2", "1 1/2"),
    (r"1\frac{1}{2}", "1.5"),
    ("-3/2", r"\boxed{-1\frac12}"),
    (r"1\frac{1}{2}", "1 1/2"),
    ("1500", "1.5e3"),
    ("1.5e-3", r"\boxed{0.0015}"),
    ("30", r"\boxed{30°}"),
    ("Yes", "yes."),
    ("Yes", r"\boxed{\text{yes}}"),
    ("even", r"\boxed{\text{even}}"),
    (r"\text{Evelyn}", r"\boxed{Evelyn}"),
    (r"\text{No solution}", r"\boxed{no solution}"),
    (r"\textbf{(A)}", r"\boxed{A}"),
]
WRONG = [
    ("18", "19"),
    ("18", "180"),
    ("18", "-18"),
    ("18", "1.8"),
    ("18", "0.18"),
    ("18", "18000"),
    ("18000", "18"),
    ("18", r"\boxed{17, 18}"),
    ("18", r"\boxed{18 \text{ or } 19}"),
    ("18", r"\boxed{18} \boxed{19}"),
    ("18", "#### 19\nor 18, who knows #### "),
    ("18", ""),
    ("18", r"\boxed{}"),
    ("18", "no idea"),
    ("18", r"\boxed{x}"),
    ("[0,1)", r"\boxed{[0,1]}"),
    ("(1,2)", r"\boxed{(2,1)}"),
    (r"\pi", r"\boxed{3.14}"),
    (["3", "7"], r"\boxed{5}"),
    ("11/2", r"\boxed{1\frac{1}{2}}"),
    ("11/2", "1 1/2"),
    (r"1\frac{1}{2}", "11/2"),
    ("12", r"\boxed{1 2}"),
    ("1500", "1.5e4"),
    ("yes", r"\boxed{no}"),
    ("yes", r"\boxed{\text{yes and no}}"),
    ("1", "1e999999999"),
    ("nan", r"\boxed{nan} \boxed{1}"),
]
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


def test_right_answers_in_every_form_earn_1(graders: Graders) -> None:
    results = grade(graders, RIGHT)
    missed = [p for p, r in zip(RIGHT, results, strict=True) if r != Score(1.0)]
    assert missed == []


def test_wrong_answers_and_hedges_earn_0_with_the_reason(graders: Graders) -> None:
    results = grade(graders, WRONG)
    assert [p for p, r in zip(WRONG, results, strict=True) if getattr(r, "value", 1) != 0] == []
    assert all(isinstance(r, Score) and r.reason for r in results)


def test_hostile_answers_end_with_0_and_a_reason_and_harm_no_other(graders: Graders) -> None:
    texts = [("18", text) for text in HOSTILE.values()]
    results = grade(graders, [*texts, *RIGHT])
    verdicts = dict(zip(HOSTILE, results, strict=False))
    assert {name: getattr(r, "value", r) for name, r in verdicts.items()} == dict.fromkeys(
        HOSTILE, 0.0
    )
    assert all(isinstance(r, Score) and r.reason for r in verdicts.values())
    assert results[len(HOSTILE) :] == [Score(1.0)] * len(RIGHT)


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
