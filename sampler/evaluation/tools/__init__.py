"""Reads what an evaluation tool wrote: bounded JSON of a shape that a schema says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from runspec.core.errors import UserError
from runspec.core.files import read_bounded

MAX_BYTES = 512 * 1024 * 1024
"""Largest result that is read."""
_HALF_WIDTH = 1.96
"""Of a normal distribution's 95 % interval, in standard errors."""
Shape = TypeVar("Shape", bound=BaseModel)


def result_files(out: Path, pattern: str) -> list[Path]:
    """Return the files that a tool wrote.

    Raises:
        UserError: there is none.
    """
    if not (found := sorted(out.glob(pattern))):
        raise UserError(
            "the tool wrote no result",
            place=str(out / pattern),
            remedy="the lines above say why",
        )
    return found


def read_shape(shape: type[Shape], path: Path) -> Shape:
    """Return a file's JSON as an object of a shape; what the shape does not name is ignored.

    Raises:
        UserError: it is larger than `MAX_BYTES`, or has another shape.
    """
    return parse_shape(shape, read_bounded(path, MAX_BYTES), str(path))


def parse_shape(shape: type[Shape], data: bytes, place: str) -> Shape:
    """Return JSON as an object of a shape.

    Raises:
        UserError: it has another shape.
    """
    try:
        return shape.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
            place=place,
            remedy="use the tool's version in requirements/",
        ) from error


def with_error(value: float, error: float | None) -> tuple[float, float | None, float | None]:
    """Return a value with the interval of its standard error, where that is known."""
    if error is None or not math.isfinite(error):
        return value, None, None
    half = _HALF_WIDTH * error
    return value, value - half, value + half
