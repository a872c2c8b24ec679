"""A Python interpreter as a tool: each call runs a program of its own in the sandbox."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from runspec.core.schema import Reward
from sampler.sandbox import Limits, run
from sampler.tasks.environments.calculator import evaluate
from sampler.tasks.environments.tools import ToolCall, ToolEnvironment, schema
from sampler.tasks.launch import mechanisms
from verify.plugins import Problem

CPU_S = 8.0
LIMITS = Limits(
    wall_s=30.0,
    memory_bytes=512 << 20,
    processes=1,  # no threads either, whose order is the kernel's
    file_bytes=1 << 20,
    output_bytes=16 << 10,
)
"""Of a program where a worker runs it. It may take `Environment.share` of CPU time and memory."""
SHOWN_CHARS = 2000
"""Characters of what a program printed that are shown, at most: its beginning."""


class OverLimit(Exception):
    """A program met a limit, so that what it printed depends on the machine."""


class Python(ToolEnvironment):
    """The tool `python`: runs a program and shows what it printed, up to its error. No program
    sees what another left. The answer is right if it is `verification_info.ground_truth`, as a
    number or as a text. Examples run `verification_info.program`.

    Equal programs print equal bytes: they have no clock, chance begins at 0, texts and addresses
    are hashed alike, and a program ends after a million lines (`python_inside`). A program that
    meets another limit makes the call fail, and the group is dropped.
    """

    isolated = False  # it starts sandboxes of its own
    executes_answers = True
    timeout_s = 60.0
    tools = (
        schema("python", "Runs a program; shows what it prints.", code="a whole Python program"),
    )
    max_tokens_per_turn, max_observation_tokens = 1024, 512

    def __init__(self, reward: Reward) -> None:
        self._mechanisms = mechanisms(required=reward.sandboxed, place=f"reward.{reward.name}")

    def use(self, problem: Problem, call: ToolCall) -> str:
        return self.printed(str(call.arguments.get("code", "")))

    def printed(self, program: str) -> str:
        """Run a program, and return what it printed.

        Raises:
            OverLimit: it met a limit, or used more than `share` of one.
        """
        inside = Path(__file__).with_name("python_inside.py").read_text(encoding="utf-8")
        done = run(
            [sys.executable, "-sSP", "-c", inside],
            files={"program.py": program.encode(errors="replace")},
            limits=replace(LIMITS, cpu_s=CPU_S * self.share),
            mechanisms=self._mechanisms,
            repeatable=True,
        )
        cut = done.outcome == "output"
        if (
            not (cut or done.outcome == "exit")
            or done.peak_bytes > self.share * LIMITS.memory_bytes
        ):
            raise OverLimit(f"a program met a limit: {done.describe()}")
        text = done.stdout.decode(errors="replace")
        if done.code and not cut:
            text += f"\nexit code {done.code}"
        if cut or len(text) > SHOWN_CHARS:
            return text[:SHOWN_CHARS] + " ... cut"
        return text.strip("\n") or "nothing printed"

    def judge(self, problem: Problem, answer: str) -> float:
        truth, given = str(problem.verification["ground_truth"]).strip(), answer.strip()
        try:
            return float(given == truth or evaluate(given.rstrip(".")) == evaluate(truth))
        except ValueError:
            return 0.0

    def example(self, problem: Problem) -> list[str] | None:
        program = problem.verification.get("program")
        if program is None:
            return None
        return [f"python({program})", str(problem.verification["ground_truth"])]
