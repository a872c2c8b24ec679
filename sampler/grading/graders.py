"""All the graders of a run: the terms of its rewards, in processes or threads as they ask."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from functools import partial

from runspec.core.spec.schema import Reward
from sampler.grading.answers import (
    MAX_ANSWER_CHARS,
    Answer,
    Result,
    TermRules,
    checked,
    fault,
    graders_at_once,
)
from sampler.grading.pool import GraderPool, GradersClosed
from sampler.grading.process import GraderProcess, TermSource
from sampler.tasks.interfaces import Score, TaskTerm, make_term, reward_entry_point

_GRACE_S = 30.0
"""How much longer than its timeout a term with limits of its own may take."""
_LOOK_S = 0.5


class Graders:
    """Grades answers by the task terms of some rewards.

    Args:
        rewards: the run's; terms that judge lengths are left out.
        processes: grader processes and threads at once; None takes the number of cores.

    Raises:
        UserError: a kind that no installed package offers, or settings that a term refuses.
    """

    def __init__(self, rewards: Sequence[Reward], *, processes: int | None = None) -> None:
        self._many = processes or graders_at_once()
        self._rules: dict[str, TermRules] = {}
        self._threaded: dict[str, TaskTerm] = {}
        isolated: dict[str, TermSource] = {}
        for reward in rewards:
            term = make_term(reward)
            if term.role == "length":
                continue
            self._rules[reward.kind] = rules_of(term, reward)
            if term.isolated:
                isolated[reward.kind] = TermSource(reward, reward_entry_point(reward))
            else:
                self._threaded[reward.kind] = term
        self._pool = GraderPool(
            self._rules, processes=self._many, make=partial(GraderProcess, isolated)
        )
        self._threads = self._make_threads()
        self._closed = False
        self._lock = threading.Lock()

    @property
    def rules(self) -> Mapping[str, TermRules]:
        """Of each kind that can be graded."""
        return self._rules

    def score(self, answers: Sequence[Answer]) -> list[Result]:
        """Grades answers, in the order given; several threads may ask at once.

        Raises:
            UserError: no grader process starts, or a sandbox that a term needs does not work.
            GradersClosed: before all were graded.
        """
        results: dict[int, Result] = {}
        pooled: list[int] = []
        calls: dict[int, _Call] = {}
        for index, answer in enumerate(answers):
            kind = answer.problem.task_type
            if kind not in self._rules:
                results[index] = fault(answer.problem, f"no reward of kind {kind!r}")
            elif len(answer.text) > MAX_ANSWER_CHARS:
                reason = f"an answer of {len(answer.text)} characters, over {MAX_ANSWER_CHARS}"
                results[index] = Score(0.0, reason)
            elif kind in self._threaded:
                calls[index] = self._call(answer)
            else:
                pooled.append(index)
        scored = self._pool.score([answers[index] for index in pooled])
        results.update(zip(pooled, scored, strict=True))
        for index, call in calls.items():
            results[index] = self._wait(call)
        return [results[index] for index in range(len(answers))]

    def close(self) -> None:
        """Ends the grader processes."""
        with self._lock:
            self._closed = True
        self._pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _call(self, answer: Answer) -> _Call:
        call = _Call(answer, self._threaded[answer.problem.task_type])
        self._begin(call)
        return call

    def _begin(self, call: _Call) -> None:
        with self._lock:
            if self._closed:
                raise GradersClosed("the graders are closed")
            call.begin(self._threads)

    def _wait(self, call: _Call) -> Result:
        rules = self._rules[call.answer.problem.task_type]
        while True:
            try:
                return call.future.result(_LOOK_S)
            except NotYet:
                if call.running_s() <= rules.timeout_s + _GRACE_S:
                    continue
            except CancelledError:  # closed, or its turn never came behind one that hangs
                self._begin(call)
                continue
            with self._lock:  # its thread cannot be ended: what waits behind it gets others
                if call.threads is self._threads and not self._closed:
                    self._threads.shutdown(wait=False, cancel_futures=True)
                    self._threads = self._make_threads()
            return fault(call.answer.problem, f"the grader hangs: {call.running_s():.0f} s")

    def _make_threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._many, thread_name_prefix="grader")


class _Call:
    """An answer that a thread of this process grades."""

    def __init__(self, answer: Answer, term: TaskTerm) -> None:
        self.answer, self._term = answer, term
        self._started: float | None = None

    def begin(self, threads: ThreadPoolExecutor) -> None:
        """Queues it for some threads."""
        self.threads = threads
        self.future: Future[Result] = threads.submit(self._run)

    def running_s(self) -> float:
        """Seconds since a thread took it; 0 before."""
        return 0.0 if self._started is None else time.monotonic() - self._started

    def _run(self) -> Result:
        self._started = time.monotonic()
        problem = self.answer.problem
        try:
            given = self._term.score(problem, self.answer.text)
        except Exception as error:  # noqa: BLE001 - a plug-in may raise whatever it likes
            return fault(problem, f"{type(error).__name__}: {error}")
        if isinstance(given, Score):
            return checked(problem, given.value, given.reason)
        return checked(problem, given)


def rules_of(term: TaskTerm, reward: Reward) -> TermRules:
    """What a term says of itself, with the spec's timeout where it gives one."""
    return TermRules(
        timeout_s=float(term.timeout_s if reward.timeout is None else reward.timeout),
        repeatable=bool(term.repeatable),
        limits_blame_answer=bool(term.limits_blame_answer),
    )
