"""What the loader and the rules have to say about a spec, each with its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Place:
    """Where a value was written; line and column count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Finding:
    """One thing wrong with a spec."""

    code: str
    """Stable name of the rule, like `unknown-key`."""
    severity: Severity
    path: str
    """The value's place in the spec, like `samplers.volunteers.dtype`; empty for the whole."""
    message: str
    file: str
    """The file of the layer that wrote the value; `--set` for overrides, one line each."""
    line: int
    column: int
    suggestion: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}"
        path = f"{self.path}: " if self.path else ""
        hint = f" ({self.suggestion})" if self.suggestion else ""
        return f"{place}: {self.severity} {self.code}: {path}{self.message}{hint}"
