"""`python -m tests.fuzz`: each lane with a million inputs, in a process of its own.

Cases are numbered, and a case is its lane, seed and number: `--only LANE --seed S --case N` makes
one again, alone. A case that fails, ends its process or takes longer than a deadline ends its lane,
is shown with that command, and the exit code is 1. Ctrl-C ends all lanes; the exit code is 130.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from runspec.core.process import SUPERVISOR, die_with_parent
from tests.fuzz.fast.child import LOOK_EVERY, PLACE, Grown, run
from tests.fuzz.fast.lanes import LANES, Lane

STALL_S = 300.0
"""Wall time for one case, the start of a process included, on a machine that others use too."""
_TELL_EVERY_S = 15.0
_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}
_TOLD = 5
_GREW = 3
"""Exit code of a lane's process whose cases since the last look took too much memory."""
_ABORTS = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV"}
"""How a library's own fault ends a process. Of any other signal it was stopped: it took too long,
or somebody sent it."""
_FEW_DEATHS = 20
_SHARE_OF_DEATHS = 0.01
"""More of a lane's cases are no rare fault of a library: the lane itself does not work."""


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
    trace: bool = False
    """Memory is looked at after each case, not after every LOOK_EVERY."""
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


def fuzz(progress: Progress, end: int, seconds: float, stop: threading.Event) -> Progress:
    """Runs one lane up to its case `end`, for so long, or until it has to stop.

    Raises:
        Fault: a case failed, was too slow, or ended the process.
    """
    until = time.monotonic() + seconds

    def over() -> bool:
        return stop.is_set() or time.monotonic() > until

    with tempfile.NamedTemporaryFile() as seen:
        while progress.done < end and not over():
            Path(seen.name).write_bytes(PLACE.pack(progress.done, 0, 0.0))
            before = progress.taken, progress.cpu_s
            numbers = {"--seed": progress.seed, "--from": progress.done}
            numbers["--cases"] = end - progress.done
            command = [sys.executable, "-m", "tests.fuzz", "--only", progress.lane.name]
            command += [str(part) for number in numbers.items() for part in number]
            command += ["--seen", seen.name, *["--trace"][: progress.trace]]
            environment = {**os.environ, **_ENVIRONMENT, SUPERVISOR: str(os.getpid())}
            child = subprocess.Popen(command, env=environment)
            try:
                watch(child, progress, Path(seen.name), before, over)
            finally:
                child.kill()
                child.wait()
    return progress


def watch(
    child: subprocess.Popen[bytes],
    progress: Progress,
    seen: Path,
    before: tuple[int, float],
    over: Callable[[], bool],
) -> None:
    """Until the process has ended, or it is over.

    Raises:
        Fault: a case failed, was too slow, or ended the process.
    """
    last, told, start = time.monotonic(), time.monotonic(), progress.done
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
        if code == 0 or (code is None and over()):
            return
        if code is None and now - last > STALL_S:
            raise _fault(progress, f"has not ended after {STALL_S:.0f} s")
        if code is not None:
            _died(progress, code, start)
            return
        if now - told > _TELL_EVERY_S:
            told = now
            print(progress.line(), flush=True)


def _died(progress: Progress, code: int, start: int) -> None:
    """Counts the case of which a process died that had begun at case `start`.

    Raises:
        Fault: a process of this lane may not die, or not so.
    """
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    if code == _GREW:
        raise _grown(progress)
    if name not in _ABORTS or not progress.lane.may_die:
        raise _fault(progress, f"ended the process ({name})")
    if progress.done == start:
        raise _fault(progress, f"ended the process ({name}) before it had finished any")
    progress.deaths.setdefault(name, []).append(progress.done)
    dead = sum(map(len, progress.deaths.values()))
    if dead > max(_FEW_DEATHS, _SHARE_OF_DEATHS * (progress.done - progress.first)):
        raise _fault(progress, f"ended the process ({name}), as {dead - 1} others have: too many")
    progress.done += 1


def _fault(progress: Progress, what: str) -> Fault:
    case = progress.done
    return _shown(progress, f"case {case} {what}", "make it again", f"--case {case}")


def _grown(progress: Progress) -> Fault:
    """The process says as its case the first since the last look."""
    if progress.trace:
        return _fault(progress, "took too much memory")
    first, last = progress.done, progress.done + LOOK_EVERY - 1
    what = f"one of the cases {first} to {last}, or all together, took too much memory"
    return _shown(progress, what, "find it", f"--from {first} --cases {LOOK_EVERY} --trace")


def _shown(progress: Progress, what: str, why: str, numbers: str) -> Fault:
    lane = progress.lane.name
    again = f"python -m tests.fuzz --only '{lane}' --seed {progress.seed} {numbers}"
    return Fault(f"{lane}: {what}\n{progress.line()}\n{why}: {again}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the lanes, says how far it is, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000, help="of each lane")
    parser.add_argument("--only", action="append", help="lanes of this name, instead of all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="this one alone, in this process")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="lanes at a time")
    parser.add_argument("--seconds", type=float, default=1e9, help="for each lane at most")
    parser.add_argument(
        "--from", dest="first", type=int, default=0, help="number of the first case"
    )
    parser.add_argument("--trace", action="store_true", help="the memory of each case, slowly")
    parser.add_argument("--seen", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    names = [lane.name for lane in LANES]
    if unknown := set(options.only or ()) - set(names):
        parser.error(f"no lane {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    lanes = [lane for lane in LANES if not options.only or lane.name in options.only]
    if options.case is not None and len(lanes) != 1:
        parser.error("--case is the number of a case of one lane: name it with --only")
    end = options.first + options.cases
    if options.seen is not None:
        die_with_parent()
        return _run(lanes[0], options.seed, options.first, end, options.seen, options.trace)
    if options.case is not None:
        with tempfile.NamedTemporaryFile() as seen:
            seen.write(bytes(PLACE.size))
            seen.flush()
            place = Path(seen.name)
            return _run(lanes[0], options.seed, options.case, options.case + 1, place, trace=True)
    numbers = (options.seed, options.first, options.first, options.trace)
    every = [Progress(lane, *numbers) for lane in lanes]
    return _fuzz_all(every, end, options)


def _run(lane: Lane, seed: int, first: int, end: int, seen: Path, trace: bool) -> int:
    """This process's cases; returns the exit code."""
    try:
        run(lane, seed, first, end, seen, trace=trace)
    except Grown as error:
        print(error, file=sys.stderr)
        return _GREW
    return 0


def _fuzz_all(lanes: Sequence[Progress], end: int, options: argparse.Namespace) -> int:
    """Some lanes at a time; returns the exit code."""
    faults, stop = 0, threading.Event()
    # Ctrl-C is for all processes of a terminal. The lanes' have it blocked, as the threads that
    # start them: this one ends them.
    blocked = (signal.SIG_BLOCK, {signal.SIGINT})
    pool = ThreadPoolExecutor(options.jobs, initializer=signal.pthread_sigmask, initargs=blocked)
    try:
        running = [pool.submit(fuzz, lane, end, options.seconds, stop) for lane in lanes]
        print(f"{len(lanes)} lanes, {options.jobs} at a time", flush=True)
        for ended in as_completed(running):
            try:
                print(f"done: {ended.result().line()}", flush=True)
            except Fault as fault:
                print(fault, flush=True)
                faults += 1
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        return 128 + signal.SIGINT
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
