"""Requests that wait for a lease, in the order in which they are served.

An event that brings work serves the first of a thousand, and must not cost a look at each. So they
are kept in order (`filling.turn`), and sorted again only when the rank of a worker has changed.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import count

from verify.coordinator.machine.filling import turn
from verify.coordinator.machine.leases import LeaseRecord, Rank
from verify.coordinator.machine.state import State


@dataclass(eq=False)
class Question:
    """A waiting request for a lease; a key may have several."""

    key: str
    holding: Collection[str]
    gone: Callable[[], bool]
    """Whether nobody hears an answer any more."""
    answer: asyncio.Future[LeaseRecord | None]


_Place = tuple[tuple[Rank, float, int], int, Question]
"""Turn of its worker, then the order of arrival."""


class Line:
    """Open questions; iterating over them gives them in turn.

    Args:
        state: returns the state of the run.
    """

    def __init__(self, state: Callable[[], State]) -> None:
        self._state = state
        self._places: dict[Question, _Place] = {}
        self._in_turn: list[_Place] = []
        self._arrivals = count()
        self._rank_changes = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Question]:
        return iter([question for _, _, question in self._in_turn])

    def join(self, question: Question) -> None:
        place = turn(self._state(), question.key), next(self._arrivals), question
        self._places[question] = place
        insort(self._in_turn, place)

    def leave(self, question: Question) -> None:
        """Take a question out; one that has left stays out."""
        if (place := self._places.pop(question, None)) is not None:
            del self._in_turn[bisect_left(self._in_turn, place)]

    def of(self, rank: Rank) -> Iterator[Question]:
        """Yield the questions of workers of a rank, in turn, while some of them leave."""
        if self._state().rank_changes != self._rank_changes:
            self._rank_changes = self._state().rank_changes
            for question in self:
                self._move(question)
        first, end = (bisect_left(self._in_turn, ((each,),)) for each in (rank, rank + 1))
        served_since = []
        for place in self._in_turn[first:end]:
            question = place[-1]
            if self._places.get(question) is not place:
                continue
            if turn(self._state(), question.key) == place[0]:
                yield question
            else:  # another question of the same key was answered
                self._move(question)
                served_since.append(question)
        yield from sorted(served_since, key=self._places.__getitem__)

    def _move(self, question: Question) -> None:
        self.leave(question)
        self.join(question)
