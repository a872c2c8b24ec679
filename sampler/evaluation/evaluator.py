"""The evaluator of a run: takes each version that is due, and sends a signed result.

It is one more client of the broadcast tree, which no other role waits for. What is done stands with
the coordinator, so an evaluator that was killed goes on where it was.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from broadcast.manifest import read_manifest
from runspec.core.errors import UserError
from runspec.core.http_server import PREFIX, counter, gauge, serve_metrics
from runspec.core.process import Role, not_retried
from runspec.core.roles import Latest
from runspec.core.schema import Evaluation, RunSpec
from runspec.core.schema.role_names import evaluator_pool
from runspec.core.signed import SigningKey
from sampler.engine.engine import Engine, EngineDied, same_death_is_final
from sampler.evaluation.ask import Questions, ask, summary
from sampler.tasks.task_set import RunTask, build_evaluation_set
from sampler.worker.stores import VersionWatch
from verify.client import CoordinatorClient, connect, problem_files
from verify.formats.documents import Evaluated, ProblemResult, sign_evaluation
from verify.plugins import WeightsLocation, require_graders

_LOOK_S = 0.5


def evaluate_versions(
    role: Role,
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
    client, key = connect(role)
    spec = client.spec()
    require_graders(spec)
    done = client.evaluations()
    results = Results(done)

    with ExitStack() as up:  # closes in reverse order
        with not_retried():  # before any thread starts: on CPUs it may fork this process
            made = up.enter_context(closing(engine(evaluator_pool(spec))))
        serve_metrics(role.figures, results, log)
        arrivals = Arrivals(
            WeightsLocation.of(role),
            spec.verify.lease_timeout,
            log,
            due=lambda after, newest: due_versions(spec, after, newest, done),
        )
        up.enter_context(closing(arrivals))
        data = problem_files(client, spec, WeightsLocation.of(role), log)
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


@dataclass
class Evaluator:
    """Evaluates versions with one engine."""

    client: CoordinatorClient
    key: SigningKey
    """Signs the results."""
    spec: RunSpec
    data_dir: Path | None
    """Folder of the problems' files; None: at the spec's paths."""
    log: logging.Logger
    up: ExitStack
    """Closes the graders."""
    results: Results
    """Receives each result."""
    engine: Engine
    """Answers; nothing is loaded in it yet."""
    _questions: dict[str, Questions] = field(default_factory=dict)

    def evaluate(self, evaluation: Evaluation, arrived: Arrived, stop: threading.Event) -> bool:
        """Evaluate a version and send the result; return False if `stop` was set.

        Raises:
            UserError: the load failed its checks, nothing can be graded here, the coordinator
                refuses the result, or the engine died twice.
        """
        begun, cpu = time.monotonic(), cpu_seconds()
        if evaluation.name not in self._questions:
            tasks: RunTask = self.up.enter_context(
                closing(build_evaluation_set(self.spec, evaluation, arrived.path, self.data_dir))
            )
            self._questions[evaluation.name] = Questions.of(self.spec, evaluation, tasks)
        questions = self._questions[evaluation.name]
        what = f"{evaluation.name} of version {arrived.version}"
        try:
            results = self._answers(questions, arrived, stop, what)
        except EngineDied as error:
            self.log.warning("the engine died, asking again with a new one: %s", error)
            with same_death_is_final(error):
                results = self._answers(questions, arrived, stop, what)
        if results is None:
            return False
        figures, graded, faults = summary(results)
        result = Evaluated(
            run=self.spec.name,
            evaluation=evaluation.name,
            version=arrived.version,
            model_digest=read_manifest(arrived.path).model_digest,
            figures=figures,
            faults=faults,
            problems=results,
            finished=time.time(),
            wall_s=round(time.monotonic() - begun, 3),
            cpu_s=round(max(0.0, cpu_seconds() - cpu), 3),
        )
        self.client.evaluated(sign_evaluation(result, self.key))
        self.results.evaluated(result)
        mean = result.figures.get("mean")
        self.log.info(
            "%s: mean %s over %d problems, %d answers failed to be graded, %.1f s",
            *(what, f"{mean.value:.3f}" if mean else "unknown", graded, faults, result.wall_s),
        )
        return True

    def _answers(
        self, questions: Questions, arrived: Arrived, stop: threading.Event, what: str
    ) -> list[ProblemResult] | None:
        if self.engine.version != arrived.version:
            self.engine.load(arrived.path, arrived.version)
        return ask(questions, self.engine, stop, self.log, what)


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


@dataclass(frozen=True)
class Arrived:
    """A version on this machine."""

    version: int
    path: Path


class Arrivals(VersionWatch):
    """The newest due version that nobody has taken; one at most waits.

    `newest` is the newest version that was announced, once what is due up to it was fetched.

    Args:
        source, fetch_s, log: as for `VersionWatch`.
        due: returns the versions in (after, newest] that are due, in order.
    """

    def __init__(
        self,
        source: WeightsLocation,
        fetch_s: float,
        log: logging.Logger,
        *,
        due: Callable[[int, int], Sequence[int]],
    ) -> None:
        super().__init__(source, fetch_s, log)
        self._due = due
        self._changed = threading.Condition()
        self._waiting: Arrived | None = None
        self._taken = -1
        self._thread.start()

    def take(self, wait_s: float) -> Arrived | None:
        """Return the newest due version, or None if there is none within `wait_s` seconds.

        The one taken before is removed from this machine.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None, wait_s)
            taken, self._waiting = self._waiting, None
            if taken is not None:
                self._taken = taken.version
        return taken

    def _take_in(self, latest: Latest) -> None:
        """Fetch the last of the versions that are due; the publisher's signature is on each."""
        if due_now := self._due(self.newest, latest.version):
            *others, version = due_now
            expected = latest.manifest_digest if version == latest.version else None
            try:
                path = self._client.fetch(
                    version, manifest_digest=expected, deadline_s=self._fetch_s
                )
            except UserError as error:
                text = "version %d is not evaluated, nobody serves it: %s"
                self._log.warning(text, version, error)
            else:
                with self._changed:
                    before, self._waiting = self._waiting, Arrived(version, path)
                    self._changed.notify_all()
                    self._client.prune({version, self._taken})
                text = (
                    "version %d is not evaluated: the evaluator was busy until version %d was there"
                )
                for skipped in [*([before.version] if before else []), *others]:
                    self._log.warning(text, skipped, version)
        self.newest = latest.version  # not before: it may be the run's last


