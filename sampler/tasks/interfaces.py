"""Interfaces of sources and reward terms, found by kind among the entry points; how a term grades.

[project.entry-points."runspec.sources"]
reasoning_gym = "sampler.tasks.gym:GymSource"

[project.entry-points."runspec.rewards"]
reasoning_gym = "sampler.tasks.gym:GymReward"
target_length = "sampler.tasks.interfaces:TargetLengthReward"

`main` is the loop of a grader process, which runs in the sandbox: it reads answers from standard
input and writes scores to standard output. Output of a term goes to standard error; an error of a
term is a fault.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from operator import attrgetter
from types import new_class
from typing import Any, ClassVar, Literal, Protocol

from runspec.core.canonical import hash_parts
from runspec.core.entry_points import entry_points_of
from runspec.core.errors import UserError, describe_error
from runspec.core.schema import Reward, Source
from runspec.core.schema.source_files import (
    ENVIRONMENT_GROUP,
    REWARD_GROUP,
    SOURCE_GROUP,
    installed_kinds,
)
from sampler.tasks.environment import BadReply, Call, Environment, played
from sampler.tasks.purity import alone, forbid
from verify.plugins import GraderFault, Problem

Part = Literal["train", "held_out", "over_long"]
"""How a run uses a problem, decided by its text."""


class Keep:
    """Filter of problems by their text; this one keeps every problem."""

    digest: str = hash_parts("keep all").hex()
    """Digest of everything that the answers depend on, for caching them."""
    wanted: Part = "train"
    """The problems that belong to the run."""
    known: Sequence[Part] = ("train",)
    """The parts that `parts` can return."""

    def __call__(self, problem: str) -> bool:
        return self.many([problem])[0]

    def many(self, problems: Sequence[str]) -> list[bool]:
        """Return whether each problem belongs to the run, which is faster than one by one."""
        return [part == self.wanted for part in self.parts(problems)]

    def parts(self, problems: Sequence[str]) -> list[Part]:
        """Return the part to which each problem belongs."""
        return ["train"] * len(problems)


class ProblemSource(Protocol):
    """Problems by index, constructed as `kind(source, seed, keep)`.

    The problems depend only on these arguments and on the contents of the source's files
    (`runspec.core.schema.source_files`), not on the folder of the files. A source leaves out the
    problems that `keep` refuses: a file drops the rows, a generator makes another problem.
    """

    task_types: frozenset[str]
    """Every `Problem.task_type` of its problems."""

    def __len__(self) -> int: ...

    def problem(self, index: int) -> Problem:
        """Return the problem at 0 <= index < len(self)."""


@dataclass(frozen=True)
class Score:
    """Score of an answer by a task term."""

    value: float
    """T, the task reward."""
    reason: str = ""
    """Why the value is not higher, for people to read."""


class TaskTerm(Protocol):
    """Grader of answers, which computes the task reward T.

    Every process of a run creates one, so creation must be cheap; only graders call it. A class may
    leave out everything except `role` and `score`. It then gets the defaults of this class, whether
    it derives from it or not (`completed`).
    """

    role: ClassVar[Literal["task"]] = "task"
    isolated: ClassVar[bool] = True
    """Whether `score` runs in a grader process (`sampler.tasks.graders`), which has no network, no
    environment and nothing to write to. Otherwise it runs in a thread of the caller; that is for
    terms that start a sandbox of their own."""
    repeatable: ClassVar[bool] = True
    """Whether the same answer gets the same score on any machine at any time."""
    timeout_s: ClassVar[float] = 10.0
    """Seconds that one answer may take if the spec has no `timeout`. A grader process that takes
    longer is ended."""
    executes_answers: ClassVar[bool] = False
    """Whether it runs answers as programs, which an untrusted pool allows only with a sandbox."""
    limits_blame_answer: ClassVar[bool] = False
    """Whether an answer gets 0 if its grading runs out of time or memory, because the answer alone
    decides how much work there is. Otherwise it is a fault, without a reward."""

    def __init__(self, reward: Reward) -> None:
        """Read the reward's settings, if the kind has any."""

    def score(self, problem: Problem, answer: str) -> Score | float:
        """Return T of an answer (the text after `</think>`). An error that it raises counts as a
        fault of the term, not of the answer."""

    def prepare(self) -> None:
        """Do slow work, such as imports and tables. A grader process calls it once, before any
        deadline starts."""


