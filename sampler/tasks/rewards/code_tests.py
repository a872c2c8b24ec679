"""Reader of a programming problem: the tests in its verification_info, in the forms of several data
sets, and the program in an answer."""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from textwrap import dedent, indent
from typing import Any

MAX_TESTS = 10_000
MAX_TEXT_CHARS = 32 * 1024 * 1024
FENCE = "```"
RECURSION = 50_000
"""As LeetCode's and LiveCodeBench's evaluators have it."""
_MODULES = (
    *("typing", "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math"),
    *("random", "statistics", "itertools", "functools", "operator", "io", "sys", "json"),
)
"""In its order: of two modules that have a name, the later one gives it. Only `typing` is earlier
than there, for its Counter is no class."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


class Malformed(ValueError):
    """A verification_info that cannot be read; the message names the field."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"verification_info.{field}: {reason}")


@dataclass(frozen=True)
class StdioTest:
    """The program is run on `given` and has to print `expected`."""

    given: str
    expected: str


@dataclass(frozen=True)
class CallTest:
    """`name(*arguments)` has to return `expected`."""

    name: str
    arguments: list[Any]
    expected: Any


@dataclass(frozen=True)
class CheckTests:
    """Test code that calls the program."""

    prompt: str
    """Code that the program completes; empty where there is none."""
    entry_point: str | None
    """Name of the function that is passed to the `check` that `before` defines."""
    before: list[tuple[str, str]]
    """(field, source) of code that runs first."""
    asserts: list[tuple[str, str]]
    """(field, source) of statements that must not raise."""


@dataclass(frozen=True)
class Tests:
    """All that a program has to pass."""

    stdio: list[StdioTest]
    calls: list[CallTest]
    check: CheckTests | None = None
    tolerance: float = 0.0
    """Relative and absolute, for numbers in what is printed or returned."""


def read_tests(info: Mapping[str, Any]) -> Tests:
    """Parse the tests of a problem.

    Raises:
        Malformed: a field is missing or has a wrong value.
    """
    language = info.get("language", "python")
    if str(language).lower() not in ("python", "python3", "py"):
        raise Malformed("language", f"{language!r:.80} is not python")
    tolerance = info.get("float_tolerance", 0.0)
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or tolerance < 0:
        raise Malformed("float_tolerance", f"{tolerance!r:.80} is no number >= 0")
    if "test_cases" in info:
        stdio, calls = _test_cases(_json(info["test_cases"], "test_cases"))
    elif "inputs" in info or "outputs" in info:
        stdio, calls = _inputs_outputs(info)
    elif "test" in info:  # HumanEval
        name = _text(info.get("entry_point"), "entry_point")
        if not name.isidentifier():
            raise Malformed("entry_point", f"{name!r:.80} is no name")
        prompt = _text(info.get("prompt", ""), "prompt")
        return Tests([], [], CheckTests(prompt, name, [("test", _text(info["test"], "test"))], []))
    elif "test_list" in info:
        return Tests([], [], _mbpp(info))
    else:
        raise Malformed("*", "has none of test_cases, inputs and outputs, test, test_list")
    return Tests(stdio, calls, tolerance=float(tolerance))


def _test_cases(cases: Any) -> tuple[list[StdioTest], list[CallTest]]:
    """Parse the tests of SYNTHETIC-1 and INTELLECT-2."""
    stdio, calls = [], []
    for place, case in _each(cases, "test_cases"):
        if not isinstance(case, Mapping):
            raise Malformed(place, "is no object")
        for field in ("input", "output"):
            if field not in case:
                raise Malformed(f"{place}.{field}", "is missing")
        kind = case.get("type", "function_call" if case.get("fn_name") else "stdin_stdout")
        if kind == "stdin_stdout":
            stdio.append(_stdio(case["input"], case["output"], place))
        elif kind == "function_call":
            calls.append(_call(case.get("fn_name"), case["input"], case["output"], place))
        else:
            raise Malformed(f"{place}.type", f"{kind!r:.80} is not stdin_stdout or function_call")
    return stdio, calls


def _inputs_outputs(info: Mapping[str, Any]) -> tuple[list[StdioTest], list[CallTest]]:
    """Parse the tests of APPS and LiveCodeBench."""
    inputs, outputs = (_each(_json(info.get(f), f), f) for f in ("inputs", "outputs"))
    if len(inputs) != len(outputs):
        raise Malformed("outputs", f"{len(outputs)} for {len(inputs)} inputs")
    rows = [(given, out, place) for (place, given), (_, out) in zip(inputs, outputs, strict=True)]
    if name := info.get("fn_name"):
        return [], [_call(name, *row) for row in rows]
    return [_stdio(*row) for row in rows], []


