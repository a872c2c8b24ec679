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
MAX_REASON = 400
"""Characters of a reason or a fault."""
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


def reply_of(term: TaskTerm, problem: Problem, answer: str) -> dict[str, Any]:
    """Grade an answer by a term, which may be a plug-in and raise or return whatever it likes.

    Returns:
        JSON data: `value` and `reason`; or `fault`, why there is none; or `memory`, where it ran
        out of that.
    """
    try:
        given = term.score(problem, answer)
    except MemoryError:
        return {"memory": True}
    except Exception as error:  # noqa: BLE001
        package = (getattr(term.score, "__module__", None) or "").partition(".")[0]
        return {"fault": describe_error(error, package)[:MAX_REASON]}
    score = given if isinstance(given, Score) else Score(given)
    value: Any = score.value
    if not isinstance(value, (int, float)):
        return {"fault": f"the grader returned {value!r:.80}"}
    return {"value": float(value), "reason": str(score.reason)[:MAX_REASON]}


def result_of(answer: Answer, reply: Mapping[str, Any], rules: TermRules) -> Result:
    """Return the result in a reply of `reply_of`, which may be another process's."""
    if reply.get("memory"):
        return over_limit(answer, "out of memory", rules)
    if "value" not in reply:
        return fault(answer.problem, str(reply.get("fault", "the grader said nothing")))
    value = reply["value"]
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return fault(answer.problem, f"the grader returned {value!r:.80}")
    return Score(float(value), str(reply.get("reason", "")))


def over_limit(answer: Answer, reason: str, rules: TermRules) -> Result:
    """Return the result of an answer whose grading hit a limit: 0 or a fault, by
    `limits_blame_answer`."""
    if rules.limits_blame_answer:
        return Score(0.0, reason)
    return fault(answer.problem, reason)
