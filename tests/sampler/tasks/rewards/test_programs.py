"""Programs are graded as the benchmarks' own evaluators do; each runs in the real sandbox."""

from __future__ import annotations

import json

import pytest

from runspec.core.schema import Reward
from sampler.tasks.rewards.code import CodeReward, same_output
from sampler.tasks.rewards.code_tests import program_of, with_names
from verify.plugins import Problem

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reward() -> CodeReward:
    return CodeReward(Reward(name="code", kind="task"))


def printing(expected: str, given: str = "", **more: object) -> dict[str, object]:
    return {"test_cases": [{"type": "stdin_stdout", "input": given, "output": expected}], **more}


def calling(name: str, given: object, expected: object) -> dict[str, object]:
    return {"fn_name": name, "inputs": [json.dumps(given)], "outputs": [json.dumps(expected)]}


METHOD = "class Solution:\n    def f(self, a):\n        return "


@pytest.mark.parametrize(
    ("program", "info", "right"),
    [
        # names of the standard library without an import, in scripts and methods
        (f"{METHOD}heapq.nsmallest(1, a)[0]", calling("f", [3, 1], 1), 1),
        (f"{METHOD}Counter(a).most_common(1)[0][0]", calling("f", "aab", "a"), 1),
        (f"{METHOD}min([inf, *a])\n    g: Optional[List] = 1", calling("f", [2], 2), 1),
        ("print(gcd(12, 18), deque([1])[0], sys.maxsize > 1)", printing("6 1 True"), 1),
        # the program's own functions, and Python's, before those of the library
        ("class Solution:\n    def count(self, n): return n + 1", calling("count", 1, 2), 1),
        ("def copy(a):\n    return a * 2\nprint(copy(2), pow(2, 5, 7))", printing("4 4"), 1),
        (
            "from __future__ import annotations\nif __name__ == '__main__': print(2)",
            printing("2"),
            1,
        ),
        # deep recursion and long numbers
        ("f = lambda n: n and 1 + f(n - 1)\nprint(f(20000))", printing("20000"), 1),
        ("print(int(input()) + 1)", printing("1" + "0" * 5000, "9" * 5000), 1),
        ("def f(n):\n    return len(str(7 ** n))", calling("f", 6000, 5071), 1),
        # real numbers within 1e-6, whole ones exactly
        ("print('%.6f' % (1 / 7))", printing("0.142857142857"), 1),
        ("print(0.34)", printing("0.333333333333"), 0),
        ("print(10 ** 8 + 1)", printing("100000000"), 0),
        ("print(100000000.00001)", printing("100000000"), 0),
        ("def f(n):\n    return n / 3 + 1e-9", calling("f", 1, 1 / 3), 1),
        ("def f(n):\n    return n + 1", calling("f", 10**8, 10**8), 0),
        ("print(2.5)", printing("2", float_tolerance=0.5), 1),
        # strings of digits are no numbers
        ("print('101')", printing("0101"), 0),
        ("print('1_0')", printing("10"), 0),
        ("print('\\u0661\\u0662')", printing("12"), 0),
        ("print('1.0', '-0', '1e3')", printing("1 0 1000"), 1),
    ],
)
def test_a_program_is_graded_as_elsewhere(
    reward: CodeReward, program: str, info: dict[str, object], right: int
) -> None:
    score = reward.score(Problem("p", "code", "", info), f"```python\n{program}\n```")
    assert (score.value, score.reason == "") == (right, bool(right)), score.reason


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\f", "\v", "\x1c"])
def test_only_a_line_feed_ends_a_line(separator: str) -> None:
    assert program_of(f"```\ns = 'a{separator}b'\n```") == f"s = 'a{separator}b'"
    assert same_output(f"a{separator}b\r\nc \n", f"a{separator}b\nc", 0.0)
    assert not same_output("a\nb", f"a{separator}b", 0.0)


def test_only_names_that_occur_are_imported() -> None:
    assert with_names("print(1 + x)") == ""
    assert with_names("Counter(pow(2, 3)); math.pi").splitlines() == [
        "from collections import Counter", "from math import pi", "import math",
    ]  # fmt: skip
