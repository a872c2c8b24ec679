"""Asks a loaded policy version problems, and grades its answers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from runspec.core.hashing import hash_parts
from runspec.core.spec.evaluations import evaluator_pool
from runspec.core.spec.schema import Evaluation, RunSpec, SamplerPool
from sampler.engine.requests import Sampled, SampleRequest, sample_requests
from sampler.evaluation.figures import figures, majority
from sampler.tasks.task_set import RunTask
from verify.formats.evaluation import Figure, ProblemResult
from verify.noise import noise_key
from verify.plugins import GradeItem, GraderFault

if TYPE_CHECKING:
    from sampler.engine.engine import Engine  # its import takes seconds

_TURN_S = 1.0
_LOG_EVERY_S = 5.0


@dataclass
class Questions:
    """Problems, and how they are asked."""

    tasks: RunTask
    pool: SamplerPool
    """Engine settings: lengths, temperature, top-p, top-k."""
    samples: int
    """Answers to each problem."""
    count: int
    """Number of problems, the first ones of the task set."""
    seed: tuple[str | int, ...]
    """Determines the noise of every answer, together with the problem: all versions are asked the
    same questions with the same noise."""
    targets: Sequence[int]
    """Lengths that prompts ask for, in turn; empty if they ask for none."""
    unanswered: int = 0
    """Outputs so far without an answer in the form that the run asks for."""

    @classmethod
    def of(cls, spec: RunSpec, evaluation: Evaluation, tasks: RunTask) -> Questions:
        """Return the questions of an evaluation, with its own sampling and length."""
        pool = evaluator_pool(spec)
        sampling = (evaluation.sampling or pool.sampling).model_copy(update={"seeded": True})
        new = evaluation.max_new_tokens or pool.max_new_tokens
        pool = pool.model_copy(update={"sampling": sampling, "max_new_tokens": new})
        count = min(len(tasks), evaluation.problems or len(tasks))
        seed = ("evaluation", spec.seed, evaluation.name)
        return cls(tasks, pool, evaluation.samples, count, seed, tasks.targets)

    def target(self, index: int) -> int | None:
        """Return the length that a problem's prompt asks for."""
        return self.targets[index % len(self.targets)] if self.targets else None

    def requests(self, index: int) -> list[SampleRequest]:
        """Return the requests for a problem's answers.

        Raises:
            UserError: the prompt leaves no room for an answer.
        """
        seed = hash_parts(*self.seed, self.tasks.problem(index).problem_id)
        return sample_requests(
            self.pool,
            self.tasks.prompt_tokens(index, self.target(index)),
            self.tasks.eos_token_id,
            [noise_key(seed, 0, sample) for sample in range(self.samples)],
        )

    def graded(self, sampled: Mapping[int, Sequence[Sampled]]) -> dict[int, ProblemResult]:
        """Grade the answers to some problems, given by their index."""
        items = [
            GradeItem(index, self.target(index), answer.output_tokens.tolist())
            for index, answers in sampled.items()
            for answer in answers
        ]
        grades = iter(zip(items, self.tasks.grade_all(items), strict=True))
        found = {}
        for index, answers in sampled.items():
            own = list(islice(grades, len(answers)))
            rewards = [None if isinstance(g, GraderFault) else g.task_reward for _, g in own]
            texts = [self.tasks.answer(item.output_tokens) for item, _ in own]
            self.unanswered += texts.count(None)
            found[index] = ProblemResult(
                self.tasks.problem(index).problem_id,
                self.target(index),
                rewards,
                [len(item.output_tokens) for item, _ in own],
                majority(texts, rewards),
            )
        return found


def answered(
    questions: Questions, engine: Engine, indices: Iterable[int], stop: threading.Event
) -> Iterator[dict[int, ProblemResult]]:
    """Sample problems, up to twice what the engine runs at once, and grade them: one half is graded
    while the other half is sampled.

    Args:
        questions: say how problems are asked.
        engine: has a version loaded.
        indices: of the problems.
        stop: ends the sampling early; what is under way is aborted.

    Yields:
        The results of each problem, of several at once where several are done.

    Raises:
        UserError: the engine died, or nothing can be graded here.
    """
    left = iter(indices)
    running: dict[Future[list[Sampled]], int] = {}
    while not stop.is_set():
        room = max(0, -(-2 * engine.capacity // questions.samples) - len(running))
        running |= {engine.submit(questions.requests(index)): index for index in islice(left, room)}
        if not running:
            return
        done, _ = wait(running, timeout=_TURN_S, return_when=FIRST_COMPLETED)
        if done:
            yield questions.graded({running.pop(future): future.result() for future in done})
    engine.abort()


def ask(
    questions: Questions, engine: Engine, stop: threading.Event, log: logging.Logger, what: str
) -> list[ProblemResult] | None:
    """Ask all questions, and return the result of each, in order; None if `stop` was set.

    Args:
        questions: of the evaluation.
        engine: has the version loaded.
        stop: ends it early.
        log: receives progress, every few seconds.
        what: name of the evaluation, for the log.

    Raises:
        UserError: the engine died, or nothing can be graded here.
    """
    found: dict[int, ProblemResult] = {}
    told = time.monotonic()
    for results in answered(questions, engine, range(questions.count), stop):
        found |= results
        if time.monotonic() - told >= _LOG_EVERY_S:
            told = time.monotonic()
            log.info("%s: %d of %d problems", what, len(found), questions.count)
    return [found[index] for index in sorted(found)] if len(found) == questions.count else None


def summary(results: Sequence[ProblemResult]) -> tuple[dict[str, Figure], int, int]:
    """Return the figures of results, and the numbers of graded problems and of ungraded answers."""
    graded = [each for each in results if any(reward is not None for reward in each.rewards)]
    faults = sum(reward is None for each in results for reward in each.rewards)
    return figures(graded), len(graded), faults
