"""The run's task: grading, determinism, limits, and what a broken one says."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from contextlib import closing
from pathlib import Path

import pytest
from reasoning_gym.factory import DATASETS
from tokenizers import Tokenizer

from runspec.core.errors import UserError
from runspec.core.spec.load import SpecFiles
from runspec.core.spec.plugins import missing_plugins
from runspec.core.spec.schema import Evaluation
from runspec.lint.check import check_spec
from sampler.tasks.problems import split_of
from sampler.tasks.sources.gym import REFUSED
from sampler.tasks.task_set import RunTask, build_evaluation_set, build_task_set
from tests.sampler.tasks.conftest import SPECS, laptop_spec
from verify.plugins import Graded, GradeItem, GraderFault


def output(tokenizer_dir: Path, text: str, *, end: bool = True) -> list[int]:
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return [*ids, tokenizer.token_to_id("<eos>")] if end else ids


def grade(task: RunTask, problem: int, target: int | None, tokens: list[int]) -> Graded:
    (graded,) = task.grade_all([GradeItem(problem, target, tokens)])
    if isinstance(graded, GraderFault):
        raise graded
    return graded


def answer_of(task: RunTask, index: int) -> str:
    return str(task.problem(index).verification["answer"])


def test_a_right_answer_earns_the_task_reward_and_length_counts_every_token(
    task: RunTask, tokenizer_dir: Path
) -> None:
    right = answer_of(task, 5)
    # Given an output of `ab`, </think>, the answer and the end token
    tokens = output(tokenizer_dir, f"ab</think>{right}")
    assert len(tokens) == 2 + 1 + len(right) + 1

    # When it is graded against a target three tokens longer
    graded = grade(task, 5, len(tokens) + 3, tokens)

    # Then R = T + P with P = -alpha 3
    assert graded.task_reward == 1.0
    assert graded.length_penalty == pytest.approx(-0.15)
    assert graded.reward == pytest.approx(0.85)
    assert grade(task, 5, None, tokens).reward == 1.0


def test_whatever_is_not_the_whole_answer_earns_nothing(task: RunTask, tokenizer_dir: Path) -> None:
    right = answer_of(task, 5)
    wrong = {
        "partly right": output(tokenizer_dir, f"a</think>{right[:-1]}q"),
        "too long": output(tokenizer_dir, f"a</think>{right}x"),
        "too short": output(tokenizer_dir, f"a</think>{right[:-1]}"),
        "empty": output(tokenizer_dir, "a</think>"),
        "no </think>": output(tokenizer_dir, right),
        "a second </think>": output(tokenizer_dir, f"a</think>x</think>{right}"),
        "cut off": output(tokenizer_dir, f"a</think>{right}", end=False),
        "an end inside": [
            *output(tokenizer_dir, f"a</think>{right}"), *output(tokenizer_dir, "b")
        ],
        "nothing": [],
        "only the end": output(tokenizer_dir, ""),
        "tokens that do not exist": [10**6, -1, *output(tokenizer_dir, f"</think>{right}")],
    }  # fmt: skip
    rewards = {name: grade(task, 5, 8, tokens).task_reward for name, tokens in wrong.items()}
    assert rewards == dict.fromkeys(wrong, 0.0)
    # The length term does not depend on being right.
    assert grade(task, 5, 8, wrong["empty"]).length_penalty == pytest.approx(-0.05 * (8 - 3))


def test_a_grade_in_which_time_has_a_say_is_marked(
    task: RunTask, tmp_path: Path, tokenizer_dir: Path
) -> None:
    # Given a problem of mathematics beside the generator's
    row = {
        "problem_id": "sum",
        "task_type": "math",
        "prompt": "one and one",
        "verification_info": {"ground_truth": "x"},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    rows = f"{{kind: jsonl, uri: {tmp_path / 'rows.jsonl'}}}"
    spec = laptop_spec(
        f"data.sources={{spell_backward: null, rows: {rows}}}",
        "reward={spelling: null, math: {kind: math}}",
    )
    with closing(build_task_set(spec, tokenizer_dir)) as mixed:
        # Then its grade says that it may differ elsewhere; the generator's may not
        assert grade(mixed, 0, None, output(tokenizer_dir, "</think>x")).task_reward == 1.0
        assert not grade(mixed, 0, None, output(tokenizer_dir, "</think>y")).repeatable
    assert grade(task, 5, None, output(tokenizer_dir, "</think>x")).repeatable


def test_a_long_answer_that_only_begins_right_gets_no_credit(tokenizer_dir: Path) -> None:
    # The generator's scorer adds 1/9 nine times and reaches 1.0000000000000002.
    params = "data.sources.spell_backward.params={min_word_len: 9, max_word_len: 9}"
    task = build_task_set(laptop_spec(params), tokenizer_dir)
    right = answer_of(task, 0)
    assert grade(task, 0, None, output(tokenizer_dir, f"</think>{right}")).task_reward == 1.0
    assert grade(task, 0, None, output(tokenizer_dir, f"</think>{right}s")).task_reward == 0.0


def test_problems_follow_the_seed_and_stay_out_of_the_held_out_split(
    task: RunTask, tokenizer_dir: Path
) -> None:
    words = [task.problem(i).prompt for i in range(300)]
    other = build_task_set(laptop_spec("seed=43"), tokenizer_dir)
    again = build_task_set(laptop_spec(), tokenizer_dir)
    assert [again.problem(i).prompt for i in reversed(range(300))] == words[::-1]
    assert sum(other.problem(i).prompt == words[i] for i in range(300)) < 10
    assert {split_of(word) for word in words} == {"train"}
    assert len(task) == 20000
    with pytest.raises(IndexError):
        task.problem(20000)


def test_over_long_prompts_are_left_out_and_an_impossible_limit_is_an_error(
    tokenizer_dir: Path,
) -> None:
    tight = build_task_set(laptop_spec("data.max_prompt_tokens=32"), tokenizer_dir)
    lengths = [len(tight.prompt_tokens(i, t)) for i in range(100) for t in tight.targets]
    assert max(lengths) == 32
    # What took the place of an over-long one is shown and graded as one problem
    for index in range(100):
        shown = tight.problem(index).prompt.removesuffix("\n").split()[-1]
        right = output(tokenizer_dir, f"</think>{answer_of(tight, index)}")
        assert answer_of(tight, index).lower() == shown.lower()[::-1]
        assert grade(tight, index, 8, right).task_reward == 1.0
    hopeless = build_task_set(laptop_spec("data.max_prompt_tokens=10"), tokenizer_dir)
    with pytest.raises(UserError, match="none of 1000 problems fits"):
        hopeless.problem(0)


def test_two_sources_stand_behind_each_other(tokenizer_dir: Path) -> None:
    more = (
        "data.sources.more={kind: reasoning_gym, dataset: spell_backward, size: 5,"
        " params: {min_word_len: 3, max_word_len: 3}}"
    )
    task = build_task_set(laptop_spec(more), tokenizer_dir)
    assert len(task) == 20005
    assert task.problem(19999).problem_id == "spell_backward-19999"
    assert task.problem(20004).problem_id == "more-4"
    assert len(answer_of(task, 20004)) == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "reward.spelling.kind=oracle",
            "no plug-in offers kind 'oracle'; installed: code, math",
        ),
        (
            "data.sources.spell_backward.kind=oracle",
            "no plug-in offers kind 'oracle'; installed: ",
        ),
        ("reward.spelling=", "have no reward term of that kind"),
        ("data.sources.spell_backward.dataset=nothing", "refuses 'nothing'"),
        ("data.sources.spell_backward.params.min_word_len=0", "min_word_len must be positive"),
        ("data.sources.spell_backward.params={colour: red}", "unexpected keyword argument"),
    ],
)
def test_a_task_that_cannot_be_built_says_what_is_missing(
    tokenizer_dir: Path, override: str, message: str
) -> None:

    loaded = check_spec(
        SpecFiles(SPECS / "target_short.yaml", profile="laptop", overrides=[override])
    )
    assert loaded.spec is not None
    with pytest.raises(UserError, match=message):
        build_task_set(loaded.spec, tokenizer_dir)


def test_missing_plugins_are_known_without_importing_any() -> None:
    spec = laptop_spec("reward.code={kind: chess}", "data.sources.rows={kind: csv, uri: x}")
    assert missing_plugins(laptop_spec()) == []
    assert {plugin.path: str(plugin) for plugin in missing_plugins(spec)} == {
        "data.sources.rows": "no installed package offers the kind 'csv' in runspec.sources",
        "reward.code": "no installed package offers the kind 'chess' in runspec.rewards",
    }


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


def evaluated(source: str, **fields: object) -> Evaluation:
    return Evaluation.model_validate({"name": "e", "source": source, **fields})


def test_an_evaluation_asks_what_the_run_does_not_train_on(tokenizer_dir: Path) -> None:
    spec = laptop_spec("data.sources.spell_backward.size=300", "evaluations=null")
    # Given a run that holds nothing out by itself, and an evaluation of the source it trains on
    evaluation = evaluated("spell_backward")
    cold = spec.model_copy(update={"warm_start": None})
    asking = cold.model_copy(update={"evaluations": [evaluation]})

    def prompts(task: RunTask) -> set[str]:
        with closing(task):
            return {task.problem(index).prompt.lower() for index in range(len(task))}

    trained = prompts(build_task_set(asking, tokenizer_dir))
    asked = prompts(build_evaluation_set(asking, evaluation, tokenizer_dir))
    # Then no problem is both
    assert asked and trained and not asked & trained
    # And without the evaluation it would have trained on some of them
    assert asked & prompts(build_task_set(cold, tokenizer_dir))


def test_a_source_that_is_only_asked_gives_no_lease_a_problem(tokenizer_dir: Path) -> None:
    longer = "{kind: reasoning_gym, dataset: spell_backward, size: 30, train: false, "
    longer += "params: {min_word_len: 7, max_word_len: 7}}"
    spec = laptop_spec(f"data.sources={{longer: {longer}, spell_backward: {{size: 50}}}}")
    with closing(build_task_set(spec, tokenizer_dir)) as trained:
        assert len(trained) == 50
    evaluation = evaluated("longer", grader="spelling")
    with closing(build_evaluation_set(spec, evaluation, tokenizer_dir)) as asked:
        assert len(asked) == 30
        assert {asked.problem(i).task_type for i in range(30)} == {"reasoning_gym"}
