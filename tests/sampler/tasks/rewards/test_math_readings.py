"""How an answer that is right may be written: lists in words, repeating decimals, a letter in a
sentence; and what is nearly so is wrong."""

from __future__ import annotations

import pytest

from sampler.grading.answers import Answer
from sampler.grading.graders import Graders
from sampler.tasks.interfaces import Score
from verify.plugins import Problem

pytestmark = pytest.mark.slow

RIGHT = {
    "lists in words": [
        ("1, 2", "1 and 2"),
        ("1, 2", "2 and 1."),
        ("1, 2", r"\boxed{1 and 2}"),
        ("1, 2", r"\boxed{1 \text{ and } 2}"),
        ("1, 2", "$1$ and $2$"),
        ("1 and 2", "1, 2"),
        ("1, 2, 3", "1, 2 and 3"),
        ("1, 2, 3", "1, 2, and 3"),
        ("x=1, x=2", "x=1 and x=2"),
    ],
    "repeating decimals": [
        ("1/3", r"0.\overline{3}"),
        ("1/3", r"\boxed{0.\overline{3}}"),
        ("1/3", r"The answer is $0.\overline{3}$."),
        ("1/3", r"0.\bar3"),
        (r"0.\overline{3}", r"\frac{1}{3}"),
        ("-1/6", r"-0.1\overline{6}"),
        ("1/7", r"0.\overline{142857}"),
        ("3704/3", r"1,234.\overline{6}"),
        ("1", r"0.\overline{9}"),
        ("1/3, 2/3", r"0.\overline{6}, 0.\overline{3}"),
    ],
    "letters and words in a sentence": [
        ("B", "The answer is B."),
        ("B", "The answer is **B**."),
        ("(B)", "So the correct option is B"),
        (r"\textbf{(B)}", "A is 4.\nThe answer is (B)."),
        ("B", r"the answer is $\textbf{(B)}$."),
        ("B", "A is 4, B is 5.\n**Answer:** B"),
        ("B, C", "B and C"),
        (r"\text{Monday}", "The answer is Monday."),
    ],
}
WRONG = {
    "lists in words": [
        ("1, 2", "1 and 3"),
        ("1, 2", "1"),
        ("1, 2", "2"),
        ("2", "1 and 2"),
        ("2", "1 and 2."),
        ("2", "1 or 2."),
        ("1, 2", "1, 2 and 3"),
        ("1, 2, 3", "1 and 2"),
        ("12", "1 and 2"),
        ("3", "1 and 2"),
    ],
    "repeating decimals": [
        ("1/3", "0.3"),
        ("1/3", "0.33"),
        ("0.3", r"0.\overline{3}"),
        ("0", r"0.\overline{3}"),
        ("0", r"The answer is $0.\overline{3}$."),
        ("3", r"0.\overline{3}"),
        ("1/3", r"\overline{3}"),
        ("1/3", r"0.0\overline{3}"),
        ("1/3", r"0.\overline{33}4"),
    ],
    "letters and words in a sentence": [
        ("B", "The answer is B or C."),
        ("C", "The answer is B or C."),
        ("B", "The answer is B and C."),
        ("B", "The answer is B, C."),
        ("B", "The answer is B/C."),
        ("B", "The answer is (B)(C)."),
        ("B", "The answer is C."),
        ("B", "The answer is not B."),
        ("B", "The answer isn't B."),
        ("B", "Either the answer is A or the answer is B."),
        ("B", "The answer is B.\nNo, the answer is C."),
        ("B", "The answer is B\nor C."),
        ("A", "The answer is a mess."),
        ("2", "There are 2 ways. The answer is no."),
    ],
}


def values(graders: Graders, pairs: list[tuple[str, str]]) -> list[float]:
    """T of each answer, by its truth."""
    results = graders.score(
        [Answer(Problem("p", "math", "", {"ground_truth": t}), answer) for t, answer in pairs]
    )
    assert all(isinstance(result, Score) for result in results)
    return [result.value for result in results if isinstance(result, Score)]


@pytest.mark.parametrize("form", RIGHT)
def test_a_right_answer_in_another_form_earns_1(graders: Graders, form: str) -> None:
    given = zip(RIGHT[form], values(graders, RIGHT[form]), strict=True)
    assert [pair for pair, value in given if value != 1.0] == []


@pytest.mark.parametrize("form", WRONG)
def test_an_answer_that_is_nearly_so_or_hedges_earns_0(graders: Graders, form: str) -> None:
    given = zip(WRONG[form], values(graders, WRONG[form]), strict=True)
    assert [pair for pair, value in given if value != 0.0] == []
