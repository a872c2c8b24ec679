"""What the commands that look once have in common: exit codes that are no verdict, and printing."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from runspec.core.errors import UserError
from runspec.core.process import EXIT_INTERNAL

UNREADABLE, INTERRUPTED, NOBODY_READS = 2, 130, 141
"""Of a UserError; the other two as a shell has them for SIGINT and SIGPIPE."""


def run_once(body: Callable[[], int]) -> int:
    """Runs a command whose exit code is a verdict; what keeps it from one has codes of its own.

    Returns:
        The body's code; 2 on a UserError, 3 on a fault of our own, 130 on Ctrl-C, 141 where whoever
        read the output has gone.
    """
    try:
        return body()
    except UserError as error:
        print(error, file=sys.stderr)
        return UNREADABLE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return NOBODY_READS
    except Exception:
        logging.getLogger("verify").exception("internal error")
        return EXIT_INTERNAL


def say(text: str) -> None:
    """Prints a text and a line's end, all of it.

    Raises:
        UserError: standard output is on a disk that is full.
        BrokenPipeError: whoever read it has gone.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        # Python would say so again when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise UserError(
            f"cannot be written: {error.strerror or error}",
            place="standard output",
            remedy="name a file with room, or a command that reads",
        ) from error
