"""What every role process does first: logging, a polite end on SIGTERM, one way to fail."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from runspec.core.errors import UserError, describe_error

SUPERVISOR = "RUNSPEC_SUPERVISOR"
"""Environment variable: process id of the supervisor that starts a role."""
_PR_SET_PDEATHSIG = 1
EXIT_USER_ERROR = 1
EXIT_INTERNAL = 3
EXIT_FINAL = 4


class RunStopped(UserError):
    """The run cannot go on, and starting the role again would not help: a stalled step, say."""


_OF_PATHS = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


@contextmanager
def not_retried() -> Iterator[None]:
    """Makes an error that is raised inside a RunStopped; decorates functions, too.

    For what follows from the spec, its files and the installed packages alone: another try meets
    the same error. What the machine may get over (a full disk, a network, too little memory) is
    raised as it is, so that the role is started again.
    """
    try:
        yield
    except RunStopped:
        raise
    except Exception as error:
        if _may_pass(error) or _may_pass(error.__cause__):
            raise
        if isinstance(error, UserError):
            raise RunStopped(error.thing, place=error.place, remedy=error.remedy) from error
        logging.getLogger(__name__).exception("cannot go on")
        raise RunStopped(describe_error(error), remedy="mend the code that it names") from error


def _may_pass(error: BaseException | None) -> bool:
    return isinstance(error, OSError | MemoryError) and not isinstance(error, _OF_PATHS)


def setup_logging(role: str) -> logging.Logger:
    """One line an event on standard error: time, level, role, message. The supervisor files it."""
    logging.basicConfig(
        level=os.environ.get("RUNSPEC_LOG_LEVEL", "INFO"),
        format=f"%(asctime)s %(levelname).1s {role} %(message)s",
        stream=sys.stderr,
        force=True,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every request
    return logging.getLogger(role)


def stop_event() -> threading.Event:
    """An event that SIGTERM and SIGINT set, so that loops end between two pieces of work."""
    event = threading.Event()

    def handle(number: int, frame: object) -> None:
        event.set()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    return event


def stop_event_of_loop() -> asyncio.Event:
    """The same for the running event loop. A server makes it before it tells its address: whoever
    knows that may end it at once. Outside of the main thread nothing sets it: callers cancel."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(RuntimeError, ValueError):  # not in the main thread
            loop.add_signal_handler(number, event.set)
    return event


def die_with_parent() -> None:
    """Asks Linux to end this process when the one that started it dies, however it dies."""
    supervisor = os.environ.get(SUPERVISOR)
    if sys.platform == "linux" and supervisor is not None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if str(os.getppid()) != supervisor:  # it died before it could be asked
            os.kill(os.getpid(), signal.SIGTERM)


def run_role(role: str, body: Callable[[logging.Logger], None]) -> int:
    """Runs a role's body and turns what it raises into one message and an exit code.

    Returns:
        0 when the body ended by itself, 1 on a UserError, 3 on a fault of our own, 4 when the run
        is to stop (the supervisor starts the role again on every other code but 0).
    """
    die_with_parent()
    log = setup_logging(role)
    try:
        body(log)
    except RunStopped as error:
        log.error("%s", error)
        return EXIT_FINAL
    except UserError as error:
        log.error("%s", error)
        return EXIT_USER_ERROR
    except Exception:
        log.exception("internal error")
        return EXIT_INTERNAL
    return 0
