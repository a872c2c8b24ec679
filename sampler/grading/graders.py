"""All the graders of a run: the terms of its rewards, in processes or threads as they ask."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from functools import partial

from runspec.core.spec.schema import Reward
from sampler.grading.answers import (
    MAX_ANSWER_CHARS,
    MAX_GRADERS,
    Answer,
    Result,
    TermRules,
    checked,
    fault,
    raised,
)
from sampler.grading.pool import GraderPool, GradersClosed
from sampler.grading.process import GraderProcess
from sampler.tasks.interfaces import Score, TaskTerm, make_term

_GRACE_S = 30.0
"""How much longer than its timeout a term with limits of its own may take."""


class Graders:
    """Grades answers by the task terms of some rewards.

    Args:
        rewards: the run's; terms that judge lengths are left out.
        processes: grader processes and threads at once; None takes the number of cores.

    Raises:
        UserError: a kind that no installed package offers, or settings that a term refuses.
    """

    def __init__(self, rewards: Sequence[Reward], *, processes: int | None = None) -> None:
        many = processes or min(MAX_GRADERS, len(os.sched_getaffinity(0)))
        self._rules: dict[str, TermRules] = {}
        self._threaded: dict[str, TaskTerm] = {}
        isolated: list[Reward] = []
        for reward in rewards:
            term = make_term(reward)
            if term.role == "length":
                continue
            self._rules[reward.kind] = rules_of(term, reward)
            if term.isolated:
                isolated.append(reward)
            else:
                self._threaded[reward.kind] = term
        self._pool = GraderPool(self._rules, processes=many, make=partial(GraderProcess, isolated))
        self._threads = ThreadPoolExecutor(many, thread_name_prefix="grader")

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
        calls: dict[int, Future[Result]] = {}
        for index, answer in enumerate(answers):
            kind = answer.problem.task_type
            if kind not in self._rules:
                results[index] = fault(answer.problem, f"no reward of kind {kind!r}")
            elif len(answer.text) > MAX_ANSWER_CHARS:
                reason = f"an answer of {len(answer.text)} characters, over {MAX_ANSWER_CHARS}"
                results[index] = Score(0.0, reason)
            elif kind in self._threaded:
                try:
                    calls[index] = self._threads.submit(self._in_thread, answer)
                except RuntimeError as error:  # they are shut down
                    raise GradersClosed("the graders are closed") from error
            else:
                pooled.append(index)
        scored = self._pool.score([answers[index] for index in pooled])
        results.update(zip(pooled, scored, strict=True))
        for index, call in calls.items():
            try:
                results[index] = call.result()
            except CancelledError as error:
                raise GradersClosed("the graders were closed") from error
        return [results[index] for index in range(len(answers))]

    def close(self) -> None:
        """Ends the grader processes."""
        self._pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _in_thread(self, answer: Answer) -> Result:
        """Grades in a thread of its own, which is left behind where it hangs."""
        kind = answer.problem.task_type
        seconds = self._rules[kind].timeout_s + _GRACE_S
        graded: Future[Result] = Future()
        threading.Thread(
            target=lambda: graded.set_result(_graded(self._threaded[kind], answer)), daemon=True
        ).start()
        try:
            return graded.result(seconds)
        except NotYet:
            return fault(answer.problem, f"the grader hangs: {seconds:.0f} s")


def _graded(term: TaskTerm, answer: Answer) -> Result:
    try:
        given = term.score(answer.problem, answer.text)
    except Exception as error:  # noqa: BLE001 - a plug-in may raise whatever it likes
        return fault(answer.problem, raised(term, error))
    score = given if isinstance(given, Score) else Score(given)
    return checked(answer.problem, score.value, score.reason)


def rules_of(term: TaskTerm, reward: Reward) -> TermRules:
    """What a term says of itself, with the spec's timeout where it gives one."""
    return TermRules(
        timeout_s=float(term.timeout_s if reward.timeout is None else reward.timeout),
        repeatable=bool(term.repeatable),
        limits_blame_answer=bool(term.limits_blame_answer),
    )
