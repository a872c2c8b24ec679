"""Runs cases of one fuzz lane in this process; `python -m tests.campaigns fuzz` runs every lane.

    python -m tests.fuzz LANE [--seed S] [--from N] [--cases N] [--trace]

A case is its lane, seed and number. A case that fails or takes longer than a deadline ends the
process; the number of the case that runs is in the file given with `--seen`.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import mmap
import resource
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from runspec.core.process import die_with_parent
from tests.fuzz.bounds import OPEN, WATCH
from tests.fuzz.lanes import LANES, Lane
from tests.fuzz.signatures import cheap_signatures

NUMBER = struct.Struct("<Q")
"""Of the case that runs, at the start of the file `--seen`."""
STALL_S = 300.0
"""Wall time that `LOOK_EVERY` cases may take."""
LOOK_EVERY = 256
"""Cases between two looks at the process's memory; one of them is traced."""
_MEMORY = 8 << 30
_CASES = 1 << 40


def run(
    lane: Lane, seed: int, first: int, end: int, seen: Path, *, trace: bool
) -> dict[str, float]:
    """Runs cases `first` to `end` and returns figures: cases, sound ones, microseconds each.

    Raises:
        AssertionError: a case, or all since the last look together, did not hold.
        Exception: what a case raised.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, resource.RLIM_INFINITY))
    if lane.cheap:
        cheap_signatures()
    with OPEN, seen.open("r+b") as file:
        place = mmap.mmap(file.fileno(), NUMBER.size)
        case = lane.case()
        gc.freeze()
        rng, taken, began = Random(), 0, time.process_time()
        WATCH.look()
        for number in range(first, end):
            NUMBER.pack_into(place, 0, number)
            rng.seed(seed * _CASES + number)
            if number % LOOK_EVERY == 0 or number == first:
                faulthandler.dump_traceback_later(STALL_S, exit=True)
            WATCH.traced = trace or number % LOOK_EVERY == 0
            taken += case(rng)
            if trace or (number + 1) % LOOK_EVERY == 0 or number + 1 == end:
                WATCH.look()
        faulthandler.cancel_dump_traceback_later()
        spent_us = 1e6 * (time.process_time() - began)
    cases = end - first
    return {"cases": cases, "sound": taken, "us": round(spent_us / max(cases, 1))}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases, prints their figures as JSON and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("lane", choices=LANES, metavar="LANE", help=", ".join(LANES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first case")
    parser.add_argument("--cases", type=int, default=1, help="how many")
    parser.add_argument("--trace", action="store_true", help="look at memory after each case")
    parser.add_argument("--seen", type=Path, help="file that holds the number of the case")
    options = parser.parse_args(argv)
    end = options.first + options.cases
    lane = LANES[options.lane]
    if options.seen is not None:
        die_with_parent()
        options.seen.write_bytes(bytes(NUMBER.size))
        found = run(lane, options.seed, options.first, end, options.seen, trace=options.trace)
    else:
        with tempfile.NamedTemporaryFile() as file:
            file.write(bytes(NUMBER.size))
            file.flush()
            seen = Path(file.name)
            found = run(lane, options.seed, options.first, end, seen, trace=options.trace)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
