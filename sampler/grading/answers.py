"""What is graded, and what a grader may cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runspec.core.errors import describe_error
from sampler.tasks.interfaces import Score, TaskTerm
from verify.plugins import GraderFault, Problem

MAX_ANSWER_CHARS = 1 << 20
"""Longest answer that is graded; a longer one is wrong."""
MAX_GRADERS = 16
"""Processes and threads that grade at once, whatever the number of cores."""

_MAX_ID = 80
"""Characters of a problem's id in a fault."""


@dataclass(frozen=True)
class Answer:
    """One answer to grade."""

    problem: Problem
    """Its `task_type` names the term."""
    text: str
    """What stands after `</think>`."""


@dataclass(frozen=True)
class TermRules:
    """How a kind of answer is to be graded; see `interfaces.TaskTerm`."""

    timeout_s: float
    repeatable: bool
    limits_blame_answer: bool


Result = Score | GraderFault


def fault(problem: Problem, reason: str) -> GraderFault:
    return GraderFault(f"{problem.problem_id[:_MAX_ID]}: {reason}")


def raised(term: TaskTerm, error: Exception) -> str:
    """Says what a term raised, and where in its package."""
    module = getattr(term.score, "__module__", None) or ""
    return describe_error(error, module.partition(".")[0])


def checked(problem: Problem, given: Any, reason: str = "") -> Result:
    """A score, or the fault that it is no finite number."""
    if not isinstance(given, (int, float)) or not math.isfinite(given):
        return fault(problem, f"the grader returned {given!r:.80}")
    return Score(float(given), reason)


def result_of(answer: Answer, reply: Mapping[str, Any], rules: TermRules) -> Result:
    """What a grader process said of an answer."""
    if reply.get("memory"):
        return over_limit(answer, "out of memory", rules)
    if "value" not in reply:
        return fault(answer.problem, str(reply.get("fault", "the grader said nothing")))
    return checked(answer.problem, reply["value"], str(reply.get("reason", "")))


def over_limit(answer: Answer, reason: str, rules: TermRules) -> Result:
    """An answer whose grading met a limit: wrong, or nobody's reward (`limits_blame_answer`)."""
    if rules.limits_blame_answer:
        return Score(0.0, reason)
    return fault(answer.problem, reason)
