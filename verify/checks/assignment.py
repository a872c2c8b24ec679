"""Whether the rows are what the lease assigned: nothing chosen, nothing missing, nothing twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from verify.checks.base import Subject, no_faults
from verify.formats.lease import Assignment
from verify.formats.submission import Rollout
from verify.formats.verdict import CheckResult

_SHOWN = 40  # characters of a hostile string that a reason repeats


class AssignmentCheck:
    """Every (group, sample) of the lease exactly once, each with the group's problem and prompt.

    The value is the number of fields that differ.
    """

    name = "assignment"

    def run(self, subject: Subject) -> list[CheckResult]:
        tasks = [_assigned(given, subject) for given in subject.assignments]
        times = Counter((r.group, r.sample) for r in subject.rollouts)
        expected = len(tasks) * subject.group_size
        count = len(subject.rollouts)
        missing = [f"{count} rows, the lease asks for {expected}"] if count != expected else []
        return [
            no_faults(
                self.name,
                [*missing, *_faults(row, times[row.group, row.sample], subject, tasks)],
            )
            for row in subject.rollouts
        ]


@dataclass(frozen=True)
class _Assigned:
    problem_id: str
    target: int | None
    prompt: list[int]


def _assigned(given: Assignment, subject: Subject) -> _Assigned:
    problem_id = subject.task_set.problem(given.problem).problem_id
    prompt = subject.task_set.prompt_tokens(given.problem, given.target)
    return _Assigned(problem_id, given.target, list(prompt))


def _faults(row: Rollout, times: int, subject: Subject, tasks: list[_Assigned]) -> Iterator[str]:
    lease, sampling = subject.lease, subject.pool.sampling
    yield from _differing(
        [
            ("run", row.run, lease.run),
            ("step", row.step, lease.step),
            ("worker", row.worker, lease.worker),
            ("lease", row.lease, subject.lease_digest),
            ("version", row.version, lease.version),
            ("temperature", row.temperature, float(np.float32(sampling.temperature))),
            ("top_p", row.top_p, float(np.float32(sampling.top_p))),
            ("top_k", row.top_k, sampling.top_k),
        ]
    )
    if times > 1:
        yield f"group {row.group} sample {row.sample} appears {times} times"
    if not (0 <= row.group < len(tasks) and 0 <= row.sample < subject.group_size):
        yield f"group {row.group} sample {row.sample} is not of the lease"
        return
    task = tasks[row.group]
    yield from _differing(
        [("problem_id", row.problem_id, task.problem_id), ("target", row.target, task.target)]
    )
    same_length = len(row.prompt_tokens) == len(task.prompt)  # no list of what nobody asked for
    if not same_length or row.prompt_tokens.tolist() != task.prompt:
        yield "the prompt is not the assigned problem's"


def _differing(fields: list[tuple[str, object, object]]) -> Iterator[str]:
    for name, claimed, assigned in fields:
        if claimed != assigned:
            yield f"{name} is {str(claimed)[:_SHOWN]!r}, assigned {str(assigned)[:_SHOWN]!r}"
