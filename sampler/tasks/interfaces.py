"""Interfaces of sources and reward terms, which are found by kind among the entry points.

[project.entry-points."runspec.sources"]
reasoning_gym = "sampler.tasks.gym:GymSource"

[project.entry-points."runspec.rewards"]
reasoning_gym = "sampler.tasks.gym:GymReward"
target_length = "sampler.tasks.interfaces:TargetLengthReward"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import new_class
from typing import Any, ClassVar, Literal, Protocol

from runspec.core.canonical import hash_parts
from runspec.core.entry_points import entry_points_of
from runspec.core.errors import UserError
from runspec.core.schema import Reward, Source
from runspec.core.schema.source_files import REWARD_GROUP, SOURCE_GROUP, installed_kinds
from verify.plugins import Problem

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


Kind = type[TaskTerm] | type[LengthTerm]
"""The class of a kind of reward."""


def make_source(source: Source, seed: int, keep: Keep) -> ProblemSource:
    point = _entry_point(SOURCE_GROUP, source.kind, f"data.sources.{source.name}")
    return point.load()(source, seed, keep)


def make_term(reward: Reward) -> TaskTerm | LengthTerm:
    """Create the term of a reward; its `role` is `task` or `length`."""
    return completed(reward_entry_point(reward).load())(reward)


def find_kind(kind: str) -> Kind:
    """Return the class of a kind of reward.

    Raises:
        UserError: no installed package offers it, or the package cannot be imported.
    """
    point = _entry_point(REWARD_GROUP, kind, "reward")
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
    return _entry_point(REWARD_GROUP, reward.kind, f"reward.{reward.name}")


def _entry_point(group: str, kind: str, place: str) -> EntryPoint:
    found = {point.name: point for point in entry_points_of(group)}
    if kind not in found:
        raise UserError(
            f"no plug-in offers kind {kind!r}; installed: "
            f"{', '.join(installed_kinds(group)) or 'none'}",
            place=place,
            remedy=f"install a package with an entry point {kind!r} in {group}",
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
