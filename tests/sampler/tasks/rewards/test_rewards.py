"""Rewards: right answers earn 1, wrong ones 0 with a reason, malformed truths are faults."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runspec.core.errors import UserError
from runspec.core.schema import Reward
from sampler.tasks.graders import Graders
from sampler.tasks.interfaces import Answer, Result, Score, TargetLengthReward
from sampler.tasks.rewards.code import same_output, same_value
from sampler.tasks.rewards.code_inside import NotPlain, decode, encode
from sampler.tasks.rewards.code_tests import Malformed, program_of, read_tests
from sampler.tasks.rewards.formulas import MAX_CHARS
from tests.campaigns import sampler as data_sets
from tests.sampler.tasks.grading.plugin import reward
from verify.plugins import GraderFault, Problem

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
ADD = "def add(a, b):\n    return a + b\n"
SUM = "print(sum(map(int, input().split())))\n"
CASES = [
    {"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]},
    {"type": "function_call", "fn_name": "add", "input": [[1], [2]], "output": [1, 2]},
]
STDIO = [{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"}]
HUMAN = {
    "prompt": (
        "import math\n\ndef twice(x: int) -> int:\n    return 2 * x\n\n"
        'def add(a: int, b: int) -> int:\n    """ The sum. """\n'
    ),
    "entry_point": "add",
    "test": (
        "def check(candidate):\n    assert candidate(1, twice(1)) == 3\n"
        "    assert math.isnan(candidate(float('nan'), 1))\n"
        "    assert candidate((1,), (2,)) == (1, 2)\n"
    ),
}
MBPP = {
    "test_list": ["assert add(1, 2) == 3", "assert add({1: {2}}, 0) == {1: {2}}"],
    "test_setup_code": "import math",
}
CATCH = "try:\n    add(1, 2)\n    assert False\nexcept ValueError as e:\n    assert 'no' in str(e)"
CHEAT = "def twice(x):\n    return 2\n\ndef add(a, b):\n    return twice(a) if b else 3\n"
PASSES = {
    "synthetic-1 calls": ({"language": "python", "test_cases": CASES}, ADD),
    "synthetic-1 as a JSON string": ({"test_cases": json.dumps(CASES)}, ADD),
    "apps stdin": ({"inputs": ["1 2", "3 4\n"], "outputs": ["3", "7 \n"]}, SUM),
    "livecodebench": ({"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"}, ADD),
    "a method of Solution": (
        {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"},
        "class Solution:\n    def add(self, a, b):\n        return a + b\n",
    ),
    "humaneval, a function": (HUMAN, ADD),
    "humaneval, a body": (HUMAN, "    return a + b\n"),
    "humaneval, a body without its indentation": (HUMAN, "c = a + b\n    return c\n"),
    "humaneval, a fenced function": (HUMAN, f"Here:\n```python\n{ADD}```\nas asked"),
    "humaneval, a helper of the prompt bent": (HUMAN, f"def twice(x):\n    return 0\n\n{ADD}"),
    "mbpp": (MBPP, ADD.replace("return a + b", "return a if isinstance(a, dict) else a + b")),
    "an exception that the tests want": (
        {"test_list": [CATCH]},
        "def add(a, b): raise ValueError('no')",
    ),
    "a float within the tolerance": (
        {"inputs": [""], "outputs": ["0.3333"], "float_tolerance": 1e-3},
        "print(1 / 3)",
    ),
    "another spelling of the number": ({"inputs": [""], "outputs": ["1.50 2"]}, "print('1.5 2')"),
}
FAILS = {
    "a wrong value": ({"test_cases": CASES}, "def add(a, b): return 4", "returned another value"),
    "the second test alone": ({"test_cases": CASES}, "def add(a, b): return 3", "test 2 of 2"),
    "no float tolerance": ({"inputs": [""], "outputs": ["0.3333"]}, "print(1 / 3)", "printed"),
    "an exception": ({"test_cases": STDIO}, "1 / 0", "ZeroDivisionError"),
    "an exit code": ({"test_cases": STDIO}, f"{SUM}raise SystemExit(3)", "exit code 3"),
    "no such function": ({"test_cases": CASES}, "x = 1", "does not define add"),
    "prose": (HUMAN, "I do not know.", "SyntaxError"),
    "an empty block": (HUMAN, "```python\n```", "no program"),
    "a body of a docstring": (HUMAN, '    """Nothing."""\n', "the tests"),
    "a bent helper": (HUMAN, CHEAT, "the tests"),
    "no exception where the tests want one": ({"test_list": [CATCH]}, ADD, "the tests"),
    "an object": ({"test_cases": CASES}, "def add(a, b): return object()", "no plain data"),
    "a result over the limit": (
        {"test_cases": CASES},
        "def add(a, b): return 'x' * (1 << 22)",
        "the program sent a message of more than",
    ),
    "a failed assertion": (MBPP, "def add(a, b): return 3", "assert add({1: {2}}, 0)"),
}
UNGRADABLE: list[tuple[str, dict[str, Any], str]] = [
    ("math", {}, " has no ground_truth"),
    ("math", {"ground_truth": None}, ".ground_truth is NoneType"),
    ("math", {"ground_truth": []}, ".ground_truth has 0 truths"),
    ("math", {"ground_truth": [["1"]]}, ".ground_truth is list"),
    ("math", {"ground_truth": ""}, ".ground_truth has 0 characters"),
    ("math", {"ground_truth": "1" * 5000}, ".ground_truth has 5000 characters"),
    ("math", {"ground_truth": True}, ".ground_truth is bool"),
    ("math", {"ground_truth": float("nan")}, ".ground_truth is nan"),
    ("code", {"inputs": ["1"]}, ".outputs"),
    ("code", {**HUMAN, "test": "def check(candidate:"}, ".test"),
    ("code", {**HUMAN, "test": "x = 1"}, ".test defines no check"),
    ("code", {**MBPP, "test_list": ["assert ("]}, ".test_list[0]"),
    ("code", {**MBPP, "test_setup_code": "1 / 0"}, ".test_setup_code"),
    ("code", {"test_list": ["assert add(print, 1)"]}, "an argument of add"),
]
"""Kind, malformed verification_info, and what names the field."""


@pytest.fixture(scope="module")
def graders():
    rewards = [reward(kind, timeout="10m") for kind in ("math", "code")]
    with contextlib.closing(Graders(rewards, processes=2)) as made:
        yield made


def maths(graders: Graders, pairs: list[tuple[Any, str]]) -> list[Result]:
    return graders.score(
        [
            Answer(Problem(f"p{i}", "math", "", {"ground_truth": truth}), answer)
            for i, (truth, answer) in enumerate(pairs)
        ]
    )


def program(graders: Graders, info: dict[str, Any], answer: str, kind: str = "code") -> Result:
    (result,) = graders.score([Answer(Problem("p", kind, "", info), answer)])
    return result


@pytest.mark.slow
def test_hostile_answers_end_with_0_and_a_reason_and_harm_no_other(graders):
    formula = "0+" * MAX_CHARS + "18"
    texts = [("18", text) for text in (*HOSTILE.values(), rf"\boxed{{{formula}}}")]
    right = [("18", "18"), ("1/2", r"\boxed{\frac12}")]
    results = maths(graders, [*texts, *right])
    hostile = results[: len(texts)]
    named = zip([*HOSTILE, "a formula over the limit"], hostile, strict=True)
    assert {name: getattr(r, "value", r) for name, r in named if r != Score(1.0)} == (
        dict.fromkeys([*HOSTILE, "a formula over the limit"], 0.0)
    )
    assert all(isinstance(r, Score) and r.reason for r in hostile)
    assert "is not read" in getattr(hostile[-1], "reason", "")
    assert results[len(texts) :] == [Score(1.0)] * len(right)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PASSES, *FAILS])
def test_a_right_program_earns_1_and_a_wrong_one_0_with_the_reason(graders, name):
    info, answer, *reason = FAILS.get(name) or PASSES[name]
    result = program(graders, info, answer)
    assert isinstance(result, Score)
    assert result.value == float(not reason)
    assert reason[0] in result.reason if reason else result.reason == ""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "info", "says"), UNGRADABLE)
def test_a_truth_that_cannot_be_used_is_a_fault_that_names_the_field(graders, kind, info, says):
    result = program(graders, info, ADD, kind)
    assert isinstance(result, GraderFault)
    assert (f"verification_info{says}" if says[0] in ". " else says) in str(result)


@pytest.mark.slow
def test_a_program_that_leaves_its_tests_no_time_is_at_fault_itself(monkeypatch):
    monkeypatch.setattr("sampler.tasks.rewards.code.TESTS_S", 600.0)
    monkeypatch.setattr("sampler.sandbox.process._SETTLE_S", 600.0)
    # given a program that takes most of the time before it is called, and tests that take some
    slow = f"import time\ntime.sleep(1.5)\n{ADD}"
    info = {**MBPP, "test_setup_code": "import time\ntime.sleep(1)"}
    with contextlib.closing(Graders([reward("code", timeout="2s")], processes=1)) as graders:
        # when it is graded
        result = program(graders, info, slow)
    # then it took too long, and the tests are not blamed
    assert isinstance(result, Score) and result.value == 0.0 and "took too long" in result.reason


# -- A part of GSM8K and HumanEval; `tests/campaigns/sampler.py` grades all of both ----------------


@pytest.mark.slow
def test_grades_of_gsm8k_equal_its_own_answers(graders):
    if not (worked := data_sets.worked_solutions()):
        pytest.skip("no files of GSM8K")
    assert len(worked) == 8792
    for wanted, forms in ((1.0, data_sets.RIGHT), (0.0, data_sets.NEAR_MISSES)):
        for form, answer in forms.items():
            rewards = data_sets.maths(graders, worked[::120], answer)
            missed = [w[-40:] for w, r in zip(worked[::120], rewards, strict=True) if r != wanted]
            assert missed == [], form


@pytest.mark.slow
def test_reference_solutions_of_humaneval_pass_and_wrong_ones_do_not(graders):
    if not (rows := data_sets.programming_problems()):
        pytest.skip("no file of HumanEval")
    assert len(rows) == 164
    for completion in data_sets.COMPLETIONS.values():
        assert set(data_sets.programs(graders, rows[::20], completion)) == {1.0}
    assert set(data_sets.programs(graders, rows[::20], lambda _: "    return None\n")) == {0.0}


# -- The parts of the reward of programs -----------------------------------------------------------


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({}, "has none of test_cases"),
        ({"test_cases": "[1"}, "test_cases: an argument is no JSON"),
        ({"test_cases": []}, "test_cases: has 0 tests"),
        ({"test_cases": [5]}, "test_cases[0]: is no object"),
        ({"test_cases": [{"type": "stdin_stdout", "input": "1"}]}, "test_cases[0].output: is miss"),
        ({"test_cases": [{**STDIO[0], "type": "x"}]}, "test_cases[0].type"),
        ({"test_cases": STDIO, "language": "rust"}, "language: 'rust' is not python"),
        ({"test_cases": [{**CASES[0], "fn_name": "a b"}]}, "fn_name: 'a b' is no name"),
        ({"inputs": ["1"]}, "outputs: is missing"),
        ({"inputs": ["1"], "outputs": ["1", "2"]}, "outputs: 2 for 1 inputs"),
        ({"inputs": ["1"], "outputs": ["1"], "float_tolerance": -1}, "float_tolerance"),
        ({"test": "x", "entry_point": None}, "entry_point: is missing"),
        ({"test_list": [5]}, "test_list[0]: is int"),
    ],
)
def test_malformed_tests_name_the_field(info, says):
    with pytest.raises(Malformed) as raised:
        read_tests(info)
    assert str(raised.value).startswith("verification_info.")
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("x = 1", "x = 1"),
        ("a\n```python\nx = 1\n```\nb", "x = 1"),
        ("```\nx = 1\n```\n```py\ny = 2\n\nz = 3\n```", "y = 2\n\nz = 3"),
        ("1. so:\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y"),
        ("```python\nx = 1", "x = 1"),
        ("```python\nx = 1\n```\n```", "x = 1"),
        ("    return 1", "    return 1"),
    ],
)
def test_the_program_is_the_last_block_or_the_whole_answer(answer, program):
    assert program_of(answer) == program


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, -(10**5000), 2**53, 1.5, float("inf"), -0.0, "\ud800ü", b"\x00\xff"),
        *([1, (2, [3]), {4: {5}}, frozenset({6})], {(1, 2): [None], "x": {}}, 1 + 2j),
        range(1, 9, 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_data_crosses_unchanged(value):
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value
    assert repr(type(back)) == repr(type(value))


@pytest.mark.parametrize(
    "data", [{"x": 1}, {"t": 5}, {"s": [[1]]}, {"i": "no"}, {"f": None}, {"d": [1]}, {"r": [0] * 4}]
)
def test_malformed_data_is_refused(data):
    with pytest.raises(NotPlain):
        decode(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from("ifcbtszrdx"), inner, min_size=1, max_size=1)
        | st.lists(st.lists(inner, min_size=2, max_size=2), max_size=3).map(lambda d: {"d": d})
    ),
)


@settings(derandomize=True)
@given(JSON)
def test_whatever_a_program_sends_is_plain_data_or_refused(data):
    with contextlib.suppress(NotPlain):
        decode(data)


@pytest.mark.parametrize("tag", ["s", "z", "d"])
def test_keys_chosen_to_have_one_hash_are_refused_and_cost_nothing(tag):
    # given the numbers that Python hashes to 0: as keys, each is compared with all before it
    keys = [{"i": hex(((1 << 61) - 1) * n)} for n in range(1, 70_000)]
    data = {tag: [[key, 1] for key in keys] if tag == "d" else keys}
    # then they are refused before they are
    with pytest.raises(NotPlain, match="one hash"):
        decode(data)


def test_depth_is_bounded_both_ways():
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(NotPlain, match="too deep"):
        encode(deep)
    with pytest.raises(NotPlain, match="too deep"):
        decode(deep)


@pytest.mark.parametrize(
    ("one", "other", "tolerance", "same"),
    [
        ("1 2 \n3\n\n", "1 2\n3", 0.0, True),
        ("1 2 3", "1 2\n3", 0.0, False),
        ("a", "A", 0.0, False),
        ("nan", "NaN", 0.0, False),
        ("1.0000001", "1", 1e-6, True),
        ("1.0000001", "1", 0.0, False),
        ("9" * 100_000, "8" * 100_000, 1.0, False),
    ],
)
def test_output_is_compared_by_lines_and_numbers(one, other, tolerance, same):
    assert same_output(one, other, tolerance) is same


@pytest.mark.parametrize(
    ("one", "other", "tolerance", "same"),
    [
        ((1, 2), [1, 2], 0.0, True),
        ([1, 2], [[1, 2]], 0.0, True),
        ({1: 2}, {"1": 2}, 0.0, True),
        ([1, 2], [2, 1], 0.0, False),
        ("1", 1, 0.0, False),
        (0.1 + 0.2, 0.3, 1e-9, True),
        (0.1 + 0.2, 0.3, 0.0, True),
    ],
)
def test_values_are_compared_as_json_has_them(one, other, tolerance, same):
    assert same_value(one, other, tolerance) is same


# -- The reward for a length -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "alpha", "task", "target", "length", "reward"),
    [
        ("exact", 0.05, 1.0, 16, 16, 1.0),
        ("exact", 0.05, 1.0, 16, 10, 0.7),
        ("exact", 0.05, 0.0, 16, 20, -0.2),
        ("exact", 3e-4, 1.0, 2000, 3000, 0.7),
        ("max", 0.05, 1.0, 16, 16, 0.5),
        ("max", 0.05, 1.0, 16, 12, 0.7),
        ("max", 0.05, 1.0, 16, 22, 0.2),
        ("max", 0.05, 1.0, 16, 1, 1.0),
        ("max", 0.05, 1.0, 16, 40, 0.0),
        ("max", 0.05, 0.0, 16, 16, 0.0),
        ("clip", None, 1.0, 16, 16, 1.0),
        ("clip", None, 1.0, 16, 17, 0.0),
        ("clip", None, 0.0, 16, 3, 0.0),
    ],
)
def test_reward_is_task_reward_plus_penalty(form, alpha, task, target, length, reward):
    fields = {"name": "length", "kind": "target_length", "form": form, "alpha": alpha}
    term = TargetLengthReward(Reward.model_validate(fields))
    assert task + term.penalty(task, target, length) == pytest.approx(reward, abs=1e-12)


@pytest.mark.parametrize("fields", [{}, {"form": "exact"}, {"form": "max"}, {"alpha": 0.1}])
def test_a_term_without_form_or_alpha_is_refused(fields):
    with pytest.raises(UserError, match="needs form and alpha"):
        TargetLengthReward(reward("target_length", **fields))
