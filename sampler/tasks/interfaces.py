"""What sources and reward terms offer, and how they are found: entry points by kind.

[project.entry-points."runspec.sources"]
reasoning_gym = "sampler.tasks.sources.gym:GymSource"

[project.entry-points."runspec.rewards"]
reasoning_gym = "sampler.tasks.rewards.gym:GymReward"
target_length = "sampler.tasks.rewards.target_length:TargetLengthReward"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import new_class
from typing import Any, ClassVar, Literal, Protocol, get_args

from runspec.core.errors import UserError
from runspec.core.spec.plugins import REWARD_GROUP, SOURCE_GROUP, installed_kinds
from runspec.core.spec.schema import Reward, Source
from verify.plugins import Problem

Part = Literal["train", "held_out", "over_long"]
"""What a problem is to a run, by its text."""


class Keep(Protocol):
    """Whether a problem, by its text, belongs to the run: not over-long, and of the right split."""

    digest: str
    """Of all that the answers depend on, so that they can be kept."""
    wanted: Part = "train"
    """The problems that belong to the run."""
    known: Sequence[Part] = get_args(Part)
    """The parts that `parts` tells apart."""

    def __call__(self, problem: str) -> bool:
        return self.many([problem])[0]

    def many(self, problems: Sequence[str]) -> list[bool]:
        """The same of several problems, which is faster."""
        return [part == self.wanted for part in self.parts(problems)]

    def parts(self, problems: Sequence[str]) -> list[Part]:
        """The part to which each problem belongs."""


class ProblemSource(Protocol):
    """Problems by index. Made as `kind(source, seed, keep)`, and deterministic in those and in the
    contents of the source's files (`runspec.core.spec.source_files`), whatever folder they lie in.

    A source leaves out the problems that `keep` refuses: a file drops the rows, a generator makes
    another problem.
    """

    task_types: frozenset[str]
    """Every `Problem.task_type` that it gives."""

    def __len__(self) -> int: ...

    def problem(self, index: int) -> Problem:
        """The problem at 0 <= index < len(self)."""


@dataclass(frozen=True)
class Score:
    """What a task term says of an answer."""

    value: float
    """T, the task reward."""
    reason: str = ""
    """Why it is not more, for people to read."""


class TaskTerm(Protocol):
    """Grades answers: the task reward T. Making one is cheap: every process of a run does, and only
    graders call it. All but `role` and `score` may be left out; what is said here is then taken,
    whether a class derives from this one or not (`completed`)."""

    role: ClassVar[Literal["task"]] = "task"
    isolated: ClassVar[bool] = True
    """Whether `score` runs in a grader process (`sampler.grading`): no network, no environment,
    nothing to write to. Without it, in a thread of the caller, for terms that start a sandbox of
    their own."""
    repeatable: ClassVar[bool] = True
    """Whether the same answer gets the same score on any machine at any time."""
    timeout_s: ClassVar[float] = 10.0
    """Longest time for one answer where the spec gives no `timeout`. A grader process that takes
    longer is ended."""
    executes_answers: ClassVar[bool] = False
    """Whether it runs answers as programs: no untrusted pool without a sandbox then."""
    limits_blame_answer: ClassVar[bool] = False
    """What an answer gets on which the grader process runs out of time or memory: a reward of 0
    where the answer alone decides how much work there is, else no reward but a fault."""

    def __init__(self, reward: Reward) -> None:
        """Reads the reward's settings, where it has any."""

    def score(self, problem: Problem, answer: str) -> Score | float:
        """T of an answer (the text after `</think>`). What it raises counts as a fault of its own,
        not of the answer."""

    def prepare(self) -> None:
        """What takes time before the first answer (imports, tables). A grader process calls it
        once, before any deadline runs."""


class LengthTerm(Protocol):
    """Judges lengths: the length term P."""

    role: ClassVar[Literal["length"]] = "length"

    def __init__(self, reward: Reward) -> None:
        """Reads the reward's settings."""

    def penalty(self, task_reward: float, target: int, length: int) -> float:
        """P such that the reward is R = T + P; length counts all output tokens."""


Kind = type[TaskTerm] | type[LengthTerm]
"""The class of a kind of reward."""


def make_source(source: Source, seed: int, keep: Keep) -> ProblemSource:
    point = _entry_point(SOURCE_GROUP, source.kind, f"data.sources.{source.name}")
    made: ProblemSource = point.load()(source, seed, keep)
    return made


def make_term(reward: Reward) -> TaskTerm | LengthTerm:
    """What grades by a reward; its `role` says which of the two it is."""
    return completed(reward_entry_point(reward).load())(reward)


def length_term(rewards: Sequence[Reward]) -> LengthTerm | None:
    """The term that judges lengths, None where there is none."""
    for reward in rewards:
        term = make_term(reward)
        if term.role == "length":
            return term
    return None


def find_kind(kind: str) -> Kind:
    """The class of a kind of reward.

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
            remedy="mend the package; where the command runs, a folder of its name hides it",
        ) from error


def completed(kind: Any) -> Kind:
    """A class that a plug-in offers, with what it leaves out.

    A task term that does not derive from `TaskTerm` is given it as its last base: what the class
    says of itself goes before.
    """
    if kind.role == "task" and TaskTerm not in kind.__mro__:
        made: Kind = new_class(kind.__name__, (kind, TaskTerm))
        return made
    found: Kind = kind
    return found


def reward_entry_point(reward: Reward) -> EntryPoint:
    """Where the class of a reward's kind is found.

    Raises:
        UserError: no installed package offers the kind.
    """
    return _entry_point(REWARD_GROUP, reward.kind, f"reward.{reward.name}")


def _entry_point(group: str, kind: str, place: str) -> EntryPoint:
    found = {point.name: point for point in entry_points(group=group)}
    if kind not in found:
        raise UserError(
            f"no plug-in offers kind {kind!r}; installed: "
            f"{', '.join(installed_kinds(group)) or 'none'}",
            place=place,
            remedy=f"install a package with an entry point {kind!r} in {group}",
        )
    return found[kind]
