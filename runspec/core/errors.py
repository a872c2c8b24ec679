"""Words for people: errors for users, descriptions of other errors, and numbers."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

_MAX_TEXT = 200
"""Most characters of an exception's text."""


class UserError(Exception):
    """Error outside the program that a person can fix.

    Args:
        thing: what is wrong, with the measured value.
        place: where it was found (a path, URL, role or field).
        remedy: what to do about it.
    """

    exit_code = 1
    """Exit code of a command."""

    def __init__(self, thing: str, *, place: str = "", remedy: str = "") -> None:
        self.thing, self.place, self.remedy = thing, place, remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.place}: {self.thing}" if self.place else self.thing
        return f"{text}\n  remedy: {self.remedy}" if self.remedy else text


class RunElsewhere(Exception):
    """A command names a run whose directory is on another machine.

    Args:
        run: its name.
        carry: runs a command line there, and returns its exit code.
    """

    def __init__(self, run: str, carry: Callable[[Sequence[str]], int]) -> None:
        super().__init__(run)
        self.carry = carry


class BadUsage(UserError):
    """Error: a file cannot be read, or an argument is invalid."""

    exit_code = 2


class NotNow(UserError):
    """Error: nothing can be written for now, as on a full disk; the process goes on."""


@contextmanager
def bad_usage() -> Iterator[None]:
    """Turn each UserError inside into a BadUsage; also a decorator of functions."""
    try:
        yield
    except UserError as error:
        raise BadUsage(error.thing, place=error.place, remedy=error.remedy) from error


def remedies_once(remedies: Sequence[str]) -> list[str]:
    """Return the remedies of a list of faults; those that the next one has too are empty."""
    return [
        "" if number + 1 < len(remedies) and remedies[number + 1] == each else each
        for number, each in enumerate(remedies)
    ]


def one_line(text: str, most: int) -> str:
    """Return a text as one line of at most `most` printable characters.

    It is for untrusted text: terminals obey control characters.
    """
    words = " ".join(text[: 4 * most].split())
    return "".join(letter if letter.isprintable() else "?" for letter in words)[:most]


def describe_error(error: Exception, package: str | None = None) -> str:
    """Return type, text and place of an exception, like `KeyError: 'gold' at mine/math.py:17`.

    Args:
        error: the exception; its text is cut after 200 characters.
        package: top-level package whose innermost frame is named; if None, or without such a
            frame, the innermost frame of all.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [
        each
        for each in frames
        if str(each[0].f_globals.get("__name__", "")).partition(".")[0] == package
    ]
    words = f"{type(error).__name__}: {one_line(str(error), _MAX_TEXT)}"
    if not frames:
        return words
    frame, line = (own or frames)[-1]
    return f"{words} at {'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{line}"


_BARS = "▁▂▃▄▅▆▇█"


@contextmanager
def reported(thing: str, place: object, remedy: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise errors of these kinds as a UserError: `thing`, with what the error says."""
    try:
        yield
    except kinds as error:
        why = error.thing if isinstance(error, UserError) else error
        why = error.strerror or error if isinstance(error, OSError) else why
        raise UserError(f"{thing}: {why}", place=str(place), remedy=remedy) from error


def sparkline(values: Sequence[float], width: int) -> str:
    """A line of bars, each the mean of its share of the values, from the lowest to the highest."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def number(value: object, digits: int = 3) -> str:
    """Significant digits; `-` for a figure that is not known."""
    return f"{value:.{digits}g}" if isinstance(value, int | float) else "-"


def share(value: object) -> str:
    """Whole per cent; `-` for a share that is not known."""
    return f"{100 * value:.0f} %" if isinstance(value, int | float) else "-"


def per_second(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) else "-"


def duration(seconds: float) -> str:
    """Like 42 s, 3 min 5 s, 2 h 10 min or 4.2 days."""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.3g} days"
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def seconds(value: object) -> str:
    """A time between fractions of a second and hours; `-` for one that is not known."""
    if not isinstance(value, int | float):
        return "-"
    return f"{value:.2g} s" if value < 10 else duration(value)


def latency(figures: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Median and 99th percentile of a wait, by a step's row or a run's summary.

    Args:
        figures: has `NAME_latency_p50` and `NAME_latency_p99`, in seconds, where they are known.
        name: verdict or manifest.
    """
    return seconds(figures.get(f"{name}_latency_p50")), seconds(figures.get(f"{name}_latency_p99"))


def size(count: float) -> str:
    """Bytes, like 42 B, 3.5 MB or 1.2 TB."""
    amount, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while amount >= 999.5 and len(units) > 1:
        amount, units = amount / 1000.0, units[1:]
    return f"{amount:.3g} {units[0]}"
