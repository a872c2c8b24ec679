"""Which versions are due: pure functions over version numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from runspec.core.spec.schema import Evaluation, RunSpec

Done = Collection[tuple[str, int]]
"""Evaluations and the versions of which they are done."""


def is_due(evaluation: Evaluation, version: int, steps: int) -> bool:
    """Return whether a version is one of those that are evaluated, in a run of so many steps."""
    if version == 0:
        return evaluation.at_start
    if version == steps:
        return evaluation.at_end
    return version % evaluation.every == 0


def due(spec: RunSpec, version: int, done: Done) -> list[Evaluation]:
    """Return the evaluations that a version is still to have."""
    return [
        each
        for each in spec.evaluations
        if is_due(each, version, spec.steps) and (each.name, version) not in done
    ]


def due_versions(spec: RunSpec, after: int, newest: int, done: Done) -> Sequence[int]:
    """Return the versions in (after, newest] that are still to have an evaluation, in order."""
    return [version for version in range(after + 1, newest + 1) if due(spec, version, done)]