def _mbpp(info: Mapping[str, Any]) -> CheckTests:
    tests = _each(_json(info["test_list"], "test_list"), "test_list")
    asserts = [(place, _text(test, place)) for place, test in tests]
    imports = info.get("test_imports", [])
    if not isinstance(imports, list):
        raise Malformed("test_imports", "is no list")
    before = [("test_imports", _text(line, "test_imports")) for line in imports]
    setup = _text(info.get("test_setup_code") or "", "test_setup_code")
    return CheckTests("", None, [*before, ("test_setup_code", setup)], asserts)


def _stdio(given: Any, expected: Any, place: str) -> StdioTest:
    return StdioTest(_lines(given, f"{place}.input"), _lines(expected, f"{place}.output"))


def _call(name: Any, given: Any, expected: Any, place: str) -> CallTest:
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("__"):
        raise Malformed("fn_name", f"{name!r:.80} is no name ({place})")
    if isinstance(given, str):  # LiveCodeBench: a line of JSON an argument, the result as JSON
        arguments = [_json(line, place) for line in given.split("\n") if line.strip()]
        return CallTest(name, arguments, _json(expected, place, else_text=True))
    return CallTest(name, given if isinstance(given, list) else [given], expected)


def _json(text: Any, place: str, *, else_text: bool = False) -> Any:
    """Return a field that may be JSON in a string."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if else_text:
            return text
        raise Malformed(place, "an argument is no JSON") from error


def _lines(value: Any, place: str) -> str:
    """Return the text of a standard stream, which APPS may store as a list of lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return _text(value, place)


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise Malformed(place, "is missing" if value is None else f"is {type(value).__name__}")
    if len(value) > MAX_TEXT_CHARS:
        raise Malformed(place, f"{len(value)} characters are over the limit")
    return value


def _each(values: Any, field: str) -> list[tuple[str, Any]]:
    if not isinstance(values, list):
        raise Malformed(field, "is missing" if values is None else "is no list")
    if not 1 <= len(values) <= MAX_TESTS:
        raise Malformed(field, f"has {len(values)} tests")
    return [(f"{field}[{index}]", value) for index, value in enumerate(values)]


def program_of(answer: str) -> str:
    """Return the last fenced code block of an answer, closed or not; all of it if there is none."""
    block: list[str] | None = None
    last: str | None = None
    margin = 0
    for line in answer.replace("\r\n", "\n").split("\n"):
        text = line.lstrip()
        if not text.startswith(FENCE):
            if block is not None:
                block.append(line[margin:] if not line[:margin].strip() else line)
        elif block is None:
            block, margin = [], len(line) - len(text)
        else:
            last, block = "\n".join(block), None
    if block:
        last = "\n".join(block)
    return answer if last is None else last


def completions(prompt: str, text: str) -> list[str]:
    """Return the programs that a completion of a prompt may stand for, in the order to try them.

    The completion is the whole function or only its body, whose first line may lack indentation.
    """
    body = dedent(text).strip("\n")
    return [
        f"{prompt}\n\n{text}",
        text,
        f"{prompt}{text}",
        f"{prompt}    {text.lstrip()}",
        f"{prompt}{indent(body, '    ')}",
    ]


def with_names(program: str) -> str:
    """Return imports of the names in a program that the standard library's modules have."""
    origins, used = _origins(), set(_NAME.findall(program))
    lines = [f"import {module}" for module in _MODULES if module in used]
    found = sorted(used & origins.keys())
    return "\n".join([f"from {origins[name]} import {name}" for name in found] + lines)


def started_by(program: str) -> str:
    """Return the script that runs `program.py` beside it as the main program."""
    return (
        f"{with_names(program)}\nimport sys\nsys.setrecursionlimit({RECURSION})\n"
        'exec(compile(open("program.py", "rb").read(), "program.py", "exec", dont_inherit=True))\n'
    )


@lru_cache
def _origins() -> dict[str, str]:
    """Return the module of each name that star imports of the modules give. Python's own names, and
    those of the modules themselves, keep their meaning."""
    found: dict[str, str] = {}
    for name in _MODULES:
        module = import_module(name)
        public = getattr(module, "__all__", [each for each in dir(module) if each[0] != "_"])
        found |= dict.fromkeys(public, name)
    kept = {*dir(builtins), *_MODULES}
    return {name: module for name, module in found.items() if name not in kept}
