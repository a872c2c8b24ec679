"""The reward for programs."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import ClassVar

from runspec.core.schema import Reward
from sampler.sandbox import Limits
from sampler.tasks.grading.launch import mechanisms
from sampler.tasks.interfaces import Score, TaskTerm
from sampler.tasks.rewards.code.formats import read_tests
from sampler.tasks.rewards.code.judge import Judge, program_of
from verify.plugins import Problem

TIMEOUT_S = 60.0
LIMITS = Limits(
    memory_bytes=1 << 30,
    processes=16,
    file_bytes=16 << 20,
    output_bytes=4 << 20,
)


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
        tests = read_tests(problem.verification)
        limits = replace(LIMITS, cpu_s=self._timeout_s)
        judge = Judge(self._mechanisms, limits, time.monotonic() + self._timeout_s)
        reason = judge.judge(program_of(answer), tests)
        return Score(0.0 if reason else 1.0, reason)
