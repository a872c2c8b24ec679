"""Keeps an environment to its arguments: no clock, no chance, no files, processes or network.

A grader process calls `forbid` once, before it imports a plug-in. Inside `alone`, whatever is not a
function of arguments raises `Impure`, with the line that asked. This finds mistakes; the sandbox
(`sampler.sandbox`) is what confines code.
"""

from __future__ import annotations

import datetime
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")
CHANCES = (
    *("random", "randint", "randrange", "choice", "choices", "shuffle", "sample", "uniform"),
    *("gauss", "normalvariate", "getrandbits", "randbytes", "seed", "betavariate", "expovariate"),
)
EVENTS = (
    *("os.fork", "os.forkpty", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"),
    *("socket.", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.listdir"),
)
_active = False


class Impure(Exception):
    """An environment asked for something beside its arguments."""


class Overdue(Exception):
    """An environment took longer than it may."""


def forbid() -> None:
    """Make clocks, chance, files, processes and network raise while `alone` is active."""
    for name in CLOCKS:
        setattr(time, name, _refusing(getattr(time, name), f"time.{name}"))
    for name in CHANCES:
        setattr(random, name, _refusing(getattr(random, name), f"random.{name}"))
    os.urandom = _refusing(os.urandom, "os.urandom")
    datetime.datetime = _Dated  # type: ignore[misc]
    sys.addaudithook(_audit)


class _Dated(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Self:
        _refuse("datetime.now")
        return super().now(tz)

    @classmethod
    def utcnow(cls) -> Self:
        _refuse("datetime.utcnow")
        return super().utcnow()


def _refuse(name: str) -> None:
    if _active:
        raise Impure(f"{name} is not a function of an environment's arguments")


def _refusing(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        _refuse(name)
        return function(*args, **kwargs)

    return call


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _active:
        return
    if event == "open":
        path, mode, flags = args
        if isinstance(path, str) and not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            if "site-packages" in path or path.startswith((sys.base_prefix, sys.prefix)):
                return  # an import
            if path.endswith((".py", ".pyc")):
                return
        raise Impure(f"it opens {path!r:.80} ({mode})")
    if event.startswith(EVENTS):
        raise Impure(f"it calls {event}")


@contextmanager
def alone(seconds: float) -> Iterator[None]:
    """Refuse what is impure, and raise `Overdue` at the line that runs after some seconds."""
    global _active

    def ring(signum: int, frame: Any) -> None:
        raise Overdue(f"it still runs after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    _active = True
    try:
        yield
    finally:
        _active = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
