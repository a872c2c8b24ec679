"""One lane's process: case after case from a seed, and where it is for its parent to see."""

from __future__ import annotations

import gc
import mmap
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.fuzz.bounds import WATCH
from tests.fuzz.fast.lanes import Lane
from tests.fuzz.fast.signatures import cheap_signatures

PLACE = struct.Struct("<QQd")
"""What the parent sees: the number of the case, how many so far were taken for sound, and the
processor time of all, in seconds."""
LOOK_EVERY = 256
"""Cases, of which one is traced. Where the others took too much memory, it was one of so many."""
_MEMORY = 8 << 30
_CASES = 1 << 40


class Grown(Exception):
    """Some cases, or all of them together, took too much memory."""


def run(lane: Lane, seed: int, first: int, end: int, seen: Path, *, trace: bool = False) -> None:
    """Cases `first` to `end` of a lane; with `trace` memory is looked at after each.

    Raises:
        Grown: cases since the last look took too much; the number of the first is in `seen`.
        Exception: what a case raised; the number is in `seen`.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, resource.RLIM_INFINITY))
    with seen.open("r+b") as file:
        place = mmap.mmap(file.fileno(), PLACE.size)
        case = started(lane)
        gc.freeze()
        rng, taken, began, spent = Random(), 0, time.process_time(), 0.0
        WATCH.look()
        looked = first
        for number in range(first, end):
            PLACE.pack_into(place, 0, number, taken, spent)
            rng.seed(seed * _CASES + number)
            WATCH.traced = trace or number % LOOK_EVERY == 0
            taken += case(rng)
            if trace or (number + 1) % LOOK_EVERY == 0 or number + 1 == end:
                spent = time.process_time() - began
                try:
                    WATCH.look()
                except AssertionError as error:
                    PLACE.pack_into(place, 0, looked, taken, spent)
                    raise Grown(f"cases {looked} to {number}: {error}") from error
                looked = number + 1
        PLACE.pack_into(place, 0, end, taken, spent)


def started(lane: Lane) -> Callable[[Random], bool]:
    """What one case of a lane is, in a process that makes no others."""
    if lane.cheap:
        cheap_signatures()
    return lane.case()
