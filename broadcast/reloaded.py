"""A value read from files, and read again when one of them changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from broadcast.disk import Identity, identity
from runspec.core.errors import UserError

Value = TypeVar("Value")


class Reloaded(Generic[Value]):
    """What files say now; where they cannot be read any more, what they said last, and one error.

    Args:
        paths: the files.
        read: makes the value of them; its UserErrors are for people.
        log: gets what is wrong with files that changed.

    Raises:
        UserError: of `read`, the first time.
    """

    def __init__(
        self, paths: Sequence[Path], read: Callable[[], Value], log: logging.Logger
    ) -> None:
        self._paths = paths
        self._read = read
        self._log = log
        self._seen = self._identities()
        self._value = read()

    def get(self) -> Value:
        """The value; costs a stat of each file where none has changed."""
        seen = self._identities()
        if seen != self._seen:
            self._seen = seen
            try:
                self._value = self._read()
                self._log.info("read again: %s", ", ".join(map(str, self._paths)))
            except UserError as error:
                self._log.error("what was read before stays in use: %s", error)
        return self._value

    def _identities(self) -> list[Identity | None]:
        return [identity(path) for path in self._paths]


def warn_if_open(path: Path, log: logging.Logger) -> None:
    """Says so where every user of the machine may read a secret."""
    if path.stat().st_mode & 0o004:
        log.warning("%s: every user of this machine may read it; `chmod 600` it", path)
