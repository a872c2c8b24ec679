"""The one error that a person is meant to read, and how other errors are put into words."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_MAX_TEXT = 200
"""Characters of an exception's own text."""


class UserError(Exception):
    """Something outside the program is wrong, and a person can mend it.

    Args:
        thing: what is wrong, with the measured value.
        place: where it was found (a path, URL, role or field).
        remedy: what to do about it.
    """

    exit_code = 1
    """What a command ends with."""

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
    """A file that cannot be read, or words that mean nothing."""

    exit_code = 2


class NotNow(UserError):
    """Nothing could be written just now (the disk is full, say): this process goes on as before."""


@contextmanager
def bad_usage() -> Iterator[None]:
    """Makes every UserError that is raised inside a BadUsage; decorates functions, too."""
    try:
        yield
    except UserError as error:
        raise BadUsage(error.thing, place=error.place, remedy=error.remedy) from error


def one_line(text: str, most: int) -> str:
    """Returns a text as one line of at most `most` characters, each of them printable.

    For words that may repeat what a stranger sent: terminals obey control characters.
    """
    words = " ".join(text[: 4 * most].split())
    return "".join(letter if letter.isprintable() else "?" for letter in words)[:most]


def describe_error(error: Exception, package: str | None = None) -> str:
    """Returns type, text and place of an exception, like `KeyError: 'gold' at mine/math.py:17`.

    Args:
        error: the exception; its text is cut after 200 characters.
        package: top-level package whose innermost frame is named; without it, or without such a
            frame, the innermost frame of all is.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [each for each in frames if _package_of(each[0]) == package]
    words = f"{type(error).__name__}: {one_line(str(error), _MAX_TEXT)}"
    if not frames:
        return words
    frame, line = (own or frames)[-1]
    return f"{words} at {'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{line}"


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
