"""Grades one answer by a term, in a grader process or a thread; and the loop of that process.

The process runs in the sandbox: it reads answers from standard input and writes scores to standard
output. Output of a term goes to standard error; an error of a term is a fault.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from runspec.core.errors import describe_error
from runspec.core.schema import Reward
from sampler.tasks.interfaces import Score, TaskTerm, completed
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


def main() -> None:
    """Serve until standard input ends."""
    # Moved to other descriptors, so that a `print` of a term is not read as a message.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115

    def write(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    setup = json.loads(requests.readline())
    try:
        terms = {}
        for kind, (module, attribute, reward) in setup["terms"].items():
            made = completed(attrgetter(attribute)(importlib.import_module(module)))
            term = made(Reward.model_validate(reward))
            if term.role == "length":
                raise TypeError(f"{module}:{attribute} grades lengths, not answers")
            term.prepare()
            terms[kind] = term
    except Exception as error:  # noqa: BLE001 - whatever it is, the other side reports it
        write({"failed": describe_error(error)[:MAX_REASON]})
        return
    write({"ready": True})
    while line := requests.readline():
        for item in json.loads(line):
            term, answer = terms[item.pop("kind")], item.pop("answer")
            write(reply_of(term, Problem(**item), answer))