class LengthTerm(Protocol):
    """Judge of lengths, which computes the length term P."""

    role: ClassVar[Literal["length"]] = "length"

    def __init__(self, reward: Reward) -> None:
        """Read the reward's settings."""

    def penalty(self, task_reward: float, target: int, length: int) -> float:
        """Return P such that the reward is R = T + P; `length` counts all output tokens."""


Term = TaskTerm | LengthTerm | Environment
Kind = type[TaskTerm] | type[LengthTerm] | type[Environment]
"""The class of a kind of reward, or of an environment."""


def make_source(source: Source, seed: int, keep: Keep) -> ProblemSource:
    point = _entry_point(source.kind, f"data.sources.{source.name}", SOURCE_GROUP)
    return point.load()(source, seed, keep)


def make_term(reward: Reward) -> Term:
    """Create the term of a reward; its `role` is `task`, `length` or `environment`."""
    return completed(reward_entry_point(reward).load())(reward)


def find_kind(kind: str) -> Kind:
    """Return the class of a kind of reward or environment.

    Raises:
        UserError: no installed package offers it, or the package cannot be imported.
    """
    point = _entry_point(kind, "reward", REWARD_GROUP, ENVIRONMENT_GROUP)
    try:
        return completed(point.load())
    except Exception as error:  # a package may break in any way at its import
        raise UserError(
            f"the plug-in of kind {kind} cannot be loaded: {type(error).__name__}: {error}",
            place=f"entry point {point.value}",
            remedy="fix the package; a folder of its name in the working directory also hides it",
        ) from error


def completed(kind: Any) -> Kind:
    """Return a plug-in's class with defaults for what it leaves out.

    A task term that does not derive from `TaskTerm` gets it as its last base, so the attributes of
    the class take precedence.
    """
    if kind.role == "task" and TaskTerm not in kind.__mro__:
        kind = new_class(kind.__name__, (kind, TaskTerm))
    return kind


def reward_entry_point(reward: Reward) -> EntryPoint:
    """Return the entry point of the class of a reward's kind.

    Raises:
        UserError: no installed package offers the kind.
    """
    return _entry_point(reward.kind, f"reward.{reward.name}", REWARD_GROUP, ENVIRONMENT_GROUP)


def _entry_point(kind: str, place: str, *groups: str) -> EntryPoint:
    found = {point.name: point for group in groups for point in entry_points_of(group)}
    if kind not in found:
        raise UserError(
            f"no plug-in offers kind {kind!r}; installed: "
            f"{', '.join(kind for group in groups for kind in installed_kinds(group)) or 'none'}",
            place=place,
            remedy=f"install a package with an entry point {kind!r} in {' or '.join(groups)}",
        )
    return found[kind]


class TargetLengthReward(LengthTerm):
    """P of R = T + P by `form`, with T the task reward and l the output's length in tokens:

    - `exact`: R = T - alpha |target - l| (INTELLECT-2, section 3.1.2);
    - `max`: R = T clip(alpha (target - l) + 0.5, 0, 1) (arXiv 2503.04697);
    - `clip`: R = T if l <= target else 0.

    Raises:
        UserError: no form, or no alpha where the form needs one.
    """

    def __init__(self, reward: Reward) -> None:
        if reward.form is None or (reward.alpha is None and reward.form != "clip"):
            raise UserError(
                "kind target_length needs form and alpha", place=f"reward.{reward.name}"
            )
        self._form = reward.form
        self._alpha = reward.alpha or 0.0

    def penalty(self, task_reward: float, target: int, length: int) -> float:
        """Return P in units of reward; `target` and `length` are in tokens."""
        if self._form == "exact":
            return -self._alpha * abs(target - length)
        if self._form == "max":
            factor = min(max(self._alpha * (target - length) + 0.5, 0.0), 1.0)
        else:
            factor = 1.0 if length <= target else 0.0
        return task_reward * (factor - 1.0)


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
    """Rules for one kind of answer; see `TaskTerm` and `Environment`."""

    timeout_s: float
    repeatable: bool
    limits_blame_answer: bool


