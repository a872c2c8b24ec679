"""Result of an evaluation of one policy version, signed by the evaluator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.schema.fields import NAME_PATTERN
from runspec.core.signed import (
    STRICT,
    BadSignature,
    Digest,
    Natural,
    SigningKey,
    Time,
    open_payload,
    sign_document,
)

KIND = "evaluation"
MAX_EVALUATION_BYTES = 16 * 1024 * 1024
MAX_PROBLEMS = 100_000
Value = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]


@dataclass(frozen=True)
class Figure:
    """A mean over problems, and its 95 % interval."""

    __pydantic_config__ = STRICT

    value: Value
    low: Value | None
    """None if there is only one problem."""
    high: Value | None


@dataclass(frozen=True)
class ProblemResult:
    """The answers to one problem, in the order of their noise."""

    __pydantic_config__ = STRICT

    problem_id: Annotated[str, Field(max_length=400)]
    target: Natural | None
    """Length that the prompt asked for, in tokens."""
    rewards: Annotated[list[Value | None], Field(min_length=1, max_length=1024)]
    """Task reward of each answer; None if the grader failed."""
    lengths: Annotated[list[Natural], Field(min_length=1, max_length=1024)]
    """Output tokens of each, the end token included."""
    majority: Value | None
    """Mean reward of the most frequent answer, or of those that are equally frequent; None if no
    answer was graded."""


@dataclass(frozen=True)
class Evaluated:
    """Payload of the document."""

    __pydantic_config__ = STRICT

    run: str
    evaluation: Name
    """`evaluations[].name`."""
    version: Natural
    model_digest: Digest | None
    """Digest of the version's tensors, if its manifest has one."""
    figures: Annotated[dict[Name, Figure], Field(max_length=64)]
    """Figures by the names of `sampler.evaluation.ask`."""
    faults: Natural
    """Answers that the grader failed at; they count nowhere."""
    problems: Annotated[list[ProblemResult], Field(max_length=MAX_PROBLEMS)]
    finished: Time
    wall_s: Annotated[float, Field(ge=0)]
    cpu_s: Annotated[float, Field(ge=0)]
    """Seconds of processors that sampling and grading took, the engine's processes included."""


_CODEC = TypeAdapter(Evaluated)


def read_evaluations(files: Iterable[Path]) -> list[Evaluated]:
    """Return stored results, such as those of `runspec.core.run_files.evaluation_files`.

    Raises:
        UserError: a file is not a result.
    """
    found = []
    for path in files:
        try:
            found.append(open_evaluation(read_bounded(path, MAX_EVALUATION_BYTES), evaluators=None))
        except (OSError, BadSignature) as error:
            raise UserError(
                f"cannot be read: {error}", place=str(path), remedy="delete it: it is made again"
            ) from error
    return found


def sign_evaluation(result: Evaluated, key: SigningKey) -> bytes:
    return sign_document(KIND, asdict(result), key)


def open_evaluation(data: bytes, *, evaluators: frozenset[str] | None) -> Evaluated:
    """Check a result and return it.

    Args:
        data: the document.
        evaluators: public keys that may have signed it; None: any, in files of one's own run.

    Raises:
        BadSignature: it is not signed by one of them, or its fields are not valid.
    """
    result, _ = open_payload(
        _CODEC, data, kind=KIND, keys=evaluators, max_bytes=MAX_EVALUATION_BYTES
    )
    return result
