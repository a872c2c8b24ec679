"""The one error that a person is meant to read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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


class BadUsage(UserError):
    """A file that cannot be read, or words that mean nothing."""

    exit_code = 2


@contextmanager
def bad_usage() -> Iterator[None]:
    """Makes every UserError that is raised inside a BadUsage; decorates functions, too."""
    try:
        yield
    except UserError as error:
        raise BadUsage(error.thing, place=error.place, remedy=error.remedy) from error