Result = Score | GraderFault
Reply = Score | GraderFault | dict[str, Any]
"""Of a call: a dict of `environment.played`, or what `grade` gave."""


def fault(problem: Problem, reason: str) -> GraderFault:
    return GraderFault(f"{problem.problem_id[:_MAX_ID]}: {reason}")


def reply_of(
    term: TaskTerm | Environment, request: Answer | Call, seconds: float | None = None
) -> dict[str, Any]:
    """Grade an answer, or call an environment's function; a plug-in may raise or return whatever
    it likes.

    Args:
        term: of the problem's kind.
        request: the answer or the call.
        seconds: that a call may take, after which the line that runs is named, and it may use its
            arguments alone; None: nothing is refused.

    Returns:
        JSON data: `value` and `reason`; or `result`, what `played` returns; or `fault`, why there
        is none; or `memory`, where the grading of an answer ran out of that.
    """
    problem, called = request.problem, isinstance(request, Call)
    function = request.function if isinstance(request, Call) else "score"
    try:
        if term.role == "task":
            assert isinstance(request, Answer)
            return _value_in(term.score(problem, request.text))
        assert isinstance(request, Call)
        with nullcontext() if seconds is None else alone(seconds):
            if request.function == "grade":
                return _value_in(term.grade(problem, *request.arguments))
            return {"result": played(term, request.function, problem, request.arguments)}
    except BadReply as error:
        return {"fault": f"{function}: {error}"[:MAX_REASON]}
    except Exception as error:  # noqa: BLE001
        if isinstance(error, MemoryError) and not called:
            return {"memory": True}
        package = getattr(getattr(term, function), "__module__", None) or ""
        return {"fault": describe_error(error, package.partition(".")[0])[:MAX_REASON]}


def _value_in(given: Score | float) -> dict[str, Any]:
    score = given if isinstance(given, Score) else Score(given)
    value: Any = score.value
    if not isinstance(value, (int, float)):
        return {"fault": f"the grader returned {value!r:.80}"}
    return {"value": float(value), "reason": str(score.reason)[:MAX_REASON]}


def outcome_of(request: Answer | Call, reply: Mapping[str, Any], rules: TermRules) -> Reply:
    """Return what an answer or a call came to, by a reply of `reply_of`, which may be another
    process's."""
    played = reply.get("result")
    if isinstance(request, Call) and isinstance(played, dict):
        return played
    if reply.get("memory"):
        return over_limit(request, "out of memory", rules)
    if "value" not in reply:
        return fault(request.problem, str(reply.get("fault", "the grader said nothing")))
    value = reply["value"]
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return fault(request.problem, f"the grader returned {value!r:.80}")
    return Score(float(value), str(reply.get("reason", "")))


def over_limit(answer: Answer | Call, reason: str, rules: TermRules) -> Result:
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
    forbid()
    try:
        terms: dict[str, TaskTerm | Environment] = {}
        seconds = {}
        for kind, (module, attribute, reward) in setup["terms"].items():
            made = completed(attrgetter(attribute)(importlib.import_module(module)))
            settings = Reward.model_validate(reward)
            term = made(settings)
            if term.role == "length":
                raise TypeError(f"{module}:{attribute} grades lengths, not answers")
            term.prepare()
            terms[kind] = term
            # Before the caller's own deadline, so that the line is named.
            seconds[kind] = 0.8 * float(settings.timeout or term.timeout_s)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other side reports it
        write({"failed": describe_error(error)[:MAX_REASON]})
        return
    write({"ready": True})
    while line := requests.readline():
        for item in json.loads(line):
            kind, answer, call = item.pop("kind"), item.pop("answer"), item.pop("call")
            problem = Problem(**item)
            request = Answer(problem, answer) if call is None else Call(problem, *call)
            write(reply_of(terms[kind], request, seconds[kind]))
