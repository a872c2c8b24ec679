"""A run's task: problems of the spec's sources, prompts by its tokenizer, rewards by its terms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from runspec.common.errors import UserError
from runspec.spec.schema import RunSpec
from runspec.spec.source_files import data_digest
from sampler.tasks.interfaces import (
    LengthTerm,
    Score,
    TaskTerm,
    make_term,
)
from sampler.tasks.keep import keeper, target_lengths
from sampler.tasks.problems import Problems
from sampler.tasks.prompts import PromptCodec, PromptForm
from verify.plugins import Graded, GradeItem, GraderFault, Problem


class RunTask:
    """Implements `verify.plugins.TaskSet`."""

    def __init__(
        self, spec: RunSpec, codec: PromptCodec, problems: Problems, digest: str = ""
    ) -> None:
        self.data_digest = digest
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


def build_task_set(spec: RunSpec, tokenizer_dir: Path, data_dir: Path | None = None) -> RunTask:
    """The run's task; see `verify.plugins.load_task_set`.

    Raises:
        UserError: a kind that no installed package offers, a source that cannot be read, or a
            directory without a tokenizer.
    """
    codec = PromptCodec.read(tokenizer_dir, PromptForm.of(spec.data))
    problems = Problems(spec, keeper(spec, codec, "train"), data_dir)
    return RunTask(spec, codec, problems, data_digest(spec, data_dir))
