"""Numbers under which vLLM's workers keep the records of the sequences in flight: a pure free list.

Each data-parallel rank has its own workers, so its own slots: a sequence takes a free slot of the
rank that has most, and keeps it until its record was fetched.
"""

from __future__ import annotations

from typing import NamedTuple


class Slot(NamedTuple):
    rank: int
    """Data-parallel."""
    number: int
    """0 <= number < slots of a rank."""


class Slots:
    """Free slots of every rank.

    Args:
        ranks: data-parallel ranks.
        each: slots of one.
    """

    def __init__(self, ranks: int, each: int) -> None:
        self._free = [list(range(each))[::-1] for _ in range(ranks)]

    def take(self) -> Slot | None:
        """A slot of the rank that has most free ones; None where none is free."""
        rank = max(range(len(self._free)), key=lambda r: len(self._free[r]))
        return Slot(rank, self._free[rank].pop()) if self._free[rank] else None

    def give(self, slot: Slot) -> None:
        """Makes a slot free again.

        Raises:
            ValueError: it is free.
        """
        if slot.number in self._free[slot.rank]:
            raise ValueError(f"{slot} is free")
        self._free[slot.rank].append(slot.number)
