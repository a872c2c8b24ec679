"""Parser of the verification_info of programming problems, in the forms of several data sets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_TESTS = 10_000
MAX_TEXT_CHARS = 32 * 1024 * 1024


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
        stdio, calls = _test_cases(_unpacked(info["test_cases"], "test_cases"))
    elif "inputs" in info or "outputs" in info:
        stdio, calls = _inputs_outputs(info)
    elif "test" in info:
        return Tests([], [], _human_eval(info))
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
    inputs = [item for _, item in _each(_unpacked(info.get("inputs"), "inputs"), "inputs")]
    outputs = [item for _, item in _each(_unpacked(info.get("outputs"), "outputs"), "outputs")]
    if len(inputs) != len(outputs):
        raise Malformed("outputs", f"{len(outputs)} for {len(inputs)} inputs")
    pairs = list(enumerate(zip(inputs, outputs, strict=True)))
    if info.get("fn_name"):
        name = info["fn_name"]
        return [], [_call(name, given, out, f"inputs[{i}]") for i, (given, out) in pairs]
    return [_stdio(given, out, f"inputs[{i}]") for i, (given, out) in pairs], []


def _human_eval(info: Mapping[str, Any]) -> CheckTests:
    name = _text(info.get("entry_point"), "entry_point")
    if not name.isidentifier():
        raise Malformed("entry_point", f"{name!r:.80} is no name")
    prompt = _text(info.get("prompt", ""), "prompt")
    return CheckTests(prompt, name, [("test", _text(info["test"], "test"))], [])


def _mbpp(info: Mapping[str, Any]) -> CheckTests:
    tests = _each(_unpacked(info["test_list"], "test_list"), "test_list")
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


def _unpacked(value: Any, place: str) -> Any:
    """Return a field that may be JSON in a string."""
    return _json(value, place) if isinstance(value, str) else value


def _each(values: Any, field: str) -> list[tuple[str, Any]]:
    if not isinstance(values, list):
        raise Malformed(field, "is missing" if values is None else "is no list")
    if not 1 <= len(values) <= MAX_TESTS:
        raise Malformed(field, f"has {len(values)} tests")
    return [(f"{field}[{index}]", value) for index, value in enumerate(values)]
