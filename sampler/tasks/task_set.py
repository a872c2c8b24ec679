"""A run's task: problems of the spec's sources, prompts by its tokenizer, rewards by its terms."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Literal

from runspec.common.errors import UserError
from runspec.common.hashing import hash_parts
from runspec.spec.schema import RunSpec
from sampler.tasks.interfaces import (
    Keep,
    LengthTerm,
    ProblemSource,
    Score,
    TaskTerm,
    make_source,
    make_term,
)
from sampler.tasks.prompts import PromptCodec
from verify.plugins import Graded, GradeItem, GraderFault, Problem

Split = Literal["train", "held_out"]
_HELD_OUT_ONE_IN = 10
_CACHED_PROBLEMS = 1024


def split_of(problem: str) -> Split:
    """A tenth of all problems, by a hash of their text, is held out from training.

    Case makes no difference: to a tokenizer that ignores it, `Lent` and `lent` are one problem.
    """
    word = int.from_bytes(hash_parts("split", problem.lower())[:8], "big")
    return "held_out" if word % _HELD_OUT_ONE_IN == 0 else "train"


class Problems:
    """The problems of all sources under one index, those of the first source first."""

    def __init__(self, spec: RunSpec, keep: Keep) -> None:
        self._sources: list[ProblemSource] = [
            make_source(source, spec.seed, keep) for source in spec.data.sources
        ]
        self._ends = list(accumulate(len(source) for source in self._sources))
        self.task_types = frozenset().union(*(source.task_types for source in self._sources))
        self.problem = lru_cache(_CACHED_PROBLEMS)(self._problem)

    def __len__(self) -> int:
        return self._ends[-1]

    def _problem(self, index: int) -> Problem:
        if not 0 <= index < len(self):
            raise IndexError(f"problem {index} of {len(self)}")
        which = bisect_right(self._ends, index)
        start = self._ends[which - 1] if which else 0
        return self._sources[which].problem(index - start)


class RunTask:
    """Implements `verify.plugins.TaskSet`."""

    def __init__(self, spec: RunSpec, codec: PromptCodec, problems: Problems) -> None:
        self.eos_token_id = codec.eos_token_id
        self.targets = target_lengths(spec)
        self._codec = codec
        self._problems = problems
        self._task_terms: dict[str, TaskTerm] = {}
        self._length_term: LengthTerm | None = None
        for reward in spec.reward:
            term = make_term(reward)
            if term.role == "task":
                self._task_terms[reward.kind] = term
            else:
                self._length_term = term
        if ungraded := problems.task_types - self._task_terms.keys():
            raise UserError(
                f"problems of type {', '.join(sorted(ungraded))} have no reward term of that kind",
                place="reward",
                remedy="add the term, or leave their source out",
            )

    def __len__(self) -> int:
        return len(self._problems)

    def problem(self, index: int) -> Problem:
        return self._problems.problem(index)

    def prompt_tokens(self, index: int, target: int | None) -> list[int]:
        return self._codec.prompt_tokens(self.problem(index).prompt, target)

    def grade_all(self, items: Sequence[GradeItem]) -> list[Graded | GraderFault]:
        """R = T + P: T of the answer, P of the length of all output tokens, the end included."""
        return [self._grade(item) for item in items]

    def close(self) -> None:
        """Nothing is open."""

    def _grade(self, item: GradeItem) -> Graded | GraderFault:
        problem = self.problem(item.problem)
        answer = self._codec.answer(item.output_tokens)
        if answer is None:
            score = Score(0.0, "no </think> with an answer and the end token after it")
        else:
            try:
                given = self._task_terms[problem.task_type].score(problem, answer)
                value = float(given.value if isinstance(given, Score) else given)
            except Exception as error:  # noqa: BLE001 - a plug-in may raise whatever it likes
                return GraderFault(f"{problem.problem_id}: {type(error).__name__}: {error}")
            if not math.isfinite(value):
                return GraderFault(f"{problem.problem_id}: the grader returned {value}")
            score = Score(value, "" if value > 0 else f"answered {answer[:80]!r}")
        penalty = 0.0
        if self._length_term is not None and item.target is not None:
            penalty = self._length_term.penalty(score.value, item.target, len(item.output_tokens))
        if not math.isfinite(penalty):
            return GraderFault(f"{problem.problem_id}: length penalty {penalty}")
        return Graded(score.value, penalty, score.value + penalty, score.reason)


def target_lengths(spec: RunSpec) -> list[int]:
    """The lengths that prompts of the run ask for, in tokens."""
    return [target for reward in spec.reward for target in reward.targets or []]


def keeper(spec: RunSpec, codec: PromptCodec, split: Split) -> Keep:
    """Whether a problem belongs to a split and its prompt fits, whatever length is asked for.

    Only a run that makes its own start holds problems out: there they tell learning from memory.
    """
    targets: list[int | None] = [*target_lengths(spec)] or [None]

    def keep(problem: str) -> bool:
        if spec.warm_start is not None and split_of(problem) != split:
            return False
        limit = spec.data.max_prompt_tokens
        return all(len(codec.prompt_tokens(problem, target)) <= limit for target in targets)

    return keep


def build_task_set(spec: RunSpec, tokenizer_dir: Path) -> RunTask:
    """The run's task; see `verify.plugins.load_task_set`.

    Raises:
        UserError: a kind that no installed package offers, a source that cannot be read, or a
            directory without a tokenizer.
    """
    codec = PromptCodec.read(tokenizer_dir, length_prompt=spec.data.length_prompt)
    return RunTask(spec, codec, Problems(spec, keeper(spec, codec, "train")))
