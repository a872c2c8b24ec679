"""Task of a run: problems of the spec's sources, prompts by its tokenizer, rewards by its terms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.process import RunStopped
from runspec.core.spec.schema import Evaluation, RunSpec
from runspec.core.spec.source_files import data_digest
from sampler.tasks.grading.answers import Answer, Result
from sampler.tasks.grading.graders import Graders
from sampler.tasks.grading.launch import require_graders
from sampler.tasks.interfaces import LengthTerm, Score, length_term
from sampler.tasks.problems import Problems, problem_filter, target_lengths
from sampler.tasks.prompts import PromptCodec
from verify.plugins import Graded, GradeItem, GraderFault, Problem, Split

_UNANSWERED = {
    "required": "no </think> with an answer and the end token after it",
    "optional": "no end token",
    "none": "no end token",
}


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
        self._length_term: LengthTerm | None = length_term(spec.reward)
        self._graders = Graders(spec.reward)
        if ungraded := problems.task_types - self._graders.rules.keys():
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
        """Grade outputs: R = T + P, with T of the answer and P of the length of all output tokens,
        the end included."""
        problems = [self.problem(item.problem) for item in items]
        texts = [self._codec.answer(item.output_tokens) for item in items]
        answered = [index for index, text in enumerate(texts) if text is not None]
        scored = self._graders.score([Answer(problems[i], str(texts[i])) for i in answered])
        results: list[Result] = [Score(0.0, _UNANSWERED[self._codec.thinking])] * len(items)
        for index, result in zip(answered, scored, strict=True):
            results[index] = result
        return [
            result if isinstance(result, GraderFault) else self._graded(item, problem, result, text)
            for item, problem, result, text in zip(items, problems, results, texts, strict=True)
        ]

    def answer(self, output_tokens: Sequence[int]) -> str | None:
        """Return the text of an output's answer; None if it gives none."""
        return self._codec.answer(output_tokens)

    def close(self) -> None:
        """End the grader processes."""
        self._graders.close()

    def _graded(
        self, item: GradeItem, problem: Problem, score: Score, answer: str | None
    ) -> Graded | GraderFault:
        penalty = 0.0
        if self._length_term is not None and item.target is not None:
            penalty = self._length_term.penalty(score.value, item.target, len(item.output_tokens))
        if not math.isfinite(penalty):
            return GraderFault(f"{problem.problem_id}: length penalty {penalty}")
        wrong = score.value <= 0 and not score.reason
        return Graded(
            score.value,
            penalty,
            score.value + penalty,
            reason=f"answered {(answer or '')[:80]!r}" if wrong else score.reason,
            answered=answer is not None,
            repeatable=self._graders.rules[problem.task_type].repeatable,
        )


def build_task_set(spec: RunSpec, tokenizer_dir: Path, data_dir: Path | None = None) -> RunTask:
    """Return the run's task; see `verify.plugins.load_task_set`.

    Raises:
        UserError: no installed package offers a kind, a source cannot be read, the directory has no
            tokenizer, or a reward needs a sandbox and none works.
    """
    require_graders(spec)
    codec = PromptCodec.read(tokenizer_dir, spec.data)
    problems = Problems(spec, problem_filter(spec, codec, "train"), data_dir)
    return RunTask(spec, codec, problems, data_digest(spec, data_dir))


def build_evaluation_set(
    spec: RunSpec, evaluation: Evaluation, tokenizer_dir: Path, data_dir: Path | None = None
) -> RunTask:
    """Return the problems of an evaluation: none of them is trained on.

    Raises:
        UserError: as `build_task_set`.
        RunStopped: there is no problem.
    """
    require_graders(spec)
    codec = PromptCodec.read(tokenizer_dir, spec.data)
    asked_only = {source.name for source in spec.data.sources if not source.train}
    split: Split | None = None if evaluation.source in asked_only else "held_out"
    keep = problem_filter(spec, codec, split)
    kinds = {term.name: term.kind for term in spec.reward}
    grader = None if evaluation.grader is None else kinds[evaluation.grader]
    problems = Problems(spec, keep, data_dir, only=evaluation.source, task_type=grader)
    if not len(problems):
        raise RunStopped(
            f"{evaluation.source or 'no source'} has no problem for it",
            place=f"evaluations.{evaluation.name}",
            remedy="name a larger source, or one with `train: false`",
        )
    return RunTask(spec, codec, problems, data_digest(spec, data_dir))
