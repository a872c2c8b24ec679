"""Asks a loaded policy version problems, grades its answers, and makes figures of them.

`python -m sampler suite` evaluates a directory of weights so, without a run around it.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runspec.core.canonical import hash_parts
from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.core.process import stop_event
from runspec.core.schema import Evaluation, RunSpec, SamplerPool
from runspec.core.schema.load import MAX_BYTES, parse_resolved
from runspec.core.schema.role_names import evaluator_pool
from sampler.engine.requests import Sampled, SampleRequest, sample_requests
from sampler.tasks.prompts import PromptCodec
from sampler.tasks.task_set import Problems, RunTask, build_evaluation_set, problem_filter
from verify.formats.documents import Figure, ProblemResult
from verify.noise import noise_key
from verify.plugins import Episode, Graded, GradeItem, GraderFault

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
    shown: int = 0
    """Answers that are kept whole, the first ones to all problems before any second one."""
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Kept ones by their place."""
    episodes: dict[int, list[Episode | None]] = field(default_factory=dict)
    """Of the problems that are being sampled."""

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
        made = sample_requests(
            *(self.pool, self.tasks, index, self.target(index)),
            [noise_key(seed, 0, sample) for sample in range(self.samples)],
            seed=int.from_bytes(seed[:8], "big") >> 1,
        )
        self.episodes[index] = [request.episode for request in made]
        return made

    def graded(self, sampled: Mapping[int, Sequence[Sampled]]) -> dict[int, ProblemResult]:
        """Grade the answers to some problems, given by their index."""
        unplayed: list[Episode | None] = [None] * self.samples
        items = [
            GradeItem(index, self.target(index), answer.output_tokens.tolist(), episode)
            for index, answers in sampled.items()
            for answer, episode in zip(answers, self.episodes.pop(index, unplayed), strict=True)
        ]
        grades = iter(zip(items, self.tasks.grade_all(items), strict=True))
        found = {}
        for index, answers in sampled.items():
            own = list(islice(grades, len(answers)))
            rewards = [None if isinstance(g, GraderFault) else g.task_reward for _, g in own]
            texts = [self.tasks.answer(item.output_tokens) for item, _ in own]
            self.unanswered += texts.count(None)
            for number, (item, grade) in enumerate(own):
                if (place := number * self.count + index) < self.shown:
                    self.answers[place] = self._kept(item, grade)
            found[index] = ProblemResult(
                self.tasks.problem(index).problem_id,
                self.target(index),
                rewards,
                [len(item.output_tokens) for item, _ in own],
                majority(texts, rewards),
            )
        return found

    def _kept(self, item: GradeItem, grade: Graded | GraderFault) -> dict[str, Any]:
        problem = self.tasks.problem(item.problem)
        reward, reason = None, str(grade)
        if isinstance(grade, Graded):
            reward, reason = grade.task_reward, grade.reason
        output = self.tasks.text(item.output_tokens)
        names = {"problem_id": problem.problem_id, "prompt": problem.prompt}
        return {**names, "output": output, "reward": reward, "reason": reason}


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


SOLVED = 1.0
"""Least task reward of an answer that solves its problem."""
MANY = 100
"""Problems from which on an interval is the bootstrap's."""
LEVEL = 0.95
_RESAMPLES = 1000


def figures(problems: Sequence[ProblemResult]) -> dict[str, Figure]:
    """Return the figures of graded problems.

    `mean` is the mean task reward, `pass-K` the chance that one of K answers solves a problem, for
    K = 2, 4, 8, ... up to the number of answers, `majority` the reward of the most frequent answer,
    `length` the mean output in tokens, and `length-error` its mean distance from the target.

    Args:
        problems: those of which at least one answer was graded.
    """
    graded = [[r for r in each.rewards if r is not None] for each in problems]
    found = {"mean": [_mean(rewards) for rewards in graded]}
    most, k = min(map(len, graded), default=0), 2
    while k <= most:
        solved = [sum(r >= SOLVED for r in rewards) for rewards in graded]
        counts = zip(graded, solved, strict=True)
        found[f"pass-{k}"] = [pass_at_k(len(rewards), c, k) for rewards, c in counts]
        k *= 2
    if most > 1:
        found["majority"] = [each.majority for each in problems if each.majority is not None]
    found["length"] = [_mean(each.lengths) for each in problems]
    if asked := [each for each in problems if each.target is not None]:
        found["length-error"] = [
            _mean([abs(length - (each.target or 0)) for length in each.lengths]) for each in asked
        ]
    return {name: mean_of(np.array(values)) for name, values in found.items() if values}


