"""Judge of programs: takes the program from the answer, runs it, compares outputs and values.

The program never sees the tests and returns only values. The comparison is made outside its
sandbox.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from textwrap import dedent, indent, shorten
from typing import Any

from sampler.sandbox import PYTHON, Limits, run
from sampler.tasks.grading.launch import ChannelClosed, Overdue
from sampler.tasks.rewards.code.formats import CallTest, CheckTests, StdioTest, Tests
from sampler.tasks.rewards.code.plain import decode, encode
from sampler.tasks.rewards.code.sessions import (
    Program,
    ProgramFailed,
    Session,
    started_by,
    with_names,
)

_MAX_NUMBER_CHARS = 400
_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(\.[0-9]*)?|(\.[0-9]+))([eE][+-]?[0-9]{1,4})?")
"""A number, as opposed to a string of digits, which may begin with zeros. The groups are what a
whole number lacks."""
_BLANK = " \t\r\n\f\v"
DEFAULT_TOLERANCE = 1e-6
"""Tolerance, relative or absolute, for numbers whose expected value is no whole number."""
FENCE = "```"
MAX_PROGRAM_CHARS = 256 * 1024
MAX_CALLS = 200_000
"""Most calls of one program that its tests may make."""
TESTS_S = 10.0
"""Seconds that tests which are code have beyond the program's time, so that a program that uses up
its time does not look like a fault of the tests."""


@dataclass(frozen=True)
class Judge:
    """Runs one program against its tests."""

    mechanisms: Sequence[str]
    """Mechanisms that isolate each process."""
    limits: Limits
    """Limits of each process."""
    deadline: float
    """Deadline of the whole judgement (`time.monotonic`)."""

    def judge(self, program: str, tests: Tests) -> str:
        """Run a program against all its tests, up to the first that fails.

        Args:
            program: Python source.
            tests: the tests that it has to pass.

        Returns:
            Why it fails; empty if it passes all.

        Raises:
            ValueError: the tests themselves cannot be run.
        """
        if len(program) > MAX_PROGRAM_CHARS:
            return f"a program of {len(program)} characters, over {MAX_PROGRAM_CHARS}"
        if not program.strip():
            return "no program"
        try:
            self._run_stdio(program, tests.stdio, tests.tolerance)
            if tests.calls:
                self._run_calls(program, tests.calls, tests.tolerance)
            if tests.check is not None:
                self._run_check(program, tests.check)
        except ProgramFailed as failure:
            return str(failure)
        return ""

    def _run_stdio(self, program: str, tests: list[StdioTest], tolerance: float) -> None:
        source = program.encode(errors="replace")
        files = {"main.py": started_by(program).encode(), "program.py": source}
        for number, test in enumerate(tests, start=1):
            place = f"test {number} of {len(tests)}"
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise ProgramFailed(f"{place}: the program took too long")
            done = run(
                [*PYTHON, "-X", "int_max_str_digits=0", "main.py"],
                stdin=test.given.encode(errors="replace"),
                limits=replace(self.limits, wall_s=left),
                files=files,
                mechanisms=self.mechanisms,
            )
            if not done.ok:
                raise ProgramFailed(f"{place}: {done.describe()}")
            printed = done.stdout.decode(errors="replace")
            if not same_output(printed, test.expected, tolerance):
                raise ProgramFailed(f"{place}: printed {_short(printed)}")

    def _run_calls(self, program: str, tests: list[CallTest], tolerance: float) -> None:
        setup = {"candidates": [program], "entry_point": None, "names": with_names(program)}
        with self._session("inside_program", setup) as session:
            called = Program(session)
            called.load()
            for number, test in enumerate(tests, start=1):
                place = f"test {number} of {len(tests)}"
                answer = called.call(test.name, encode(test.arguments), encode({}))
                if "raised" in answer:
                    raise ProgramFailed(f"{place}: {answer['text']}")
                try:
                    right = same_value(decode(answer["value"]), test.expected, tolerance)
                except (ValueError, OverflowError):  # too large for Python to print
                    right = False
                if not right:
                    raise ProgramFailed(f"{place}: returned another value")

    def _run_check(self, program: str, tests: CheckTests) -> None:
        candidates = completions(tests.prompt, program) if tests.prompt else [program]
        model = {"candidates": candidates, "entry_point": tests.entry_point, "names": ""}
        data_set: dict[str, Any] = {
            "prompt": tests.prompt,
            "entry_point": tests.entry_point,
            "before": tests.before,
            "asserts": tests.asserts,
        }
        with (
            self._session("inside_program", model) as session,
            self._session("inside_tests", data_set, TESTS_S) as checker,
        ):
            called = Program(session)
            names = called.load()
            if tests.entry_point is not None and tests.entry_point not in names:
                names.append(tests.entry_point)
            try:
                checker.set_up(functions=names)
                message = checker.receive()
            except (ChannelClosed, Overdue) as error:  # before any call: the tests cause it
                raise ValueError(f"the tests cannot be run: {checker.exit_reason()}") from error
            _answer_calls(called, checker, message, set(names))

    def _session(self, side: str, setup: dict[str, Any], longer_s: float = 0.0) -> Session:
        deadline = self.deadline + longer_s
        limits = replace(self.limits, wall_s=max(0.01, deadline - time.monotonic()))
        return Session(side, setup, self.mechanisms, limits, deadline)


def _answer_calls(
    called: Program, checker: Session, message: dict[str, Any], names: set[str]
) -> None:
    """Forward the tests' calls to the program until the tests report a result."""
    for _ in range(MAX_CALLS):
        if message.get("passed") is True:
            return
        if "failed" in message:
            raise ProgramFailed(f"the tests: {_short(str(message['failed']))}")
        if message.get("call") not in names:
            raise ValueError(str(message.get("fault", "the tests broke the protocol")))
        answer = called.call(message["call"], message["args"], message["named"])
        try:
            checker.send(answer)
            message = checker.receive()
        except (ChannelClosed, Overdue) as error:  # caused by what the program returned
            raise ProgramFailed("the tests did not end in time, or met a limit") from error
    raise ProgramFailed(f"more than {MAX_CALLS} calls")


