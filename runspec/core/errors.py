"""Errors for users, and descriptions of other errors."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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
