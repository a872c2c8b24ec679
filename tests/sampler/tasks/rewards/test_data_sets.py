"""GSM8K and HumanEval, whole: what is right earns 1, what is nearly right or wrong earns 0."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from sampler.grading.answers import Answer
from sampler.grading.graders import Graders
from sampler.tasks.interfaces import Score
from tests.sampler.grading.plugin import reward
from verify.plugins import Problem

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[5] / "shared" / "data"
GSM8K = [DATA / "gsm8k_train.jsonl", DATA / "gsm8k_test.jsonl"]
HUMAN_EVAL = DATA / "humaneval.jsonl.gz"


@pytest.fixture(scope="module")
def gsm8k() -> list[str]:
    """Worked solutions, each with its answer after `####`."""
    if not all(path.is_file() for path in GSM8K):
        pytest.skip(f"no GSM8K in {DATA}")
    answers = []
    for path in GSM8K:
        with path.open(encoding="utf-8") as file:
            answers += [json.loads(line)["answer"] for line in file]
    return answers


@pytest.fixture(scope="module")
def human_eval() -> list[dict[str, Any]]:
    if not HUMAN_EVAL.is_file():
        pytest.skip(f"no HumanEval in {DATA}")
    with gzip.open(HUMAN_EVAL, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="module")
def graders() -> Iterator[Graders]:
    made = Graders([reward("math"), reward("code")])
    yield made
    made.close()


def final(worked: str) -> str:
    return worked.rpartition("####")[2].strip()


def value(worked: str) -> Fraction:
    return Fraction(final(worked).replace(",", ""))


def graded(graders: Graders, worked: list[str], answer: Callable[[str], str]) -> list[object]:
    """Task rewards, with the truths as GSM8K has them."""
    asked = [
        Answer(Problem("gsm8k", "math", "", {"ground_truth": truth}), answer(truth))
        for truth in worked
    ]
    begun = time.monotonic()
    rewards = [getattr(result, "value", result) for result in graders.score(asked)]
    print(f"{len(worked)} graded in {time.monotonic() - begun:.1f} s")
    return rewards


def one_of_each(gsm8k: list[str]) -> list[str]:
    """A worked solution for each final answer, where nothing else of it is in what is graded."""
    return list({final(worked): worked for worked in gsm8k}.values())


WHOLE = {
    "as it stands": final,
    "the whole solution": lambda worked: worked,
}
FORMS = {
    "without separators": lambda worked: final(worked).replace(",", ""),
    "boxed": lambda worked: rf"So it is \boxed{{{final(worked)}}}.",
    "a sentence": lambda worked: f"The answer is ${final(worked)}.",
}
NEAR_MISSES = {
    "one more": lambda x: x + 1,
    "ten times": lambda x: x * 10 if x else 1,
    "negated": lambda x: -x if x else 1,
    "decimal point moved": lambda x: x / 10 if x else Fraction(1, 10),
}


@pytest.mark.parametrize("form", WHOLE)
def test_every_gold_answer_of_gsm8k_earns_1(graders: Graders, gsm8k: list[str], form: str) -> None:
    rewards = graded(graders, gsm8k, WHOLE[form])
    assert len(rewards) == 8792
    assert [w[-40:] for w, r in zip(gsm8k, rewards, strict=True) if r != 1.0] == []


@pytest.mark.parametrize("form", FORMS)
def test_every_final_answer_of_gsm8k_earns_1_in_other_forms(
    graders: Graders, gsm8k: list[str], form: str
) -> None:
    worked = one_of_each(gsm8k)
    rewards = graded(graders, worked, FORMS[form])
    assert len(rewards) == 983
    assert [w[-40:] for w, r in zip(worked, rewards, strict=True) if r != 1.0] == []


@pytest.mark.parametrize("miss", NEAR_MISSES)
def test_a_near_miss_of_gsm8k_earns_0(graders: Graders, gsm8k: list[str], miss: str) -> None:
    def decimal(worked: str) -> str:
        wrong = NEAR_MISSES[miss](value(worked))
        return f"{float(wrong):.10f}".rstrip("0").rstrip(".")

    worked = one_of_each(gsm8k)
    rewards = graded(graders, worked, decimal)
    assert len(rewards) == 983
    assert [w[-40:] for w, r in zip(worked, rewards, strict=True) if r != 0.0] == []


def programs(rows: list[dict[str, Any]], completion: Callable[[dict[str, Any]], str]) -> list:
    fields = ("prompt", "test", "entry_point")
    return [
        Answer(Problem(row["task_id"], "code", "", {f: row[f] for f in fields}), completion(row))
        for row in rows
    ]


COMPLETIONS = {
    "a fenced function": lambda row: (
        f"Like this:\n```python\n{row['prompt']}{row['canonical_solution']}```\nDone."
    ),
    "the bare body": lambda row: row["canonical_solution"].strip(),
}


@pytest.mark.parametrize("form", COMPLETIONS)
def test_every_reference_solution_of_humaneval_passes_in_parallel(
    graders: Graders, human_eval: list[dict[str, Any]], form: str
) -> None:
    begun = time.monotonic()
    results = graders.score(programs(human_eval, COMPLETIONS[form]))
    print(f"164 programs in {time.monotonic() - begun:.1f} s")
    failed = [(r["task_id"], x) for r, x in zip(human_eval, results, strict=True) if x != Score(1)]
    assert len(results) == 164
    assert failed == []


def test_a_wrong_body_fails_problems_of_humaneval(
    graders: Graders, human_eval: list[dict[str, Any]]
) -> None:
    results = graders.score(programs(human_eval[::5], lambda row: "    return None\n"))
    assert {getattr(result, "value", result) for result in results} == {0.0}
    assert all(getattr(result, "reason", "") for result in results)
