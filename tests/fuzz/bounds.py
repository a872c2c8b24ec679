"""A fuzz lane, and what each of its cases keeps: an end that the parser names, in little memory."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

Parse = Callable[[Any], Any]


@dataclass(frozen=True)
class Lane:
    """One parser of bytes from outside, or one kind of its inputs."""

    name: str
    inputs: SearchStrategy[Any]
    """Sound inputs with changes; the simplest one is sound."""
    parse: Parse
    """Returns what the input says; None where there is nothing in it to take."""
    check: Callable[[Any, Any], None] = lambda value, given: None
    """Asserts what holds for each value that is taken, and its input."""
    refusals: tuple[type[Exception], ...] = ()
    """The parser's own exceptions."""
    refused: Callable[[Any], None] = lambda given: None
    """Asserts what holds for each input that is refused."""
    memory: int | None = 4 << 20
    """Bytes that a case may take; None where tracing them would take most of the time."""
    longest: int = 10_000
    """Characters of a refusal."""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """Is open while cases run."""

    def case(self, given: Any) -> bool:
        """Whether an input is taken; fails where it ends in any other way than a lane may."""
        with nullcontext() if self.memory is None else bounded(self.memory):
            try:
                value = self.parse(given)
            except self.refusals as error:
                value, words = None, str(error)
            else:
                words = ""
        assert len(words) < self.longest
        if value is None:
            self.refused(given)
        else:
            self.check(value, given)
        return value is not None


@contextmanager
def bounded(memory: int) -> Iterator[None]:
    """Fails a block that takes more bytes at a time than `memory`."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < memory


def run(
    lane: Lane, options: settings, prepare: Callable[[Any], Any] = lambda test: test
) -> Counter[bool]:
    """Runs a lane's cases; returns how many were taken (True) and refused (False).

    Args:
        lane: the lane.
        options: how many cases, and how they are drawn.
        prepare: another decorator of the test, such as `hypothesis.seed`.
    """
    found: Counter[bool] = Counter()

    @settings(options, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(lane.inputs)
    def case(given: Any) -> None:
        found[lane.case(given)] += 1

    with lane.around():
        prepare(case)()
    return found