Done = Collection[tuple[str, int]]
"""Evaluations and the versions of which they are done."""


def due(spec: RunSpec, version: int, done: Done) -> list[Evaluation]:
    """Return the evaluations that a version is still to have."""
    found = []
    for each in spec.evaluations:
        at_end = each.at_end if version == spec.steps else version % each.every == 0
        if (each.at_start if version == 0 else at_end) and (each.name, version) not in done:
            found.append(each)
    return found


def due_versions(spec: RunSpec, after: int, newest: int, done: Done) -> Sequence[int]:
    """Return the versions in (after, newest] that are still to have an evaluation, in order."""
    return [version for version in range(after + 1, newest + 1) if due(spec, version, done)]


class Results(Collector):
    """The newest result of each evaluation.

    Args:
        done: evaluations that have a result already, and its version.
    """

    def __init__(self, done: Iterable[tuple[str, int]]) -> None:
        self._versions: dict[str, float] = {}
        for name, version in done:
            self._versions[name] = max(version, self._versions.get(name, -1))
        self._newest: dict[str, Evaluated] = {}
        self._busy_s = 0.0

    def evaluated(self, result: Evaluated) -> None:
        """Note a result that the coordinator has."""
        self._versions[result.evaluation] = result.version
        self._newest[result.evaluation] = result
        self._busy_s += result.wall_s

    def collect(self) -> Iterator[Metric]:
        """Yield the figures since the process began, and the newest version of each evaluation."""
        text, versions = "Newest version that was evaluated.", dict(self._versions)
        yield gauge("evaluator_newest_version", text, versions, "evaluation")
        yield counter("evaluator_busy_seconds", "Seconds spent on evaluations.", self._busy_s)
        text = "Figures of the newest version, with the ends of their 95 % intervals."
        labels = ["evaluation", "figure", "bound"]
        figures = GaugeMetricFamily(f"{PREFIX}evaluator_figure", text, labels=labels)
        for name, result in dict(self._newest).items():
            for figure, found in result.figures.items():
                bounds = {"estimate": found.value, "low": found.low, "high": found.high}
                for bound, value in bounds.items():
                    if value is not None:
                        figures.add_metric([name, figure, bound], value)
        yield figures
