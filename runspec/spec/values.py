"""Scalar types of the spec: durations, names, environment variables, public keys."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def parse_duration(value: Any) -> float:
    """Seconds from `500ms`, `60s`, `90m`, `1.5h` or `2d`.

    Raises:
        ValueError: a bare number (its unit would be a guess), no time at all, or any other text.
    """
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("a duration with a unit was expected, like 500ms, 60s, 90m, 1.5h or 2d")
    seconds = float(match[1]) * _UNITS[match[2]]
    if seconds == 0.0:
        raise ValueError("a duration above zero was expected")
    return seconds


def format_duration(seconds: float) -> str:
    """The shortest text that `parse_duration` reads back exactly."""
    for unit, size in reversed(_UNITS.items()):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds!r}s"


Duration = Annotated[
    float,
    BeforeValidator(parse_duration, json_schema_input_type=str),
    PlainSerializer(format_duration, return_type=str),
]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
PublicKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(gt=0)]
