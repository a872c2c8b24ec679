"""All graders of a run: the terms of its rewards, in a pool of processes or in threads.

If a grader process hangs or dies, only its current answer is lost, and no other is delayed.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from runspec.core.schema import Reward
from sampler.tasks import interfaces as grading
from sampler.tasks.environment import Call, Environment
from sampler.tasks.interfaces import (
    Answer,
    Reply,
    Result,
    Score,
    TaskTerm,
    TermRules,
    fault,
    make_term,
)
from sampler.tasks.launch import GraderLost, GraderProcess
from verify.plugins import GraderFault

ANSWERS_A_MESSAGE = 8
BYTES_A_MESSAGE = 1 << 20
MAX_ITEM_BYTES = 24 << 20
"""Largest problem and answer together that go to a grader, as JSON. No answer alone is larger,
whatever its characters, so an answer cannot make its own grading fail."""
_GRACE_S = 30.0
"""Seconds beyond its timeout that a term with limits of its own may take."""


class GradersClosed(RuntimeError):
    """The graders were closed before an answer was graded."""


@dataclass(frozen=True)
class _Item:
    """One answer, or one call of an environment, in the queue."""

    answer: Answer | Call
    message: str
    """The answer as JSON."""
    future: Future[Any]
    together: Sequence[Future[Any]]
    """Futures of all queued answers of the same caller."""

    def finish(self, result: Reply) -> None:
        with suppress(InvalidStateError):  # the caller gave it up
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        """Fail all answers of the caller."""
        for future in self.together:
            with suppress(InvalidStateError):  # already graded
                future.set_exception(error)


class Graders:
    """Grades answers by the terms of a run's rewards, in long-lived processes that start when they
    are first needed. Terms that are not isolated run in threads.

    Args:
        rewards: those of the run; terms that judge lengths are left out.
        processes: most processes, and threads, at once; by default one for each core, and four
            where environments are played, whose calls may wait.
        share: of its limits, what a call of an environment may use (`Environment.share`).

    Raises:
        UserError: a kind that no installed package offers, or settings that a term refuses.
    """

    def __init__(
        self, rewards: Sequence[Reward], *, processes: int | None = None, share: float = 1.0
    ) -> None:
        cores, each_core = len(os.sched_getaffinity(0)), 1
        self.rules: dict[str, TermRules] = {}
        """Rules of each kind that can be graded."""
        self._threaded: dict[str, TaskTerm | Environment] = {}
        self._isolated: list[Reward] = []
        for reward in rewards:
            term = make_term(reward)
            if term.role == "length":
                continue
            seconds = float(term.timeout_s if reward.timeout is None else reward.timeout)
            if term.role == "environment":
                exact = term.determinism == "exact"
                self.rules[reward.kind] = TermRules(seconds, exact, limits_blame_answer=False)
                term.share = share
                each_core = 4
            else:
                self.rules[reward.kind] = TermRules(
                    seconds, bool(term.repeatable), bool(term.limits_blame_answer)
                )
            if term.isolated:
                self._isolated.append(reward)
            else:
                self._threaded[reward.kind] = term
        self._processes = processes or min(grading.MAX_GRADERS, each_core * cores)
        self._executor = ThreadPoolExecutor(self._processes, thread_name_prefix="grader")
        self._queue: deque[_Item] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._alive: set[GraderProcess] = set()

    def score(self, answers: Sequence[Answer]) -> list[Result]:
        """Grade answers in the order given; several threads may call it at once.

        Each answer has its own deadline, so the call ends.

        Raises:
            UserError: no grader process starts, or a sandbox that a term needs does not work.
            GradersClosed: before all were graded.
        """
        found: list[Result] = self._results(answers)
        return found

    def play(self, calls: Sequence[Call]) -> list[Reply]:
        """Call environments, as `score` grades: side by side, each with its own deadline.

        Raises:
            UserError, GradersClosed: as `score`.
        """
        found: list[Reply] = self._results(calls)
        return found

    def _results(self, answers: Sequence[Answer | Call]) -> list[Any]:
        futures: list[Future[Any]] = []
        queued: list[Future[Any]] = []
        items: list[_Item] = []
        for answer in answers:
            kind, future = answer.problem.task_type, Future[Any]()
            if kind not in self.rules:
                future.set_result(fault(answer.problem, f"no reward of kind {kind!r}"))
            elif isinstance(answer, Answer) and len(answer.text) > grading.MAX_ANSWER_CHARS:
                reason = (
                    f"an answer of {len(answer.text)} characters, over {grading.MAX_ANSWER_CHARS}"
                )
                future.set_result(Score(0.0, reason))
            elif kind in self._threaded:
                try:
                    future = self._executor.submit(self._grade_in_thread, answer)
                except RuntimeError as error:  # it is shut down
                    raise GradersClosed("the graders are closed") from error
            elif isinstance(message := _message(answer), str):
                queued.append(future)
                items.append(_Item(answer, message, future, queued))
            else:
                future.set_result(message)
            futures.append(future)
        with self._changed:
            if self._closed:
                raise GradersClosed("the graders are closed")
            self._queue.extend(items)
            while len(self._threads) < min(self._processes, len(self._queue)):
                name = f"grader-{len(self._threads)}"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()
        try:
            return [future.result() for future in futures]
        except CancelledError as error:
            raise GradersClosed("the graders were closed") from error

    def close(self) -> None:
        """End the processes; callers that wait for an answer get `GradersClosed`."""
        with self._changed:
            self._closed = True
            left = [*self._queue]
            self._queue.clear()
            alive = [*self._alive]
            self._changed.notify_all()
        for item in left:
            item.fail(GradersClosed("the graders were closed"))
        for process in alive:
            process.stop()
        for thread in self._threads:
            thread.join()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _grade_in_thread(self, answer: Answer | Call) -> Reply:
        """Grade or play in a thread of its own, which is abandoned if it hangs."""
        kind = answer.problem.task_type
        seconds = self.rules[kind].timeout_s + _GRACE_S
        graded: Future[Reply] = Future()

        def grade() -> None:
            reply = grading.reply_of(self._threaded[kind], answer)
            graded.set_result(grading.outcome_of(answer, reply, self.rules[kind]))

        threading.Thread(target=grade, daemon=True).start()
        try:
            return graded.result(seconds)
        except TimeoutError:
            return fault(answer.problem, f"the grader hangs: {seconds:.0f} s")

    def _serve(self) -> None:
        """Grade what is in the queue with one process at a time, until the graders are closed."""
        process: GraderProcess | None = None
        while (items := self._take()) is not None:
            try:
                if process is None:
                    process = GraderProcess(self._isolated)
                    with self._changed:
                        self._alive.add(process)
                        closed = self._closed
                    if closed:
                        process.stop()
                going_on = self._grade(process, items)
            except Exception as error:  # noqa: BLE001 - raised again where its caller waits
                for item in items:
                    item.fail(error)
                going_on = False
            if not going_on and process is not None:
                self._end(process)
                process = None
        if process is not None:
            self._end(process)

    def _end(self, process: GraderProcess) -> None:
        with self._changed:
            self._alive.discard(process)
        process.kill()

    def _take(self) -> deque[_Item] | None:
        """Take a fair share of the waiting answers; None once the graders are closed."""
        taken: deque[_Item] = deque()
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            while self._queue and self._queue[0].future.done():  # given up
                self._queue.popleft()
            share = max(1, min(ANSWERS_A_MESSAGE, len(self._queue) // self._processes))
            size = 0
            while self._queue and len(taken) < share:
                size += len(self._queue[0].message)
                if taken and size > BYTES_A_MESSAGE:
                    break
                taken.append(self._queue.popleft())
            return None if self._closed and not taken else taken

    def _grade(self, process: GraderProcess, items: deque[_Item]) -> bool:
        """Grade the taken answers; return whether the process can continue.

        If it cannot, the answer under way has its result and the others return to the queue.
        """
        try:
            process.ask([item.message for item in items])
            while items:
                item = items[0]
                rules = self.rules[item.answer.problem.task_type]
                reply = process.answer(rules.timeout_s)
                item.finish(grading.outcome_of(item.answer, reply, rules))
                items.popleft()
        except GraderLost as lost:
            with self._changed:
                if self._closed:
                    raise GradersClosed("the graders were closed") from lost
            item = items.popleft()
            rules = self.rules[item.answer.problem.task_type]
            reason = f"no verdict within {rules.timeout_s:g} s" if lost.overdue else str(lost)
            item.finish(grading.over_limit(item.answer, reason, rules))
            with self._changed:
                self._queue.extendleft(reversed(items))
                self._changed.notify_all()
            return False
        return True


def _message(answer: Answer | Call) -> str | GraderFault:
    """Return an answer or a call as JSON for a grader process, or why there is none."""
    problem = answer.problem
    text, call = (answer.text, None) if isinstance(answer, Answer) else ("", answer)
    message = {"kind": problem.task_type, "answer": text, **vars(problem)}
    message["call"] = None if call is None else [call.function, call.arguments]
    try:
        line = json.dumps(message | {"verification": dict(problem.verification)})
    except (TypeError, ValueError, RecursionError) as error:
        return fault(problem, f"its verification is no JSON: {error}")
    if len(line) > MAX_ITEM_BYTES:
        return fault(problem, f"{len(line)} bytes to grade are over the limit")
    return line
