"""Common parts of role processes: logging, stop on SIGTERM, exit codes."""

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
from typing import NoReturn

from runspec.core.errors import UserError, describe_error

SUPERVISOR = "RUNSPEC_SUPERVISOR"
"""Environment variable with the process id of the supervisor that starts a role."""
_PR_SET_PDEATHSIG = 1
EXIT_USER_ERROR = 1
EXIT_INTERNAL = 3
EXIT_FINAL = 4


class RunStopped(UserError):
    """Error: the run cannot go on, and restarting the role would not help, as in a stall."""


_OF_PATHS = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


@contextmanager
def not_retried() -> Iterator[None]:
    """Turn errors inside into RunStopped; also a decorator of functions.

    It is for errors that follow from the spec, its files and the installed packages: they recur in
    every attempt. Errors that may pass (a full disk, the network, too little memory) are raised
    unchanged, so that the role is restarted.
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
    """Log one line an event to standard error: time, level, role, message."""
    logging.basicConfig(
        level=os.environ.get("RUNSPEC_LOG_LEVEL", "INFO"),
        format=f"%(asctime)s %(levelname).1s {role} %(message)s",
        stream=sys.stderr,
        force=True,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    return logging.getLogger(role)


def stop_event(grace_s: float | None = None) -> threading.Event:
    """Return an event that SIGTERM and SIGINT set, so that loops can end between two tasks.

    Args:
        grace_s: after so many seconds more the process is ended, with exit code 0.
    """
    event = threading.Event()

    def handle(number: int, frame: object) -> None:
        if grace_s is not None and not event.is_set():
            ending = threading.Timer(grace_s, os._exit, [0])
            ending.daemon = True
            ending.start()
        event.set()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    return event


def stop_event_of_loop() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set, for the running event loop.

    A server creates it before it reports its address, because it may be stopped from then on.
    Outside of the main thread no signal sets it: callers cancel instead.
    """
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(RuntimeError, ValueError):  # not in the main thread
            loop.add_signal_handler(number, event.set)
    return event


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent dies for any reason."""
    supervisor = os.environ.get(SUPERVISOR)
    if sys.platform == "linux" and supervisor is not None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if str(os.getppid()) != supervisor:  # the parent died before the call
            os.kill(os.getpid(), signal.SIGTERM)


def leave(code: int) -> NoReturn:
    """End this process at once, with what it has logged and printed.

    An orderly end waits for threads whose disk does not answer, for peers that are gone, and
    seconds for vLLM. A role closes by itself what it has opened.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_role(role: str, body: Callable[[logging.Logger], None]) -> int:
    """Run a role's body and turn its errors into one message and an exit code.

    Returns:
        0 if the body ended by itself, 1 on a UserError, 3 on an internal error, 4 if the run must
        stop. The supervisor restarts the role unless the code is 0 or 4.
    """
    die_with_parent()
    log = setup_logging(role)
    try:
        body(log)
    except UserError as error:
        log.error("%s", error)
        return EXIT_FINAL if isinstance(error, RunStopped) else EXIT_USER_ERROR
    except Exception:
        log.exception("internal error")
        return EXIT_INTERNAL
    return 0
