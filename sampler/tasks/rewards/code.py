"""The reward for programs: takes the program from the answer, runs it, compares what it returns.

The program never sees the tests and returns only values. The comparison is made outside its
sandbox. Functions of a program, and tests that are code, run in processes that answer messages
(`code_inside`), each in a sandbox of its own.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from textwrap import shorten
from typing import Any, ClassVar

from runspec.core.schema.training import Reward
from sampler.sandbox import PYTHON, Limits, run, start
from sampler.tasks.interfaces import Score, TaskTerm
from sampler.tasks.launch import Channel, ChannelClosed, NoMessage, Overdue, mechanisms
from sampler.tasks.rewards import code_tests
from sampler.tasks.rewards.code_inside import NotPlain, decode, encode
from verify.plugins import Problem

_MAX_NUMBER_CHARS = 400
_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(\.[0-9]*)?|(\.[0-9]+))([eE][+-]?[0-9]{1,4})?")
"""A number, as opposed to a string of digits, which may begin with zeros. The groups are what a
whole number lacks."""
_BLANK = " \t\r\n\f\v"
DEFAULT_TOLERANCE = 1e-6
"""Tolerance, relative or absolute, for numbers whose expected value is no whole number."""
MAX_PROGRAM_CHARS = 256 * 1024
MAX_CALLS = 200_000
"""Most calls of one program that its tests may make."""
TESTS_S = 10.0
"""Seconds that tests which are code have beyond the program's time, so that a program that uses up
its time does not look like a fault of the tests."""
MAX_REPLY_BYTES = 2 * 1024 * 1024
"""Longest message from a program or from tests."""
TIMEOUT_S = 60.0
LIMITS = Limits(memory_bytes=1 << 30, processes=16, file_bytes=16 << 20, output_bytes=4 << 20)


class CodeReward(TaskTerm):
    """1 for a Python program that passes all tests of its problem, else 0 with the reason.

    The program is the answer's last fenced code block, or the answer. It runs in a sandbox of its
    own, and so do tests that are code; docs/rewards.md lists the forms of verification_info.

    Raises:
        UserError: no sandbox works on this machine, and the reward needs one (`sandboxed`).
    """

    isolated: ClassVar[bool] = False
    repeatable: ClassVar[bool] = False
    executes_answers: ClassVar[bool] = True
    timeout_s: ClassVar[float] = TIMEOUT_S

    def __init__(self, reward: Reward) -> None:
        place = f"reward.{reward.name}"
        self._mechanisms = mechanisms(required=reward.sandboxed, place=place)
        self._timeout_s = TIMEOUT_S if reward.timeout is None else float(reward.timeout)

    def score(self, problem: Problem, answer: str) -> Score:
        """Run the answer's program against the problem's tests.

        Raises:
            ValueError: verification_info cannot be read, or its tests cannot be run.
        """
        tests = code_tests.read_tests(problem.verification)
        limits = replace(LIMITS, cpu_s=self._timeout_s)
        judge = Judge(self._mechanisms, limits, time.monotonic() + self._timeout_s)
        reason = judge.judge(code_tests.program_of(answer), tests)
        return Score(0.0 if reason else 1.0, reason)


@dataclass(frozen=True)
class Judge:
    """Runs one program against its tests."""

    mechanisms: Sequence[str]
    """Mechanisms that isolate each process."""
    limits: Limits
    """Limits of each process."""
    deadline: float
    """Deadline of the whole judgement (`time.monotonic`)."""

    def judge(self, program: str, tests: code_tests.Tests) -> str:
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

    def _run_stdio(self, program: str, tests: list[code_tests.StdioTest], tolerance: float) -> None:
        source = program.encode(errors="replace")
        files = {"main.py": code_tests.started_by(program).encode(), "program.py": source}
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

    def _run_calls(self, program: str, tests: list[code_tests.CallTest], tolerance: float) -> None:
        setup = {
            "candidates": [program],
            "entry_point": None,
            "names": code_tests.with_names(program),
        }
        with Session(self, "program", setup) as called:
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

    def _run_check(self, program: str, tests: code_tests.CheckTests) -> None:
        candidates = code_tests.completions(tests.prompt, program) if tests.prompt else [program]
        model = {"candidates": candidates, "entry_point": tests.entry_point, "names": ""}
        longer = replace(self, deadline=self.deadline + TESTS_S)
        with (
            Session(self, "program", model) as called,
            Session(longer, "tests", vars(tests)) as checker,
        ):
            names = called.load()
            if tests.entry_point is not None and tests.entry_point not in names:
                names.append(tests.entry_point)
            try:
                checker.set_up(functions=names)
                message = checker.receive()
            except (ChannelClosed, Overdue) as error:  # before any call: the tests cause it
                raise ValueError(f"the tests cannot be run: {checker.exit_reason()}") from error
            _answer_calls(called, checker, message, set(names))


class ProgramFailed(Exception):
    """The program failed; the message says how."""


class Session:
    """A process in the sandbox that answers messages: the program, whose replies are not trusted,
    or tests.

    Args:
        judge: has the mechanisms, the limits and the deadline.
        side: `program` or `tests`.
        setup: its first message.
    """

    def __init__(self, judge: Judge, side: str, setup: dict[str, Any]) -> None:
        self._deadline, self._calls = judge.deadline, 0
        self._setup = {"side": side, "recursion": code_tests.RECURSION, **setup}
        limits = replace(judge.limits, wall_s=max(0.01, judge.deadline - time.monotonic()))
        # The text is passed, because no file of ours is readable in the sandbox.
        source = Path(__file__).with_name("code_inside.py").read_text(encoding="utf-8")
        command = [*PYTHON, "-S", "-c", source]
        self._process = start(command, limits=limits, mechanisms=judge.mechanisms)
        pipes = self._process.stdout.fileno(), self._process.stdin.fileno()
        self._channel = Channel(*pipes, max_bytes=MAX_REPLY_BYTES)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()

    def set_up(self, **more: Any) -> None:
        """Send the first message, with fields that were not known at the start of the process."""
        self.send({**self._setup, **more})

    def send(self, message: dict[str, Any]) -> None:
        self._channel.send(message, self._deadline)

    def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            ChannelClosed: the process ended, or sent something that is not a message.
            Overdue: none arrived in time.
        """
        message = self._channel.receive(self._deadline)
        if not isinstance(message, dict):
            raise NoMessage("a message that is no object")
        return message

    def exit_reason(self) -> str:
        """Describe how the process ended."""
        return f"the program: {self._process.exit_reason()}"

    def load(self) -> list[str]:
        """Run the program; return the names of its public functions. Other names, such as
        `__builtins__`, may mean something to the interpreter.

        Raises:
            ProgramFailed: it raised, ended or broke the protocol.
        """
        reply = self._ask(self._setup)
        if "failed" in reply:
            raise ProgramFailed(f"the program: {_text(reply['failed'])}")
        names = reply.get("functions")
        if not isinstance(names, list):
            raise ProgramFailed("the program broke the protocol")
        return [
            name
            for name in names
            if isinstance(name, str) and name.isidentifier() and not name.startswith("_")
        ]

    def call(self, name: str, arguments: Any, named: Any) -> dict[str, Any]:
        """Call a function of the program with encoded arguments; return `{"value": encoded}` or
        `{"raised": kind, "text": text}`, whose depth is limited.

        Raises:
            ProgramFailed: the process ended or broke the protocol.
        """
        self._calls += 1
        reply = self._ask({"id": self._calls, "name": name, "args": arguments, "named": named})
        if reply.get("id") != self._calls:
            raise ProgramFailed("the program broke the protocol")
        if "value" in reply:
            try:
                return {"value": encode(decode(reply["value"]))}
            except (NotPlain, RecursionError) as error:
                raise ProgramFailed(f"{name} returned what is no plain data: {error}") from error
        return {"raised": _text(reply.get("raised")), "text": _text(reply.get("text"))}

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the program's reply; an error of the conversation is the program's failure."""
        try:
            self.send(message)
            return self.receive()
        except NoMessage as error:
            raise ProgramFailed(f"the program sent {error}") from error
        except ChannelClosed as error:
            raise ProgramFailed(f"{self.exit_reason()} ({error})") from error
        except Overdue as error:
            raise ProgramFailed("the program took too long") from error


def _answer_calls(
    called: Session, checker: Session, message: dict[str, Any], names: set[str]
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


def _text(value: object) -> str:
    return value[:400] if isinstance(value, str) else "Exception"
