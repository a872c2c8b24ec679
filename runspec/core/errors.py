"""The one error that a person is meant to read."""

from __future__ import annotations


class UserError(Exception):
    """Something outside the program is wrong, and a person can mend it.

    Args:
        thing: what is wrong, with the measured value.
        place: where it was found (a path, URL, role or field).
        remedy: what to do about it.
    """

    def __init__(self, thing: str, *, place: str = "", remedy: str = "") -> None:
        self.thing, self.place, self.remedy = thing, place, remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.place}: {self.thing}" if self.place else self.thing
        return f"{text}\n  remedy: {self.remedy}" if self.remedy else text
