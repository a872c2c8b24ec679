"""The evaluator of a run: takes each version that is due, and sends a signed result.

It is one more client of the broadcast tree, which no other role waits for. What is done stands with
the coordinator, so an evaluator that was killed goes on where it was.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import psutil

from broadcast.client import WeightsClient
from broadcast.manifest import read_manifest
from runspec.core.keys import SigningKey
from runspec.core.metrics import serve_metrics
from runspec.core.process import not_retried
from runspec.core.spec.evaluations import evaluator_pool
from runspec.core.spec.schema import Evaluation, RunSpec
from sampler.engine.engine import Engine, EngineDied, same_death_is_final
from sampler.evaluation.arrivals import Arrivals, Arrived
from sampler.evaluation.ask import Questions, ask
from sampler.evaluation.due import due, due_versions
from sampler.evaluation.figures import figures
from sampler.evaluation.results import Results
from sampler.role import RoleOptions
from sampler.tasks.task_set import RunTask, build_evaluation_set
from verify.client import CoordinatorClient, problem_files
from verify.formats.evaluation import Evaluated, ProblemResult, sign_evaluation
from verify.plugins import require_graders

_LOOK_S = 0.5
_SAY_EVERY_S = 10.0


def evaluate_versions(
    options: RoleOptions,
    log: logging.Logger,
    stop: threading.Event,
    *,
    engine: Callable[..., Engine] = Engine,
) -> None:
    """Evaluate until the last version has its results, or `stop` is set.

    Raises:
        UserError: an error that a person can fix; the message names it.
        RunStopped: an error that would occur again.
    """
    key = SigningKey.load(options.key)
    client = CoordinatorClient(
        options.coordinator, key, run=options.run, root_public_key=options.public_key
    )
    spec = client.spec()
    require_graders(spec)
    done = client.evaluations()
    results = Results(done)

    def weights() -> WeightsClient:
        folder = options.dir / "weights"
        root = options.public_key
        return WeightsClient(
            options.weights, run=options.run, root_public_key=root, cache_dir=folder
        )

    with ExitStack() as up:  # closes in reverse order
        with not_retried():  # before any thread starts: on CPUs it may fork this process
            made = up.enter_context(closing(engine(evaluator_pool(spec))))
        serve_metrics(options.metrics, results, log)
        arrivals = Arrivals(
            weights,
            lambda after, newest: due_versions(spec, after, newest, done),
            fetch_s=spec.verify.lease_timeout,
            log=log,
        )
        up.enter_context(closing(arrivals))
        data = problem_files(client, spec, options.dir / "data", log)
        evaluator = Evaluator(client, key, spec, data, log, up, results, made)
        while not stop.is_set():
            last = arrivals.newest >= spec.steps  # if so, what is due is there already
            arrived = arrivals.take(_LOOK_S)
            if arrived is None:
                if last:
                    log.info("the last version has its evaluations")
                    return
                continue
            for evaluation in due(spec, arrived.version, done):
                if evaluator.evaluate(evaluation, arrived, stop):
                    done.add((evaluation.name, arrived.version))


class Evaluator:
    """Evaluates versions with one engine.

    Args:
        client: of the coordinator.
        key: signs the results.
        spec: of the run.
        data_dir: folder of the problems' files; None: at the spec's paths.
        log: the role's.
        up: closes the graders.
        results: receives each result.
        engine: answers; nothing is loaded in it yet.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        key: SigningKey,
        spec: RunSpec,
        data_dir: Path | None,
        log: logging.Logger,
        up: ExitStack,
        results: Results,
        engine: Engine,
    ) -> None:
        self._client, self._key, self._spec = client, key, spec
        self._data_dir, self._log, self._up = data_dir, log, up
        self._results = results
        self._engine = engine
        self._questions: dict[str, Questions] = {}

    def evaluate(self, evaluation: Evaluation, arrived: Arrived, stop: threading.Event) -> bool:
        """Evaluate a version and send the result; return False if `stop` was set.

        Raises:
            UserError: the load failed its checks, nothing can be graded here, the coordinator
                refuses the result, or the engine died twice.
        """
        begun, cpu = time.monotonic(), cpu_seconds()
        questions = self._asked(evaluation, arrived.path)
        try:
            results = self._answers(questions, arrived, stop)
        except EngineDied as error:
            self._log.warning("the engine died, asking again with a new one: %s", error)
            with same_death_is_final(error):
                results = self._answers(questions, arrived, stop)
        if results is None:
            return False
        graded = [each for each in results if any(r is not None for r in each.rewards)]
        result = Evaluated(
            run=self._spec.name,
            evaluation=evaluation.name,
            version=arrived.version,
            model_digest=read_manifest(arrived.path).model_digest,
            figures=figures(graded),
            faults=sum(reward is None for each in results for reward in each.rewards),
            problems=results,
            finished=time.time(),
            wall_s=round(time.monotonic() - begun, 3),
            cpu_s=round(max(0.0, cpu_seconds() - cpu), 3),
        )
        self._client.evaluated(sign_evaluation(result, self._key))
        self._results.evaluated(result)
        mean = result.figures.get("mean")
        self._log.info(
            "%s of version %d: mean %s over %d problems, %d answers failed to be graded, %.1f s",
            *(evaluation.name, arrived.version, f"{mean.value:.3f}" if mean else "unknown"),
            *(len(graded), result.faults, result.wall_s),
        )
        return True

    def _asked(self, evaluation: Evaluation, tokenizer_dir: Path) -> Questions:
        if evaluation.name not in self._questions:
            tasks: RunTask = self._up.enter_context(
                closing(build_evaluation_set(self._spec, evaluation, tokenizer_dir, self._data_dir))
            )
            self._questions[evaluation.name] = Questions.of(self._spec, evaluation, tasks)
        return self._questions[evaluation.name]

    def _answers(
        self, questions: Questions, arrived: Arrived, stop: threading.Event
    ) -> list[ProblemResult] | None:
        if self._engine.version != arrived.version:
            self._engine.load(arrived.path, arrived.version)
        name, total = questions.evaluation.name, len(questions)
        told = time.monotonic()

        def said(done: int) -> None:
            nonlocal told
            if time.monotonic() - told >= _SAY_EVERY_S:
                told = time.monotonic()
                self._log.info(
                    "%s of version %d: %d of %d problems", name, arrived.version, done, total
                )

        return ask(questions, self._engine, stop, said)


def cpu_seconds() -> float:
    """Return the processor seconds of this process and all below it, user and system."""
    own = psutil.Process()
    total = 0.0
    for process in [own, *own.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
