"""Keeps an engine full: samples many problems, and gives out each as soon as it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import islice
from typing import TYPE_CHECKING

from sampler.engine.requests import Sampled, SampleRequest

if TYPE_CHECKING:
    from sampler.engine.engine import Engine

_TURN_S = 1.0


def sampled_problems(
    engine: Engine,
    indices: Iterable[int],
    requests: Callable[[int], Sequence[SampleRequest]],
    *,
    samples: int,
    stop: threading.Event,
) -> Iterator[dict[int, list[Sampled]]]:
    """Sample problems, up to twice what the engine runs at once: the caller grades one half while
    the other half is sampled.

    Args:
        engine: has a version loaded.
        indices: of the problems.
        requests: returns those of a problem.
        samples: requests of a problem.
        stop: ends the sampling early; what is under way is aborted.

    Yields:
        The results of each problem, of several at once where several are done.

    Raises:
        UserError: the engine died.
    """
    left = iter(indices)
    running: dict[Future[list[Sampled]], int] = {}
    while not stop.is_set():
        room = max(0, -(-2 * engine.capacity // samples) - len(running))
        running |= {engine.submit(requests(index)): index for index in islice(left, room)}
        if not running:
            return
        done, _ = wait(running, timeout=_TURN_S, return_when=FIRST_COMPLETED)
        if done:
            yield {running.pop(future): future.result() for future in done}
    engine.abort()
