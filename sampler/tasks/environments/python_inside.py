"""What the interpreter of the tool `python` does first: it runs `program.py` so that it prints the
same bytes every time.

The text of this file is what the process starts with, so it imports only the standard library. It
keeps honest programs from what differs between two runs; the sandbox is what confines them.
"""

from __future__ import annotations

import datetime
import os
import random
import sys
import time
from types import FrameType
from typing import Any

MAX_LINES = 1_000_000
"""Lines that a program executes, those of imported modules included: a bound that is met at the
same line on every machine, as a time is not."""
CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
OTHERS = ("sleep", "localtime", "gmtime", "ctime", "asctime", "strftime")
FILE = "program.py"


class TooManyLines(BaseException):
    """The program executed `MAX_LINES` lines."""


def refused(name: str) -> Any:
    def call(*args: object, **kwargs: object) -> None:
        raise RuntimeError(f"{name} is not there: a program prints the same every time")

    return call


def make_repeatable() -> None:
    """Take clocks away, and let chance that nobody seeded begin at 0."""
    for name in (*CLOCKS, *(f"{clock}_ns" for clock in CLOCKS), *OTHERS):
        if hasattr(time, name):
            setattr(time, name, refused(f"time.{name}"))
    for owner in (datetime.datetime, datetime.date):
        clocks: dict[str, Any] = {
            name: classmethod(refused(f"{owner.__name__}.{name}"))
            for name in ("now", "utcnow", "today")
        }
        setattr(datetime, owner.__name__, type(owner.__name__, (owner,), clocks))
    os.urandom = refused("os.urandom")
    os.getpid, os.getppid = lambda: 2, lambda: 1  # as in a namespace of its own
    os.environ.update(HOME=".", TMPDIR=".")
    for name in ("random", "getrandbits", "randbytes"):
        setattr(random.SystemRandom, name, refused("os.urandom"))
    seed = random.Random.seed

    def seeded(self: random.Random, a: Any = None, version: int = 2) -> None:
        seed(self, 0 if a is None else a, version)

    random.Random.seed = seeded  # type: ignore[method-assign]
    random.seed = random.random.__self__.seed  # type: ignore[attr-defined]
    random.seed()


def count_lines() -> None:
    left = MAX_LINES

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        left -= event == "line"
        if left < 0:
            raise TooManyLines
        return trace

    sys.settrace(trace)


def line_of(error: BaseException) -> str:
    """Return where in the program an error arose."""
    line, at = None, error.__traceback__
    while at is not None:
        if at.tb_frame.f_code.co_filename == FILE:
            line = at.tb_lineno
        at = at.tb_next
    return f" (line {line})" if line else ""


def main() -> None:
    with open(FILE, encoding="utf-8") as file:  # noqa: PTH123 - `pathlib` takes long to import
        source = file.read()
    make_repeatable()
    try:
        code = compile(source, FILE, "exec")
        count_lines()
        exec(code, {"__name__": "__main__", "__builtins__": __builtins__})  # noqa: S102
    except TooManyLines:
        sys.settrace(None)
        print(f"stopped: the program executed {MAX_LINES} lines")
    except Exception as error:  # noqa: BLE001
        sys.settrace(None)
        print(f"{type(error).__name__}: {error}".rstrip(": ") + line_of(error))


main()