def pass_at_k(answers: int, solved: int, k: int) -> float:
    """Return the chance that k of the answers, drawn without repetition, have a solution.

    1 - C(n - c, k) / C(n, k), unbiased for the chance of k fresh answers (Chen et al. 2021,
    arXiv 2107.03374, equation 1).
    """
    return 1.0 - math.comb(answers - solved, k) / math.comb(answers, k)


def majority(answers: Sequence[str | None], rewards: Sequence[float | None]) -> float | None:
    """Return the mean reward of the most frequent answer, or of those that are equally frequent.

    Args:
        answers: text of each answer; None if the model gave none.
        rewards: task reward of each; None if the grader failed.
    """
    pairs = zip(answers, rewards, strict=True)
    graded = [(a and a.strip(), r) for a, r in pairs if r is not None]
    if not graded:
        return None
    votes = Counter(answer for answer, _ in graded if answer)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    return _mean([_mean([r for a, r in graded if a == winner]) for winner in winners])


def mean_of(values: np.ndarray) -> Figure:
    """Return the mean of one value a problem, with its interval."""
    low, high = interval(values) if len(values) > 1 else (None, None)
    return Figure(float(values.mean()), low, high)


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return a 95 % interval of the mean over all problems like these.

    From `MANY` problems on it is the bootstrap over problems, corrected for bias and skewness (BCa;
    Efron 1987). With fewer, or if all values are equal, it is Student's t. Shares then get four
    more values, two zeros and two ones (Agresti and Coull 1998, for proportions), because the
    spread of a few shares near 0 or 1 is often far too small.

    Args:
        values: one a problem, float64 [n], n >= 2.
    """
    from scipy import stats  # its import takes a while, and a worker needs none of this

    n = len(values)
    if n >= MANY and np.ptp(values) > 0:
        found = stats.bootstrap(
            (values,),
            np.mean,
            confidence_level=LEVEL,
            n_resamples=_RESAMPLES,
            method="BCa",
            rng=np.random.default_rng(0),
        ).confidence_interval
        if math.isfinite(found.low) and math.isfinite(found.high):
            return float(found.low), float(found.high)
    shares = values.min() >= 0.0 and values.max() <= 1.0
    padded = np.concatenate([values, [0.0, 0.0, 1.0, 1.0]]) if shares else values
    half = stats.t.ppf((1 + LEVEL) / 2, len(padded) - 1) * padded.std(ddof=1)
    half /= math.sqrt(len(padded))
    low, high = padded.mean() - half, padded.mean() + half
    return (max(0.0, float(low)), min(1.0, float(high))) if shares else (float(low), float(high))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


WORDS = 13
"""Length of the word sequences that two problems may not share (Brown et al. 2020, GPT-3)."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Overlap:
    """One problem of an evaluation that the training problems have, whole or in part."""

    problem_id: str
    exact: bool
    """Whether some training problem has the same words; else it shares `WORDS` in a row."""
    trained: str
    """Id of the first such problem."""


def overlaps(asked: Iterable[tuple[str, str]], trained: Iterable[tuple[str, str]]) -> list[Overlap]:
    """Return the problems of an evaluation that training problems contain.

    Case and punctuation do not count. A problem shorter than `WORDS` is compared whole.

    Args:
        asked: id and text of the evaluation's problems.
        trained: the same of the training problems, read once.
    """
    whole: dict[tuple[str, ...], list[str]] = {}
    parts: dict[tuple[str, ...], list[str]] = {}
    order = []
    for problem_id, text in asked:
        order.append(problem_id)
        words = _words(text)
        whole.setdefault(words, []).append(problem_id)
        for part in _parts(words):
            parts.setdefault(part, []).append(problem_id)
    found: dict[str, Overlap] = {}
    for trained_id, text in trained:
        words = _words(text)
        for problem_id in whole.get(words, ()):
            if problem_id not in found or not found[problem_id].exact:
                found[problem_id] = Overlap(problem_id, True, trained_id)
        for part in _parts(words):
            for problem_id in parts.get(part, ()):
                found.setdefault(problem_id, Overlap(problem_id, False, trained_id))
    return [found[problem_id] for problem_id in order if problem_id in found]


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text.lower()))


