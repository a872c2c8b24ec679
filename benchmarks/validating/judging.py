"""The validator's side: a queue in memory, a validator that serves it, and where its time goes."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import verify.examiner
import verify.recompute
import verify.validator
from benchmarks.one_version import OneVersion
from benchmarks.sampler_engine import cpu_s
from benchmarks.validating.sampling import COORDINATOR, Handed
from runspec.core import schema
from runspec.core.roles import Roles
from runspec.core.signed import SigningKey
from verify.client import RunFinished, WorkItem
from verify.formats.verdict import open_verdict
from verify.plugins import TaskSet

VALIDATOR = SigningKey.generate()


@dataclass
class Queue:
    """The coordinator's side, in memory: hands out submissions, takes verdicts."""

    waiting: list[Handed] = field(default_factory=list)
    tables: dict[str, bytes] = field(default_factory=dict)
    accepted: int = 0

    def offer(self, handed: Sequence[Handed]) -> None:
        self.waiting = list(handed)
        self.tables = {each.item.submission: each.table for each in handed}
        self.accepted = 0

    def roles(self) -> Roles:
        held = {"publisher": (), "coordinator": (COORDINATOR,), "validator": (VALIDATOR,)}
        keys = {role: frozenset(key.public_hex for key in held[role]) for role in held}
        return Roles("validator-speed", 0.0, 1e12, **keys)

    def next_submission(self, wait_s: float) -> WorkItem | None:
        if self.waiting:
            return self.waiting.pop(0).item
        if wait_s:
            raise RunFinished
        return None

    def download(self, digest: str) -> bytes:
        return self.tables[digest]

    def verdict(self, envelope: bytes, table: bytes) -> None:
        verdict = open_verdict(envelope, validators=self.roles().validator)
        if not verdict.accepted:
            raise RuntimeError(f"an honest submission was rejected: {verdict.reason}")
        self.accepted += 1

    def release_claims(self, submissions: Sequence[str], fault: str = "") -> None:
        raise RuntimeError(f"no verdict on {len(submissions)} submissions: {fault}")


class Judge:
    """A validator with one engine, and the queue that it serves."""

    def __init__(self, spec: schema.RunSpec, engine: OneVersion, tasks: TaskSet) -> None:
        self._spec, self._engine, self._tasks = spec, engine, tasks
        self._queue = Queue()
        self._handed: list[Handed] = []
        self._validator = self._make()

    def give(self, handed: list[Handed]) -> None:
        self._handed = handed

    def judge(self) -> int:
        """Judges what was given; counts output tokens."""
        self._queue.offer(self._handed)
        self._validator.serve(threading.Event())
        if self._queue.accepted != len(self._handed):
            raise RuntimeError("not every submission has a verdict")
        return sum(each.tokens for each in self._handed)

    def stages(self, others: Sequence[int]) -> dict[str, float]:
        """CPU microseconds an output token of one more pass, by stage.

        Args:
            others: the processes that grade.
        """
        spent: dict[str, float] = defaultdict(float)
        before = cpu_s(others)
        with ExitStack() as stack:
            for name, where, what in (
                ("parse", verify.examiner, "open_rows"),
                ("grade", verify.examiner, "grade"),
                ("prefill", self._engine, "prefill"),
                ("proofs", verify.recompute, "verify_proofs_batch"),
                ("fingerprints", verify.examiner, "fingerprints"),
                ("checks", verify.examiner, "examine"),
                ("sign", verify.validator, "encode_verdicts"),
                ("all", self, "judge"),
            ):
                stack.enter_context(_timed(where, what, spent, name))
            tokens = self.judge()
        spent["rest"] = 2 * spent["all"] - sum(spent.values())
        spent["graders"] = cpu_s(others) - before
        return {name: round(1e6 * seconds / tokens, 2) for name, seconds in spent.items()}

    def _make(self) -> verify.validator.Validator:
        return verify.validator.Validator(
            self._spec,
            VALIDATOR,
            self._queue,
            self._engine,
            task_set_of=lambda directory: self._tasks,
            log=logging.getLogger("validator"),
        )


@contextmanager
def _timed(where: Any, what: str, spent: dict[str, float], name: str) -> Iterator[None]:
    """Adds to `spent[name]` the CPU seconds in a function of a module or an object."""
    function = getattr(where, what)

    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name] += time.process_time() - begun

    with mock.patch.object(where, what, timed):
        yield
