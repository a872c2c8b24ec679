"""Answers to grade, limits of graders, and their results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runspec.core.errors import describe_error
from sampler.tasks.interfaces import Score, TaskTerm
from verify.plugins import GraderFault, Problem

MAX_ANSWER_CHARS = 1 << 20
"""Longest answer that is graded; longer ones get 0."""
MAX_GRADERS = 16
"""Most processes or threads that grade at once, whatever the number of cores."""

_MAX_ID = 80
"""Characters of a problem's id in a fault."""


@dataclass(frozen=True)
class Answer:
    """One answer to grade."""

    problem: Problem
    """Its `task_type` names the term."""
    text: str
    """The text after `</think>`."""


@dataclass(frozen=True)
class TermRules:
    """Rules for one kind of answer; see `interfaces.TaskTerm`."""

    timeout_s: float
    repeatable: bool
    limits_blame_answer: bool


Result = Score | GraderFault


def fault(problem: Problem, reason: str) -> GraderFault:
    return GraderFault(f"{problem.problem_id[:_MAX_ID]}: {reason}")


def raised(term: TaskTerm, error: Exception) -> str:
    """Describe the error that a term raised, with its place in the term's package."""
    module = getattr(term.score, "__module__", None) or ""
    return describe_error(error, module.partition(".")[0])


def checked(problem: Problem, given: Any, reason: str = "") -> Result:
    """Return a score, or a fault if the value is no finite number."""
    if not isinstance(given, (int, float)) or not math.isfinite(given):
        return fault(problem, f"the grader returned {given!r:.80}")
    return Score(float(given), reason)


def result_of(answer: Answer, reply: Mapping[str, Any], rules: TermRules) -> Result:
    """Return the result in a grader process's reply to an answer."""
    if reply.get("memory"):
        return over_limit(answer, "out of memory", rules)
    if "value" not in reply:
        return fault(answer.problem, str(reply.get("fault", "the grader said nothing")))
    return checked(answer.problem, reply["value"], str(reply.get("reason", "")))


def over_limit(answer: Answer, reason: str, rules: TermRules) -> Result:
    """Return the result of an answer whose grading hit a limit: 0 or a fault, by
    `limits_blame_answer`."""
    if rules.limits_blame_answer:
        return Score(0.0, reason)
    return fault(answer.problem, reason)
