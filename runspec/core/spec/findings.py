"""What the loader and the rules have to say about a spec, each with its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning"]
Number = int | float | str
MAX_SHOWN = 160
"""Characters of a line that people are shown."""
MAX_SOURCE = 2000
"""Characters of a line that programs are given: thousands of findings may be in one line."""
SET_FILE = "--set"
"""What findings call the command line's overrides."""


@dataclass(frozen=True)
class Place:
    """Where something was written."""

    file: str
    line: int
    """Counts from 1."""
    column: int
    """Counts from 1."""
    source: str = ""
    """The line's text, for the caret."""
    width: int = 0
    """Characters of what was written there; 0 where it is on several lines, or not known."""

    @property
    def written(self) -> str:
        """What was written there, quotes included; empty where `width` is 0."""
        return self.source[self.column - 1 : self.column - 1 + self.width]


@dataclass(frozen=True)
class Edit:
    """Text to put in the place of a line's [start, end) columns, which count from 1.

    A line that an edit leaves blank goes too.
    """

    line: int
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Finding:
    """One thing wrong with a spec."""

    place: Place
    """In the file of the layer that wrote the value; `--set` for overrides, one line each."""
    code: str
    """Stable name of the rule, like `unknown-key`."""
    message: str
    path: str = ""
    """Where in the spec, like `samplers.volunteers.dtype`; empty for the whole."""
    suggestion: str = ""
    severity: Severity = "error"
    numbers: Mapping[str, Number] = field(default_factory=dict, hash=False)
    """What was measured, by name."""
    requires: str = ""
    """What would have to hold: the first line of a rule's page, or a bound like `seed >= 0`."""
    fix: Edit | None = None
    """What `lint --fix` would do in the place's file; safe: it says what the writer must have
    meant."""
    blocking: bool = False
    """There is no spec before it is mended: it is never suppressed or deselected."""

    @property
    def file(self) -> str:
        return self.place.file

    @property
    def line(self) -> int:
        return self.place.line

    @property
    def column(self) -> int:
        return self.place.column

    @property
    def source(self) -> str:
        """Text of the line."""
        return self.place.source

    @property
    def width(self) -> int:
        """Characters that it is about, from `column` on; 0 where that is not known."""
        return self.place.width

    @property
    def line_text(self) -> str:
        """`source` for programs, empty where it is too long to repeat."""
        return self.source if len(self.source) <= MAX_SOURCE else ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}"
        path = f"{self.path}: " if self.path else ""
        hint = f" ({self.suggestion})" if self.suggestion else ""
        return f"{place}: {self.severity} {self.code}: {path}{self.message}{hint}"


def replacing(place: Place, text: str) -> Edit | None:
    """Puts `text` in the place of what was written there; None where no file has it on one line."""
    if not place.width or place.file == SET_FILE:
        return None
    return Edit(place.line, place.column, place.column + place.width, text)


def format_finding(finding: Finding) -> str:
    """The finding, its line with carets under what it is about, what was measured and required."""
    shown = [excerpt(finding)] if finding.source.strip() else []
    return "\n".join([str(finding), *shown, *(f"   {line}" for line in measured(finding))])


def measured(finding: Finding) -> list[str]:
    """A line of what was measured and one of what would have to hold, where a rule says so."""
    lines = []
    if finding.numbers:
        said = (f"{name} = {number_text(value)}" for name, value in finding.numbers.items())
        lines.append(f"measured: {', '.join(said)}")
    if finding.requires:
        lines.append(f"requires: {finding.requires}")
    return lines


def number_text(value: Number) -> str:
    """A number as people read it: whole ones whole, others to six digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def excerpt(finding: Finding) -> str:
    """The line that a finding is about, and carets under what it is about.

    Of a long line only what is around the place.
    """
    at = finding.column - 1
    cut = max(0, at - MAX_SHOWN // 2) if len(finding.source) > MAX_SHOWN else 0
    shown = finding.source[cut : cut + MAX_SHOWN]
    # Tabs stay tabs under tabs, so that the caret meets its column on any terminal.
    before = "".join("\t" if c == "\t" else " " for c in shown[: at - cut])
    number = str(finding.line)
    margin = " " * len(number)
    carets = "^" * max(1, min(finding.width, len(shown) - len(before)))
    return f" {number} | {shown}\n {margin} | {before}{carets}"
