"""Tries every problem a few times with a model and counts what is solved."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from runspec.core.hashing import hash_parts
from runspec.core.spec.schema import SamplerPool
from sampler.engine.requests import Sampled, SampleRequest, sample_requests
from sampler.measuring.progress import Progress, Tries
from verify.noise import noise_key
from verify.plugins import Graded, GradeItem, TaskSet

if TYPE_CHECKING:
    from sampler.engine.engine import Engine

SOLVED = 1.0
"""Least task reward of a try that solves its problem."""
_SAY_S = 5.0
_TURN_S = 1.0


@dataclass(frozen=True)
class Measurement:
    """What is asked."""

    tasks: TaskSet
    pool: SamplerPool
    """Says how to sample: lengths, temperature, top-p, top-k."""
    samples: int
    """Tries of each problem."""
    problems: int
    """The first so many of the task set."""
    seed: int
    """Every try's noise follows from it and from the problem's id."""

    def requests(self, index: int) -> list[SampleRequest]:
        """The tries of a problem, without a length being asked for.

        Raises:
            UserError: the prompt leaves no room for an answer.
        """
        seed = hash_parts("solve rates", self.seed, self.tasks.problem(index).problem_id)
        return sample_requests(
            self.pool,
            self.tasks.prompt_tokens(index, None),
            self.tasks.eos_token_id,
            [noise_key(seed, 0, sample) for sample in range(self.samples)],
        )


def measure(
    asked: Measurement,
    engine: Engine,
    progress: Progress,
    log: logging.Logger,
    stop: threading.Event,
) -> bool:
    """Measures the problems that `progress` lacks; the engine stays full while answers are graded.

    Returns:
        Whether all are measured; else `stop` was set.

    Raises:
        UserError: the engine died, or nothing can be graded here.
    """
    left = (index for index in range(asked.problems) if index not in progress.done)
    running: dict[Future[list[Sampled]], int] = {}
    before = sum(index < asked.problems for index in progress.done)
    teller = _Teller(asked.problems, before, log)
    while not stop.is_set():
        _fill(asked, engine, left, running)
        if not running:
            return True
        done, _ = wait(running, timeout=_TURN_S, return_when=FIRST_COMPLETED)
        if done:
            sampled = {running.pop(future): future.result() for future in done}
            progress.add(_graded(asked.tasks, sampled))
            teller.say(progress)
    engine.abort()
    return False


def _fill(
    asked: Measurement,
    engine: Engine,
    left: Iterator[int],
    running: dict[Future[list[Sampled]], int],
) -> None:
    """Submits problems until twice what the engine runs at once is there: it samples the one half
    while the other is being graded."""
    while len(running) * asked.samples < 2 * engine.capacity:
        index = next(left, None)
        if index is None:
            return
        running[engine.submit(asked.requests(index))] = index


def _graded(tasks: TaskSet, sampled: dict[int, list[Sampled]]) -> Iterator[Tries]:
    items = [
        GradeItem(index, None, one.output_tokens.tolist())
        for index, tries in sampled.items()
        for one in tries
    ]
    grades = iter(tasks.grade_all(items))
    for index, tries in sampled.items():
        graded = [grade for grade in islice(grades, len(tries)) if isinstance(grade, Graded)]
        yield Tries(index, sum(grade.task_reward >= SOLVED for grade in graded), len(graded))


class _Teller:
    """Says every few seconds how far it is."""

    def __init__(self, problems: int, before: int, log: logging.Logger) -> None:
        self._problems, self._before, self._log = problems, before, log
        self._begun = self._said = time.monotonic()

    def say(self, progress: Progress) -> None:
        now = time.monotonic()
        done = [one.rate for one in progress.done.values() if one.index < self._problems]
        left = self._problems - len(done)
        if now - self._said < _SAY_S and left:
            return
        self._said = now
        rates = [rate for rate in done if rate is not None]
        self._log.info(
            "%d of %d problems, mean solve rate %.3f, %d without one; about %.0f s left",
            *(len(done), self._problems, sum(rates) / max(1, len(rates)), len(done) - len(rates)),
            left * (now - self._begun) / max(1, len(done) - self._before),
        )