def _short(text: str) -> str:
    return repr(shorten(text[:400], 120))


def same_output(printed: str, expected: str, tolerance: float) -> bool:
    """Compare outputs line by line, without blanks at the ends of lines and of the whole.

    Lines also match if all their words are numbers of equal value (1.0 and 1.00), which may differ
    by `tolerance`, relative or absolute; without one, those that are no whole numbers may differ by
    `DEFAULT_TOLERANCE`. Only a line feed ends a line.
    """
    ours, theirs = (text.strip(_BLANK).split("\n") for text in (printed, expected))
    return len(ours) == len(theirs) and all(
        a.strip(_BLANK) == b.strip(_BLANK) or _same_numbers(_words(a), _words(b), tolerance)
        for a, b in zip(ours, theirs, strict=True)
    )


def _words(line: str) -> list[str]:
    return [word for word in re.split(f"[{_BLANK}]+", line) if word]


def same_value(returned: Any, expected: Any, tolerance: float) -> bool:
    """Compare plain data, tuples as lists; a list of one may stand for its element (APPS).

    Expected data comes from JSON, so object keys are compared as texts.
    """
    ours, theirs = _as_json(returned), _as_json(expected)
    if _equal(ours, theirs, tolerance):
        return True
    return isinstance(theirs, list) and len(theirs) == 1 and _equal(ours, theirs[0], tolerance)


def _same_numbers(ours: list[str], theirs: list[str], tolerance: float) -> bool:
    if len(ours) != len(theirs):
        return False
    for a, b in zip(ours, theirs, strict=True):
        if a == b:
            continue
        if max(len(a), len(b)) > _MAX_NUMBER_CHARS:
            return False
        if not _NUMBER.fullmatch(a) or (wanted := _NUMBER.fullmatch(b)) is None:
            return False
        left, right = Decimal(a), Decimal(b)
        apart = tolerance or (DEFAULT_TOLERANCE if any(wanted.groups()) else 0.0)
        if left != right and not _close(float(left), float(right), apart):
            return False
    return True


def _close(left: float, right: float, apart: float) -> bool:
    return math.isclose(left, right, rel_tol=apart, abs_tol=apart)


def _as_json(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    return value


def _equal(ours: Any, theirs: Any, tolerance: float) -> bool:
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(
            _equal(a, b, tolerance) for a, b in zip(ours, theirs, strict=True)
        )
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(
            _equal(ours[key], theirs[key], tolerance) for key in theirs
        )
    if isinstance(ours, float) and isinstance(theirs, float):
        return _close(ours, theirs, tolerance or DEFAULT_TOLERANCE)
    if tolerance and isinstance(ours, float) and isinstance(theirs, int):
        return _close(ours, theirs, tolerance)
    return bool(ours == theirs)


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
