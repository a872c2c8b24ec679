"""`# runspec: ...` comments of a YAML file, and which of its lines each is about."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runspec.core.spec.findings import Place

MARKER = re.compile(r"#[ \t]*runspec:")
Span = tuple[tuple[int, int], tuple[int, int]]
"""From (line, column) on, up to (line, column) without it; both count from 0."""


@dataclass(frozen=True)
class Comment:
    """One comment, from its `#` to the end of the line."""

    place: Place
    text: str
    first: int
    """The lines that it is about, from `first` to `last`; none where `first` is above `last`."""
    last: int
    alone: bool
    """Nothing else is on its line."""


def find_comments(
    lines: Sequence[str], file: str, scalars: Sequence[Span], extents: Mapping[int, int]
) -> tuple[Comment, ...]:
    """The comments that begin with `# runspec:`.

    One behind a key or a value is about that line, and about all of the value that begins there;
    one alone on its line is about the next line that says something, likewise. One above everything
    is also about the file as a whole, whose findings are at its first line.

    Args:
        lines: of the file.
        file: what findings call it.
        scalars: those that hold a `#`, which begins no comment there.
        extents: the last line of what begins in a line, where that is another; lines count from 1.
    """
    found = []
    for number, line in enumerate(lines):
        for match in MARKER.finditer(line):
            at = match.start()
            if at and line[at - 1] not in " \t":
                continue
            if any(start <= (number, at) < end for start, end in scalars):
                continue
            found.append(_comment(lines, file, number, at, extents))
            break  # the rest of the line belongs to it
    return tuple(found)


def _comment(
    lines: Sequence[str], file: str, number: int, at: int, extents: Mapping[int, int]
) -> Comment:
    text = lines[number][at:].rstrip()
    place = Place(file, number + 1, at + 1, lines[number], len(text))
    alone = not lines[number][:at].strip()
    first = number + 1
    if alone:
        first = _next_said(lines, first) or len(lines) + 1
    last = 0 if first > len(lines) else extents.get(first, first)
    if alone and _next_said(lines, 0) == first:
        first = 1
    return Comment(place, text, first, last, alone)


def _next_said(lines: Sequence[str], after: int) -> int | None:
    """The first line below line `after` that is more than blanks, a comment or a directive."""
    for number in range(after, len(lines)):
        said = lines[number].strip()
        if said and said[0] != "#" and said != "---":
            return number + 1
    return None