def _parts(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for start in range(len(words) - WORDS + 1):
        yield words[start : start + WORDS]


NAME = "suite"


def add_command(commands: Any) -> None:
    """Add the command to the subparsers of `python -m sampler`."""
    parser = commands.add_parser(NAME, help="evaluate a directory of weights")
    parser.set_defaults(call=run)
    parser.add_argument("spec", metavar="SPEC.json", type=Path, help="a resolved spec")
    parser.add_argument("weights", metavar="WEIGHTS", type=Path, help="a Hugging Face directory")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="gets the result")
    parser.add_argument("--evaluation", action="append", required=True, metavar="NAME")
    parser.add_argument("--samples", type=int, default=0, metavar="N", help="answers to keep")
    parser.add_argument("--overlap", action="store_true", help="name problems that are trained on")


def run(options: argparse.Namespace) -> int:
    """Evaluate; return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        found = evaluate(options, logging.getLogger(NAME), stop_event())
        write_atomic(options.out, json.dumps(found, indent=1).encode() + b"\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def evaluate(
    options: argparse.Namespace, log: logging.Logger, stop: threading.Event
) -> dict[str, Any]:
    """Return the results by evaluation: figures, problems and, where asked for, overlaps.

    Raises:
        UserError: the weights, the problems or this machine cannot be used, or it was stopped.
    """
    spec = parse_resolved(read_bounded(options.spec, MAX_BYTES), place=str(options.spec))
    chosen = [each for each in spec.evaluations if each.name in options.evaluation]
    found: dict[str, Any] = {}
    with ExitStack() as up:
        # Read first: a row that is wrong is named before vLLM takes its time.
        sets = [
            up.enter_context(closing(build_evaluation_set(spec, evaluation, options.weights)))
            for evaluation in chosen
        ]
        log.info("waits for vLLM to load %s", options.weights)
        began = time.monotonic()
        # Imported here: it takes seconds, and neither `--help` nor a wrong row has a use for it.
        from sampler.engine.engine import Engine

        engine = up.enter_context(closing(Engine(evaluator_pool(spec), probe=False)))
        engine.load(options.weights, 0)
        log.info("vLLM loaded it in %.0f s", time.monotonic() - began)
        for evaluation, tasks in zip(chosen, sets, strict=True):
            began, name = time.monotonic(), evaluation.name
            questions = Questions.of(spec, evaluation, tasks)
            questions.shown, total = options.samples, questions.count
            log.info("%s: %d problems, %d answers each", name, total, evaluation.samples)
            if (results := ask(questions, engine, stop, log, name)) is None:
                raise UserError("stopped before all problems were answered", place=name)
            figures, _, faults = summary(results)
            found[name] = {
                "figures": {k: [f.value, f.low, f.high] for k, f in figures.items()},
                "unanswered": questions.unanswered,
                "faults": faults,
                "wall_s": round(time.monotonic() - began, 3),
                "problems": [asdict(each) for each in results],
                "samples": [answer for _, answer in sorted(questions.answers.items())],
            }
            if options.overlap:
                trained: Iterable[tuple[str, str]] = ()
                if any(source.train for source in spec.data.sources):
                    codec = PromptCodec.read(options.weights, spec.data)
                    problems = Problems(spec, problem_filter(spec, codec, "train"))
                    trained = _texts(problems, len(problems))
                rows = overlaps(_texts(tasks, total), trained)
                found[name]["overlap"] = [asdict(one) for one in rows]
    return found


def _texts(tasks: Any, count: int) -> Iterator[tuple[str, str]]:
    for index in range(count):
        problem = tasks.problem(index)
        yield problem.problem_id, problem.prompt
