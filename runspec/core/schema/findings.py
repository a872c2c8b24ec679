"""Findings about a spec: place, message and fix; and `# runspec:` comments of its files."""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Severity = Literal["error", "warning"]
Number = int | float | str
MAX_SHOWN = 160
"""Characters of a line in output for people."""
MAX_SOURCE = 2000
"""Characters of a line in output for programs: one line may have thousands of findings."""
SET_FILE = "--set"
"""File name that findings give to the command line's overrides."""
MARKER = re.compile(r"#[ \t]*runspec:")
Span = tuple[tuple[int, int], tuple[int, int]]
"""Start (line, column), and exclusive end (line, column); both count from 0."""


@dataclass(frozen=True)
class Place:
    """Place in a file where something was written."""

    file: str
    line: int
    """Counts from 1."""
    column: int
    """Counts from 1."""
    source: str = ""
    """Text of the line, for the caret."""
    width: int = 0
    """Characters of the written text; 0 if it spans lines, or is not known."""

    @property
    def written(self) -> str:
        """Written text, quotes included; empty if `width` is 0."""
        return self.source[self.column - 1 : self.column - 1 + self.width]


@dataclass(frozen=True)
class Edit:
    """Replacement of a line's columns [start, end), which count from 1.

    A line that becomes blank is removed.
    """

    line: int
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Finding:
    """One error or warning about a spec."""

    place: Place
    """Place in the layer that wrote the value; file `--set` for overrides, one line each."""
    code: str
    """Stable name of the rule, like `unknown-key`."""
    message: str
    path: str = ""
    """Path in the spec, like `samplers.volunteers.dtype`; empty for the whole."""
    suggestion: str = ""
    severity: Severity = "error"
    numbers: Mapping[str, Number] = field(default_factory=dict, hash=False)
    """Measured values by name."""
    requires: str = ""
    """Violated condition: the first line of a rule's page, or a bound like `seed >= 0`."""
    fix: Edit | None = None
    """Edit that `lint --fix` makes in the place's file. It never changes the meaning."""
    blocking: bool = False
    """The spec cannot load before it is fixed, so it is never suppressed or deselected."""

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
    def line_text(self) -> str:
        """Text of the line for programs; empty if it is too long to repeat."""
        return self.place.source if len(self.place.source) <= MAX_SOURCE else ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}"
        path = f"{self.path}: " if self.path else ""
        hint = f" ({self.suggestion})" if self.suggestion else ""
        return f"{place}: {self.severity} {self.code}: {path}{self.message}{hint}"


def replacing(place: Place, text: str) -> Edit | None:
    """Return an edit that replaces the text at `place`; None if no file has it on one line."""
    if not place.width or place.file == SET_FILE:
        return None
    return Edit(place.line, place.column, place.column + place.width, text)


def format_finding(finding: Finding) -> str:
    """Return the finding as text: message, line with carets, measured and required values."""
    shown = [excerpt(finding)] if finding.place.source.strip() else []
    return "\n".join([str(finding), *shown, *(f"   {line}" for line in measured(finding))])


def measured(finding: Finding) -> list[str]:
    """Return a line of measured values and a line of the violated condition, if there are any."""
    lines = []
    if finding.numbers:
        # Integers in full, other numbers to six digits.
        shown = {n: f"{v:.6g}" if isinstance(v, float) else v for n, v in finding.numbers.items()}
        lines.append(f"measured: {', '.join(f'{name} = {text}' for name, text in shown.items())}")
    if finding.requires:
        lines.append(f"requires: {finding.requires}")
    return lines


def finite(finding: Finding) -> dict[str, Number]:
    """Return the measured values for JSON, which lacks infinity and NaN: those become text."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in finding.numbers.items()
    }


def from_here(file: str) -> Path:
    """Return a file's path relative to the working directory, as given if it lies elsewhere."""
    path = Path(os.path.normpath(file))
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def excerpt(finding: Finding) -> str:
    """Return the line that a finding is about, with carets below; a long line is cut."""
    at = finding.column - 1
    cut = max(0, at - MAX_SHOWN // 2) if len(finding.place.source) > MAX_SHOWN else 0
    shown = finding.place.source[cut : cut + MAX_SHOWN]
    # Tabs stay tabs under tabs, so that the caret meets its column on any terminal.
    before = "".join("\t" if c == "\t" else " " for c in shown[: at - cut])
    number = str(finding.line)
    margin = " " * len(number)
    carets = "^" * max(1, min(finding.place.width, len(shown) - len(before)))
    return f" {number} | {shown}\n {margin} | {before}{carets}"


@dataclass(frozen=True)
class Comment:
    """One `# runspec:` comment, from its `#` to the end of the line."""

    place: Place
    text: str
    first: int
    """First of the lines that it is about; none if `first` is above `last`."""
    last: int
    alone: bool
    """Whether nothing else is on its line."""


def find_comments(
    lines: Sequence[str], file: str, scalars: Sequence[Span], extents: Mapping[int, int]
) -> tuple[Comment, ...]:
    """Return the comments that begin with `# runspec:`.

    A comment behind a key or a value is about that line, and about the whole value that begins
    there. A comment alone on its line is about the next line with content, in the same way. A
    comment above all content is also about the whole file, whose findings are at its first line.

    Args:
        lines: lines of the file.
        file: name of the file in findings.
        scalars: spans of scalars with a `#`, which begins no comment there.
        extents: last line of a value by its first line, if it spans lines; both count from 1.
    """
    stripped = [line.strip() for line in lines]
    content = [n for n, text in enumerate(stripped, start=1) if text not in ("", "---")]
    content = [n for n in content if stripped[n - 1][0] != "#"]
    found = []
    for number, line in enumerate(lines):
        starts = [
            match.start()
            for match in MARKER.finditer(line)
            if line[: match.start()][-1:] in ("", " ", "\t")
            and not any(start <= (number, match.start()) < end for start, end in scalars)
        ]
        if not starts:
            continue
        at, first = starts[0], number + 1  # the rest of the line belongs to it
        text, alone = line[at:].rstrip(), not line[:at].strip()
        place = Place(file, number + 1, at + 1, line, len(text))
        if alone:
            below = bisect_right(content, first)
            first = content[below] if below < len(content) else len(lines) + 1
        last = 0 if first > len(lines) else extents.get(first, first)
        if alone and content[:1] == [first]:
            first = 1
        found.append(Comment(place, text, first, last, alone))
    return tuple(found)
