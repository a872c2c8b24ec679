"""Rows of a ledger as they are stored, wherever it lies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from runspec.core.errors import UserError


@dataclass(frozen=True)
class Row:
    """As stored, nothing checked."""

    seq: int
    kind: bytes
    body: bytes
    chain: bytes


class NoLedger(UserError):
    """Nothing was written yet, or not here."""

    def __init__(self, place: str) -> None:
        super().__init__(
            "there is no ledger", place=place, remedy="name the run directory that has it"
        )


class Snapshot(Protocol):
    """The rows of a run at one moment.

    Raises:
        UserError: from every method, when they cannot be read as a ledger.
    """

    def rows(self, kind: str | None = None) -> Iterator[Row]:
        """The rows of a kind, in order; all rows if None."""
        ...

    def close(self) -> None: ...
