"""Grades of mathematics: the same value in any notation earns 1, any other value 0."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sampler.tasks.rewards.math import MathReward, truths_of
from verify.plugins import Problem

PAIRS = yaml.safe_load(Path(__file__).with_name("math_answers.yaml").read_text())
"""Right and wrong (truth, answer), by the form of the answer."""
REWARD = MathReward.__new__(MathReward)
TINY = Fraction(1, 10**24)
CHANGES: dict[str, Callable[[Fraction], Fraction]] = {
    "one more": lambda x: x + 1,
    "another sign": lambda x: -x,
    "ten times": lambda x: x * 10,
    "upside down": lambda x: 1 / x,
    "a little more": lambda x: x * (1 + TINY),
    "a little less": lambda x: x - TINY,
    "squared": lambda x: x * x,
}
"""Values that are nearly the right one."""
TRUTHS: dict[str, Callable[[int, int], str]] = {
    "LaTeX": lambda a, b: rf"\frac{{{a}}}{{{b}}}",
    "plain": lambda a, b: f"{a}/{b}",
    "a percentage": lambda a, b: rf"{Fraction(100 * a, b)}\%",
    "a power": lambda a, b: rf"{a} \cdot {b}^{{-1}}",
}
REWRITES: dict[str, Callable[[int, int], str]] = {
    **TRUTHS,
    "expanded": lambda a, b: rf"\dfrac{{{7 * a}}}{{{7 * b}}}",
    "Unicode": lambda a, b: f"{a}⁄{b}".replace("-", "\u2212"),
    "a product": lambda a, b: f"{a}·{b}⁻¹",
    "a root": lambda a, b: f"{a}/√{{{b * b}}}",
    "Python": lambda a, b: f"({a})/({b}**1)",
    "a mixed number": lambda a, b: (
        f"{'-' * (a < 0)}{abs(a) // b} {abs(a) % b}/{b}" if abs(a) > b and a % b else f"{a}/{b}"
    ),
    "a decimal times a power of ten": lambda a, b: rf"\frac{{{a * 1000}}}{{{b}}}\times 10^{{-3}}",
    "an equation": lambda a, b: f"x = {a}/{b}",
    "a sum": lambda a, b: rf"\frac{{{a - b}}}{{{b}}} + 1",
}
SENTENCES = (
    "{}", r"So it is \boxed{{{}}}.", "The answer is **{}**.", "Hence we get ${}$.", "#### {}",
)  # fmt: skip


def grade(truth: Any, answer: str, asked: str = "") -> float:
    score = REWARD.score(Problem("p", "math", asked, {"ground_truth": truth}), answer)
    assert score.value == 1 or score.reason
    return score.value


@pytest.mark.parametrize(
    ("wanted", "form"), [(side, form) for side in ("right", "wrong") for form in PAIRS[side]]
)
def test_an_answer_in_any_form_earns_what_it_is_worth(wanted: str, form: str) -> None:
    pairs = PAIRS[wanted][form]
    assert [p for p in pairs if grade(*p) != (wanted == "right")] == []


def written(seed: int) -> tuple[float, str, str]:
    """A grade, a truth, and an answer of the same value or of a changed one, both in any form."""
    draw = random.Random(seed)
    value = Fraction(draw.randint(-400, 400) or 3, draw.randint(1, 60))
    wanted = draw.random() < 0.5
    changed = value if wanted else CHANGES[draw.choice([*CHANGES])](value)
    truth = TRUTHS[draw.choice([*TRUTHS])](value.numerator, value.denominator)
    answer = REWRITES[draw.choice([*REWRITES])](changed.numerator, changed.denominator)
    # A percentage may stand for its share: then both of these are right.
    right = changed in (value, value * 100 if "%" in truth else value)
    if "%" in answer:
        right = right or changed * 100 == (value if "%" not in truth else value * 100)
    return float(right), truth, draw.choice(SENTENCES).format(answer)


@settings(derandomize=True)
@given(st.integers(0, 1 << 32))
def test_a_rewritten_value_keeps_its_grade_and_a_changed_one_loses_it(seed: int) -> None:
    wanted, truth, answer = written(seed)
    assert grade(truth, answer) == wanted, (truth, answer)


@settings(derandomize=True)
@given(st.text(st.characters() | st.sampled_from(r"0123456789\\{}()[]|^_+-*/=,.%$!"), max_size=80))
def test_any_text_is_graded_without_a_fault_and_equals_itself(text: str) -> None:
    assert grade("18", rf"\boxed{{{text}}}") in (0.0, 1.0)
    assert grade("18", text) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("asked", "truth", "answers"),
    [
        ("What is 8 + 30?", 38, ["8 + 30", "To find 8 + 30, add them.", "x = 30 + 8", "8+30+0"]),
        ("What is 8 + 30?", "38", ["8 + 30 is 28.", "8 + 30 = 8 + 30"]),
        ("What is 1,200 - 5?", 1195, ["1200 - 5", r"\boxed{1,200-5}"]),
        (
            "Each of 4 workers has 6 tools. How many have they?",
            24,
            ["4·6", "They have 4 * 6 tools"],
        ),
    ],
)
def test_whoever_repeats_the_problem_has_not_solved_it(
    asked: str, truth: Any, answers: list[str]
) -> None:
    assert [grade(truth, answer, asked) for answer in answers] == [0] * len(answers)
    assert grade(truth, f"So it is {truth}.", asked) == 1


def test_a_sum_is_an_answer_where_one_is_asked_for() -> None:
    assert grade(r"3 + \sqrt{2}", r"\sqrt{2} + 3", r"Expand 3 + \sqrt{2}") == 1
    assert grade("x + 1", "1 + x", "Simplify x + 1") == 1
    assert grade("5", "2 + 3", "What remains of " + "7" * 9999 + "?") == 1
    assert grade(300000000, r"3 \times 10^8", "How fast is 3e8 m/s?") == 1


def test_the_key_answer_is_read_too() -> None:
    assert truths_of({"answer": "so\n#### 5"}) == ["5"]
