"""Where the answer begins: training and `python -m sampler grade` cut alike, and thinking that ends
twice is one answer."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from runspec.core.spec.schema import Reward
from sampler.grading.answers import Answer
from sampler.grading.graders import Graders
from sampler.grading.lines import answer_of
from sampler.tasks.interfaces import Score
from sampler.tasks.prompts import PromptCodec, PromptForm, answer_in
from sampler.tasks.task_set import RunTask
from verify.plugins import Problem


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ("</think>x", "x"),
        ("<think>a</think> x ", "x"),
        ("a</think>x</think>y", "x</think>y"),
        ("a</think></think>y", "</think>y"),
        ("a</think>x<think>b</think>y</think>", "x<think>b</think>y</think>"),
        ("a</think>", ""),
    ],
)
def test_training_and_the_command_grade_the_same_text(
    tokenizer_dir: Path, output: str, answer: str
) -> None:
    codec = PromptCodec.read(tokenizer_dir, PromptForm("{target}"))
    assert codec.answer([*codec.encode(output), codec.eos_token_id]) == answer
    assert answer_of(output) == answer


def test_without_the_end_of_thinking_training_has_no_answer_and_the_command_takes_all() -> None:
    assert answer_in("<think>7") is None
    assert answer_of("<think>7") == "<think>7"
    assert answer_of(" 7 ") == "7"


@pytest.mark.slow
def test_a_model_gains_nothing_by_ending_its_thinking_twice(task: RunTask) -> None:
    # Given a word to spell, a sum and a program, each answered wrongly and then rightly, or the
    # other way round, with an end of thinking between the two
    word = task.problem(0)
    right = str(word.verification["answer"])
    total = Problem("sum", "math", "", {"ground_truth": "18"})
    program = Problem("program", "code", "", {"inputs": [""], "outputs": ["18"]})
    pairs = [
        (word, right, right[::-1] + "x"),
        (total, r"\boxed{18}", r"\boxed{17}"),
        (program, "print(18)", "print(17)"),
    ]
    twice = [
        Answer(problem, answer_of(f"thinking</think>{first}</think>{then}"))
        for problem, good, bad in pairs
        for first, then in ((bad, good), (good, bad))
    ]
    kinds = ("reasoning_gym", "math", "code")
    rewards = [Reward.model_validate({"name": kind, "kind": kind}) for kind in kinds]
    # When they are graded
    with closing(Graders(rewards, processes=1)) as graders:
        results = graders.score(twice)
    # Then it is as if both had been written in one answer: a box counts where it is the last
    values = [result.value for result in results if isinstance(result, Score)]
    assert values == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
