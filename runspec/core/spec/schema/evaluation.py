"""Evaluations of policy versions, and the role that makes them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from runspec.core.spec.fields import (
    NEWRUN,
    SITE,
    Block,
    Count,
    Duration,
    Name,
    Tokens,
    Unit,
)
from runspec.core.spec.schema.learner import Hardware
from runspec.core.spec.schema.samplers import Parallel, Sampling


class Evaluation(Block):
    """Problems that policy versions are asked and that nothing is trained on."""

    CHANGE = "restart"

    name: Name
    """Names the evaluation in results, curves and `runspec wait`."""
    source: Annotated[Name | None, NEWRUN] = None
    """Source of `data.sources`: all problems of one with `train: false`, else the tenth of it that
    the run holds out from training; null: the tenths of all that are trained on."""
    every: Annotated[Count, Unit("versions")] = 50
    """Versions whose number it divides are evaluated. Where the evaluator is late, it takes the
    newest of them and skips the others."""
    problems: Annotated[Count, Unit("problems")] | None = None
    """How many problems, the first of the source; null: all."""
    samples: Annotated[int, Field(gt=0, le=1024), Unit("answers")] = 4
    """Answers to each problem."""
    max_new_tokens: Tokens | None = None
    """Longest output; null: that of the evaluator's pool."""
    sampling: Sampling | None = None
    """How tokens are drawn; null: as the evaluator's pool does. The noise is always seeded."""
    grader: Name | None = None
    """Term of `reward` that grades all its problems; null: the one of each problem's type."""
    at_start: bool = True
    """Whether version 0 is evaluated."""
    at_end: bool = True
    """Whether the last version is evaluated; the end of the run waits for it."""


class Evaluator(Block):
    """The role that evaluates. It is trusted, and signs its results."""

    CHANGE = "restart"

    pool: Name | None = None
    """Pool of `samplers` with whose engine settings it samples; null: the first."""
    hardware: Annotated[Hardware | None, SITE] = None
    """Its accelerators; null: as one replica of the pool."""
    parallel: Annotated[Parallel | None, SITE] = None
    """How it divides the model; null: as one replica of the pool."""
    deadline: Duration = 1800.0
    """Longest time that a trained run waits for the evaluation of its last version."""
