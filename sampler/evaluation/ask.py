"""Asks a loaded policy version the problems of an evaluation, and grades its answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from runspec.core.hashing import hash_parts
from runspec.core.spec.evaluations import evaluator_pool
from runspec.core.spec.schema import Evaluation, RunSpec, SamplerPool
from sampler.engine.engine import Engine
from sampler.engine.filling import sampled_problems
from sampler.engine.requests import Sampled, SampleRequest, sample_requests
from sampler.evaluation.figures import majority
from sampler.tasks.task_set import RunTask
from verify.formats.evaluation import ProblemResult
from verify.noise import noise_key
from verify.plugins import GradeItem, GraderFault


@dataclass
class Questions:
    """The problems of one evaluation, and how they are asked."""

    evaluation: Evaluation
    tasks: RunTask
    pool: SamplerPool
    """Engine settings, with the evaluation's own sampling and length."""
    seed: int
    """The run's seed. It determines the noise of every answer, together with the problem: all
    versions are asked the same questions with the same noise."""
    unanswered: int = 0
    """Outputs so far without an answer in the form that the run asks for."""

    @classmethod
    def of(cls, spec: RunSpec, evaluation: Evaluation, tasks: RunTask) -> Questions:
        pool = evaluator_pool(spec)
        sampling = (evaluation.sampling or pool.sampling).model_copy(update={"seeded": True})
        new = evaluation.max_new_tokens or pool.max_new_tokens
        pool = pool.model_copy(update={"sampling": sampling, "max_new_tokens": new})
        return cls(evaluation, tasks, pool, spec.seed)

    def __len__(self) -> int:
        return min(len(self.tasks), self.evaluation.problems or len(self.tasks))

    def target(self, index: int) -> int | None:
        """Return the length that a problem's prompt asks for: the run's targets in turn."""
        targets = self.tasks.targets
        return targets[index % len(targets)] if targets else None

    def requests(self, index: int) -> list[SampleRequest]:
        """Return the requests for a problem's answers.

        Raises:
            UserError: the prompt leaves no room for an answer.
        """
        problem = self.tasks.problem(index).problem_id
        seed = hash_parts("evaluation", self.seed, self.evaluation.name, problem)
        return sample_requests(
            self.pool,
            self.tasks.prompt_tokens(index, self.target(index)),
            self.tasks.eos_token_id,
            [noise_key(seed, 0, sample) for sample in range(self.evaluation.samples)],
        )

    def graded(
        self, sampled: Mapping[int, Sequence[Sampled]]
    ) -> Iterator[tuple[int, ProblemResult]]:
        """Grade the answers to some problems, given by their index."""
        items = [
            GradeItem(index, self.target(index), answer.output_tokens.tolist())
            for index, answers in sampled.items()
            for answer in answers
        ]
        grades = iter(zip(items, self.tasks.grade_all(items), strict=True))
        for index, answers in sampled.items():
            own = list(islice(grades, len(answers)))
            rewards = [None if isinstance(g, GraderFault) else g.task_reward for _, g in own]
            texts = [self.tasks.answer(item.output_tokens) for item, _ in own]
            self.unanswered += texts.count(None)
            yield (
                index,
                ProblemResult(
                    self.tasks.problem(index).problem_id,
                    self.target(index),
                    rewards,
                    [len(item.output_tokens) for item, _ in own],
                    majority(texts, rewards),
                ),
            )


def ask(
    questions: Questions, engine: Engine, stop: threading.Event, said: Callable[[int], None]
) -> list[ProblemResult] | None:
    """Ask all questions, and return the result of each, in order; None if `stop` was set.

    Args:
        questions: of the evaluation.
        engine: has the version loaded.
        stop: ends it early.
        said: called with the number of problems that are done.

    Raises:
        UserError: the engine died, or nothing can be graded here.
    """
    found: dict[int, ProblemResult] = {}
    samples = questions.evaluation.samples
    every = range(len(questions))
    for sampled in sampled_problems(engine, every, questions.requests, samples=samples, stop=stop):
        found |= questions.graded(sampled)
        said(len(found))
    return [found[index] for index in every] if len(found) == len(every) else None
