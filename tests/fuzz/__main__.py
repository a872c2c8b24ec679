"""`python -m tests.fuzz`: each parser with a million inputs, in a process of its own.

Cases are numbered, and a case is its lane, seed and number: `--only LANE --seed S --case N` makes
one again, alone. A case that fails, ends its process or takes longer than a deadline ends its lane,
is shown with that command, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.fast.child import PLACE, run
from tests.fuzz.fast.lanes import LANES, Lane

STALL_S = 300.0
"""Wall time for one case, the start of a process included, on a machine that others use too."""
_TELL_EVERY_S = 15.0
_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}
_TOLD = 5


class Fault(Exception):
    """A case that does not hold."""


@dataclass
class Progress:
    """Of one lane."""

    lane: Lane
    seed: int
    first: int
    done: int
    """The number of the case that runs."""
    taken: int = 0
    cpu_s: float = 0.0
    began: float = field(default_factory=time.monotonic)
    deaths: dict[str, list[int]] = field(default_factory=dict)
    """By signal, the cases that ended the process where that is no fault."""

    def line(self) -> str:
        seconds = time.monotonic() - self.began
        deaths = "".join(
            f", {len(dead)} ended by {name} (as case {', '.join(map(str, dead[:_TOLD]))})"
            for name, dead in self.deaths.items()
        )
        cases = self.done - self.first
        return (
            f"{self.lane.name}: {cases:,} cases from number {self.first} of seed {self.seed}, "
            f"{self.taken:,} taken for sound, {seconds:.0f} s, {cases / seconds:,.0f} a second, "
            f"{1e6 * self.cpu_s / max(cases, 1):.0f} us of processor time each{deaths}"
        )


def fuzz(lane: Lane, seed: int, first: int, cases: int, seconds: float) -> Progress:
    """Runs one lane from its case `first` to its end, or for so long.

    Raises:
        Fault: a case failed, was too slow, or ended the process.
    """
    progress, until = Progress(lane, seed, first, first), time.monotonic() + seconds
    with tempfile.NamedTemporaryFile() as seen:
        while progress.done < cases and time.monotonic() < until:
            Path(seen.name).write_bytes(PLACE.pack(progress.done, 0, 0.0))
            before = progress.taken, progress.cpu_s
            command = [sys.executable, "-m", "tests.fuzz", "--only", lane.name, "--seed", str(seed)]
            command += ["--from", str(progress.done), "--cases", str(cases), "--seen", seen.name]
            child = subprocess.Popen(command, env={**os.environ, **_ENVIRONMENT})
            try:
                watch(child, progress, Path(seen.name), before, until)
            finally:
                child.kill()
                child.wait()
    return progress


def watch(
    child: subprocess.Popen[bytes],
    progress: Progress,
    seen: Path,
    before: tuple[int, float],
    until: float,
) -> None:
    """Until the process has ended, or has to.

    Raises:
        Fault: a case failed, was too slow, or ended the process.
    """
    last, told = time.monotonic(), time.monotonic()
    while True:
        try:
            code = child.wait(0.5)
        except subprocess.TimeoutExpired:
            code = None
        number, taken, cpu_s = PLACE.unpack(seen.read_bytes())
        now = time.monotonic()
        if number != progress.done:
            last = now
        progress.done = number
        progress.taken, progress.cpu_s = before[0] + taken, before[1] + cpu_s
        if code == 0 or (code is None and now > until):
            return
        if code is None and now - last > STALL_S:
            raise _fault(progress, f"has not ended after {STALL_S:.0f} s")
        if code is not None:
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            if code > 0 or not progress.lane.may_die:
                raise _fault(progress, f"ended the process ({name})")
            progress.deaths.setdefault(name, []).append(number)
            progress.done += 1
            return
        if now - told > _TELL_EVERY_S:
            told = now
            print(progress.line(), flush=True)


def _fault(progress: Progress, what: str) -> Fault:
    lane, seed, number = progress.lane.name, progress.seed, progress.done
    again = f"python -m tests.fuzz --only '{lane}' --seed {seed} --case {number}"
    return Fault(f"{lane}: case {number} {what}\n{progress.line()}\nmake it again: {again}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the lanes, says how far it is, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000, help="of each lane, from number 0")
    parser.add_argument("--only", action="append", help="lanes of this name, instead of all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="this one alone, in this process")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="lanes at a time")
    parser.add_argument("--seconds", type=float, default=1e9, help="for each lane at most")
    parser.add_argument(
        "--from", dest="first", type=int, default=0, help="number of the first case"
    )
    parser.add_argument("--seen", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    names = [lane.name for lane in LANES]
    if unknown := set(options.only or ()) - set(names):
        parser.error(f"no lane {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    lanes = [lane for lane in LANES if not options.only or lane.name in options.only]
    if options.seen is not None:
        run(lanes[0], options.seed, options.first, options.cases, options.seen)
        return 0
    if options.case is not None:
        with tempfile.NamedTemporaryFile() as seen:
            seen.write(bytes(PLACE.size))
            seen.flush()
            run(lanes[0], options.seed, options.case, options.case + 1, Path(seen.name))
        return 0
    faults = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        numbers = (options.seed, options.first, options.cases, options.seconds)
        running = [pool.submit(fuzz, lane, *numbers) for lane in lanes]
        for ended in as_completed(running):
            try:
                print(f"done: {ended.result().line()}", flush=True)
            except Fault as fault:
                print(fault, flush=True)
                faults += 1
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
