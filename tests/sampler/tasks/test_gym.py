"""Scorers of reasoning-gym read what a model wrote; none may run it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path

import pytest
from reasoning_gym.factory import DATASETS

from runspec.core.errors import UserError
from sampler.tasks.sources.gym import REFUSED
from sampler.tasks.task_set import build_task_set
from tests.sampler.tasks.conftest import laptop_spec

EVALUATORS = {"eval", "exec", "parse_expr", "sympify"}


def evaluates_the_answer(scorer: object) -> bool:
    """Whether a scorer calls an evaluator on its argument `answer`."""
    calls = (
        node
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(scorer))))
        if isinstance(node, ast.Call) and node.args
    )
    return any(
        ast.unparse(call.func).rpartition(".")[2] in EVALUATORS
        and ast.unparse(call.args[0]) == "answer"
        for call in calls
    )


def test_every_scorer_that_evaluates_answers_is_on_the_list() -> None:
    found = {
        name for name, (kind, _) in DATASETS.items() if evaluates_the_answer(kind.score_answer)
    }

    assert found | {"composite"} == REFUSED


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_generator_whose_scorer_evaluates_answers_is_refused(
    tokenizer_dir: Path, name: str
) -> None:
    spec = laptop_spec(
        f"data.sources.spell_backward.dataset={name}", "data.sources.spell_backward.params={}"
    )

    with pytest.raises(UserError, match=f"{name}' evaluates answers as code"):
        build_task_set(spec, tokenizer_dir)
