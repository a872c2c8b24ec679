"""Programs against tests, in every form of verification_info that is taken."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sampler.tasks.grading.answers import Answer, Result
from sampler.tasks.grading.graders import Graders
from sampler.tasks.interfaces import Score
from sampler.tasks.rewards.code.formats import Malformed, read_tests
from sampler.tasks.rewards.code.judge import program_of, same_output, same_value
from sampler.tasks.rewards.code.plain import NotPlain, decode, encode
from tests.sampler.tasks.grading.plugin import reward
from verify.plugins import GraderFault, Problem

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
    "mbpp": (MBPP, ADD.replace("return a + b", "return a if isinstance(a, dict) else a + b")),
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
    "an object": ({"test_cases": CASES}, "def add(a, b): return object()", "no plain data"),
    "a result over the limit": (
        {"test_cases": CASES},
        "def add(a, b): return 'x' * (1 << 22)",
        "the program sent a message of more than",
    ),
    "a failed assertion": (MBPP, "def add(a, b): return 3", "assert add({1: {2}}, 0)"),
}
MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({}, "has none of test_cases"),
    ({"test_cases": "[1"}, "test_cases: an argument is no JSON"),
    ({"test_cases": []}, "test_cases: has 0 tests"),
    ({"test_cases": [5]}, "test_cases[0]: is no object"),
    ({"test_cases": [{"type": "stdin_stdout", "input": "1"}]}, "test_cases[0].output: is missing"),
    ({"test_cases": [{**STDIO[0], "type": "x"}]}, "test_cases[0].type"),
    ({"test_cases": STDIO, "language": "rust"}, "language: 'rust' is not python"),
    ({"test_cases": [{**CASES[0], "fn_name": "a b"}]}, "fn_name: 'a b' is no name"),
    ({"inputs": ["1"]}, "outputs: is missing"),
    ({"inputs": ["1"], "outputs": ["1", "2"]}, "outputs: 2 for 1 inputs"),
    ({"inputs": ["1"], "outputs": ["1"], "float_tolerance": -1}, "float_tolerance"),
    ({"test": "x", "entry_point": None}, "entry_point: is missing"),
    ({"test_list": [5]}, "test_list[0]: is int"),
]


@pytest.fixture(scope="module")
def graders() -> Iterator[Graders]:
    made = Graders([reward("code", timeout="60s")], processes=2)
    yield made
    made.close()


def grade(graders: Graders, info: dict[str, Any], answer: str) -> Result:
    (result,) = graders.score([Answer(Problem("p", "code", "", info), answer)])
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSES)
def test_a_right_program_earns_1(graders: Graders, name: str) -> None:
    assert grade(graders, *PASSES[name]) == Score(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILS)
def test_a_wrong_program_earns_0_with_the_reason(graders: Graders, name: str) -> None:
    info, answer, reason = FAILS[name]
    result = grade(graders, info, answer)
    assert isinstance(result, Score)
    assert result.value == 0.0
    assert reason in result.reason


@pytest.mark.parametrize(("info", "says"), MALFORMED)
def test_a_malformed_verification_names_the_field(info: dict[str, Any], says: str) -> None:
    with pytest.raises(Malformed) as raised:
        read_tests(info)
    assert str(raised.value).startswith("verification_info.")
    assert says in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"inputs": ["1"]}, "verification_info.outputs"),
        ({**HUMAN, "test": "def check(candidate:"}, "verification_info.test"),
        ({**HUMAN, "test": "x = 1"}, "verification_info.test defines no check"),
        ({**MBPP, "test_list": ["assert ("]}, "verification_info.test_list[0]"),
        ({**MBPP, "test_setup_code": "1 / 0"}, "verification_info.test_setup_code"),
        ({"test_list": ["assert add(print, 1)"]}, "an argument of add"),
    ],
)
def test_tests_that_cannot_be_run_are_a_fault_and_no_reward(
    graders: Graders, info: dict[str, Any], says: str
) -> None:
    result = grade(graders, info, ADD)
    assert isinstance(result, GraderFault)
    assert says in str(result)


@pytest.mark.slow
def test_a_program_that_leaves_its_tests_no_time_is_at_fault_itself() -> None:
    # Given a program that takes most of the time before it is called, and tests that take some
    program = f"import time\ntime.sleep(1.5)\n{ADD}"
    info = {**MBPP, "test_setup_code": "import time\ntime.sleep(1)"}
    with contextlib.closing(Graders([reward("code", timeout="2s")], processes=1)) as graders:
        # When it is graded
        result = grade(graders, info, program)
    # Then it took too long, and the tests are not blamed
    assert result == Score(0.0, "the program took too long")


@pytest.mark.slow
def test_helpers_of_the_prompt_stay_the_data_sets_own(graders: Graders) -> None:
    # Given tests that use a helper of the prompt, and a program that bends it
    bent = f"def twice(x):\n    return 0\n\n{ADD}"
    assert grade(graders, HUMAN, bent) == Score(1.0)
    cheat = "def twice(x):\n    return 2\n\ndef add(a, b):\n    return twice(a) if b else 3\n"
    assert getattr(grade(graders, HUMAN, cheat), "value", None) == 0.0


@pytest.mark.slow
def test_an_exception_of_the_program_reaches_the_tests_as_one(graders: Graders) -> None:
    test = (
        "try:\n    add(1, 2)\n    assert False\nexcept ValueError as e:\n    assert 'no' in str(e)"
    )
    info = {"test_list": [test]}
    assert grade(graders, info, "def add(a, b): raise ValueError('no')") == Score(1.0)
    assert getattr(grade(graders, info, ADD), "value", None) == 0.0


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
def test_the_program_is_the_last_block_or_the_whole_answer(answer: str, program: str) -> None:
    assert program_of(answer) == program


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(10**5000),
        2**53,
        1.5,
        float("inf"),
        "\ud800ü",
        b"\x00\xff",
        [1, (2, [3]), {4: {5}}, frozenset({6})],
        {(1, 2): [None], "x": {}},
        1 + 2j,
        range(1, 9, 2),
        -0.0,
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_data_crosses_unchanged(value: object) -> None:
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value
    assert repr(type(back)) == repr(type(value))


@pytest.mark.parametrize(
    "data", [{"x": 1}, {"t": 5}, {"s": [[1]]}, {"i": "no"}, {"f": None}, {"d": [1]}, {"r": [0] * 4}]
)
def test_malformed_data_is_refused(data: object) -> None:
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


@given(JSON)
def test_whatever_a_program_sends_is_plain_data_or_refused(data: object) -> None:
    with contextlib.suppress(NotPlain):
        decode(data)


@pytest.mark.parametrize("tag", ["s", "z", "d"])
def test_keys_chosen_to_have_one_hash_are_refused_and_cost_nothing(tag: str) -> None:
    # Given the numbers that Python hashes to 0: as keys, each is compared with all before it
    keys = [{"i": hex(((1 << 61) - 1) * n)} for n in range(1, 70_000)]
    data = {tag: [[key, 1] for key in keys] if tag == "d" else keys}
    # Then they are refused before they are
    with pytest.raises(NotPlain, match="one hash"):
        decode(data)


def test_depth_is_bounded_both_ways() -> None:
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(NotPlain, match="too deep"):
        encode(deep)
    with pytest.raises(NotPlain, match="too deep"):
        decode(deep)


def test_output_is_compared_by_lines_and_numbers() -> None:
    assert same_output("1 2 \n3\n\n", "1 2\n3", 0.0)
    assert not same_output("1 2 3", "1 2\n3", 0.0)
    assert not same_output("a", "A", 0.0)
    assert not same_output("nan", "NaN", 0.0)
    assert same_output("1.0000001", "1", 1e-6)
    assert not same_output("1.0000001", "1", 0.0)
    assert not same_output("9" * 100_000, "8" * 100_000, 1.0)


def test_values_are_compared_as_json_has_them() -> None:
    assert same_value((1, 2), [1, 2], 0.0)
    assert same_value([1, 2], [[1, 2]], 0.0)
    assert same_value({1: 2}, {"1": 2}, 0.0)
    assert not same_value([1, 2], [2, 1], 0.0)
    assert not same_value("1", 1, 0.0)
    assert same_value(0.1 + 0.2, 0.3, 1e-9) and not same_value(0.1 + 0.2, 0.3, 0.0)
