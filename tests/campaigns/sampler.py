"""GSM8K and HumanEval, whole: right answers in every form, near misses, programs. About 20 s.

`tests/sampler/tasks/rewards/test_rewards.py` holds the same of a few rows of each.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from fractions import Fraction
from operator import ne
from pathlib import Path
from typing import Any

from sampler.tasks.graders import Graders
from sampler.tasks.interfaces import Answer
from tests.sampler.tasks.grading.plugin import reward
from tests.sampler.tasks.rewards import test_math
from verify.plugins import Problem

DATA = Path(__file__).parents[3] / "shared" / "data"
"""Folder beside the checkout, with data sets that are not part of the repository."""
GSM8K = [DATA / "gsm8k_train.jsonl", DATA / "gsm8k_test.jsonl"]
HUMAN_EVAL = DATA / "humaneval.jsonl.gz"
Row = dict[str, Any]


def final(worked: str) -> str:
    """The answer of a worked solution, which stands after `####`."""
    return worked.rpartition("####")[2].strip()


def near(miss: Callable[[Fraction], Fraction | int]) -> Callable[[str], str]:
    """Makes another number of the answer, in decimals."""

    def text(worked: str) -> str:
        wrong = miss(Fraction(final(worked).replace(",", "")))
        return f"{float(wrong):.10f}".rstrip("0").rstrip(".")

    return text


RIGHT: dict[str, Callable[[str], str]] = {
    "as it stands": final,
    "the whole solution": lambda worked: worked,
    "without separators": lambda worked: final(worked).replace(",", ""),
    "boxed": lambda worked: rf"So it is \boxed{{{final(worked)}}}.",
    "a sentence": lambda worked: f"The answer is ${final(worked)}.",
}
NEAR_MISSES = {
    "one more": near(lambda x: x + 1),
    "ten times": near(lambda x: x * 10 if x else 1),
    "negated": near(lambda x: -x if x else 1),
    "decimal point moved": near(lambda x: x / 10 if x else Fraction(1, 10)),
}
COMPLETIONS: dict[str, Callable[[Row], str]] = {
    "a fenced function": lambda row: (
        f"Like this:\n```python\n{row['prompt']}{row['canonical_solution']}```\nDone."
    ),
    "the bare body": lambda row: row["canonical_solution"].strip(),
}


def worked_solutions() -> list[str]:
    """GSM8K's 8,792; empty where `DATA` lacks its files."""
    if not all(path.is_file() for path in GSM8K):
        return []
    lines = [line for path in GSM8K for line in path.read_text(encoding="utf-8").splitlines()]
    return [json.loads(line)["answer"] for line in lines]


def programming_problems() -> list[Row]:
    """HumanEval's 164; empty where `DATA` lacks its file."""
    if not HUMAN_EVAL.is_file():
        return []
    with gzip.open(HUMAN_EVAL, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def maths(graders: Graders, worked: Sequence[str], answer: Callable[[str], str]) -> list[object]:
    """Task rewards of answers to worked solutions, or the fault."""
    problems = [Problem("gsm8k", "math", "", {"ground_truth": truth}) for truth in worked]
    pairs = zip(problems, worked, strict=True)
    results = graders.score([Answer(problem, answer(truth)) for problem, truth in pairs])
    return [getattr(result, "value", result) for result in results]


def programs(
    graders: Graders, rows: Sequence[Row], completion: Callable[[Row], str]
) -> list[object]:
    """Task rewards of programs for HumanEval's problems, or the fault."""
    fields = ("prompt", "test", "entry_point")
    asked = [
        Answer(Problem(row["task_id"], "code", "", {f: row[f] for f in fields}), completion(row))
        for row in rows
    ]
    return [getattr(result, "value", result) for result in graders.score(asked)]


def make_graders() -> Graders:
    """Of mathematics and of programs."""
    return Graders([reward("math"), reward("code")])


def run() -> dict[str, object]:
    """Grades all of both sets.

    Returns:
        Rows of each set, and how many were graded otherwise than they should, by form.
    """
    worked, rows = worked_solutions(), programming_problems()
    figures: dict[str, object] = {"gsm8k rows": len(worked), "humaneval rows": len(rows)}
    with closing(make_graders()) as graders:
        for wanted, forms in ((1.0, RIGHT), (0.0, NEAR_MISSES)):
            for form, answer in forms.items():
                rewards = maths(graders, worked, answer)
                figures[f"gsm8k, {form}: wrong grades"] = len(worked) - rewards.count(wanted)
        others = dict(zip(worked, [*worked[1:], worked[0]], strict=True))
        rewards = maths(graders, worked, others.__getitem__)
        same = [float(final(truth) == final(other)) for truth, other in others.items()]
        figures["gsm8k, each other's answers: wrong grades"] = sum(map(ne, rewards, same))
        texts = [test_math.written(seed) for seed in range(2000)]
        wrong = [text for text in texts if test_math.grade(*text[1:]) != text[0]]
        figures["2,000 rewritten and changed values: wrong grades"] = len(wrong)
        for form, completion in COMPLETIONS.items():
            rewards = programs(graders, rows, completion)
            figures[f"humaneval, {form}: wrong grades"] = len(rows) - rewards.count(1.0)
    return figures
