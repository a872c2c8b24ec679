"""Whether a program passes its tests. The program never sees the tests, and says nothing here but
values: the judgement is made outside its sandbox."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any

from sampler.grading.channel import ChannelClosed, Overdue
from sampler.sandbox import PYTHON, Limits, run
from sampler.tasks.rewards.code.compare import same_output, same_value
from sampler.tasks.rewards.code.formats import CallTest, CheckTests, StdioTest, Tests
from sampler.tasks.rewards.code.plain import decode, encode
from sampler.tasks.rewards.code.program import MAX_PROGRAM_CHARS, completions
from sampler.tasks.rewards.code.sessions import Program, ProgramFailed, Session

MAX_CALLS = 200_000
"""Calls of one program that its tests may make."""
TESTS_S = 10.0
"""Time that tests which are code have for themselves once the program's is over: one that uses up
its own puts no blame on them."""


@dataclass(frozen=True)
class Judge:
    """Runs one program against its tests."""

    mechanisms: Sequence[str]
    """Isolate each process."""
    limits: Limits
    """Of each process."""
    deadline: float
    """Of all of it (`time.monotonic`)."""

    def judge(self, program: str, tests: Tests) -> str:
        """Runs a program against all its tests, up to the first that fails.

        Args:
            program: Python source.
            tests: what it has to pass.

        Returns:
            Why it fails; empty where it passes all.

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
        files = {"main.py": program.encode(errors="replace")}
        for number, test in enumerate(tests, start=1):
            place = f"test {number} of {len(tests)}"
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise ProgramFailed(f"{place}: the program took too long")
            done = run(
                [*PYTHON, "main.py"],
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
        setup = {"candidates": [program], "entry_point": None}
        with self._session("inside_program", setup) as session:
            called = Program(session)
            called.load()
            for number, test in enumerate(tests, start=1):
                place = f"test {number} of {len(tests)}"
                answer = called.call(test.name, encode(test.arguments), encode({}))
                if "raised" in answer:
                    raise ProgramFailed(f"{place}: {answer['text']}")
                if not _right(decode(answer["value"]), test.expected, tolerance):
                    raise ProgramFailed(f"{place}: returned another value")

    def _run_check(self, program: str, tests: CheckTests) -> None:
        candidates = completions(tests.prompt, program) if tests.prompt else [program]
        model = {"candidates": candidates, "entry_point": tests.entry_point}
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
            with _tests_at_fault(checker):
                checker.set_up(functions=names)
                message = checker.receive()
            _answer_calls(called, checker, message, set(names))

    def _session(self, side: str, setup: dict[str, Any], longer_s: float = 0.0) -> Session:
        deadline = self.deadline + longer_s
        limits = replace(self.limits, wall_s=max(0.01, deadline - time.monotonic()))
        return Session(side, setup, self.mechanisms, limits, deadline)


def _right(returned: Any, expected: Any, tolerance: float) -> bool:
    try:
        return same_value(returned, expected, tolerance)
    except (ValueError, OverflowError):  # keys or numbers beyond what Python prints
        return False


def _answer_calls(
    called: Program, checker: Session, message: dict[str, Any], names: set[str]
) -> None:
    """Hands the tests' calls to the program until they say how it ends."""
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
        except (ChannelClosed, Overdue) as error:  # on what the program returned
            raise ProgramFailed("the tests did not end in time, or met a limit") from error
    raise ProgramFailed(f"more than {MAX_CALLS} calls")


@contextmanager
def _tests_at_fault(checker: Session) -> Iterator[None]:
    """Before the first call, whatever goes wrong with the tests is no doing of the program."""
    try:
        yield
    except (ChannelClosed, Overdue) as error:
        raise ValueError(f"the tests cannot be run: {checker.fate()}") from error


def _short(text: str) -> str:
    return repr(shorten(text[:400], 120))
