"""Output of commands: readers that go away, and errors with their exit codes.

The reader of `runspec apply ... | head` goes away while the command trains on. Every command goes
on without output, and its exit code is that of its work. One that prints without end asks
`reader_gone`.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, Any

from runspec.core.errors import RunElsewhere, UserError

if TYPE_CHECKING:
    from collections.abc import Callable

_REFUSALS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR}
"""Errors of a disk that a person can mend, wherever they come up."""


class _Unbroken(io.FileIO):
    """A file descriptor that discards what is written once nobody reads it."""

    gone = False

    def write(self, data: Any) -> int:
        """Writes a buffer of bytes, as `io.FileIO` does; returns how many."""
        try:
            return super().write(data)
        except BrokenPipeError:
            _Unbroken.gone = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def outlive_readers() -> None:
    """Makes standard output and standard error discard what nobody reads any more."""
    sys.stdout, sys.stderr = _unbroken(sys.stdout), _unbroken(sys.stderr)


def reader_gone() -> bool:
    """Whether something was written that nobody reads."""
    return _Unbroken.gone


def _unbroken(stream: Any) -> Any:
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError):  # closed from the start, or no file
        return stream
    raw = io.BufferedWriter(_Unbroken(descriptor, "w", closefd=False))
    return io.TextIOWrapper(
        raw, stream.encoding, stream.errors, line_buffering=stream.line_buffering
    )


def exit_code_of(work: Callable[[], int]) -> int:
    """Return the exit code of `work`, or that of the error that ends it, which is printed."""
    try:
        return work()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except RunElsewhere as run:
        carry = run.carry
        return exit_code_of(lambda: carry(sys.argv[1:]))
    except KeyboardInterrupt:
        from runspec.local.backend import EXIT_INTERRUPTED

        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.filename and error.errno in _REFUSALS:
            print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
            print("  remedy: mend the permissions, free space, or name another", file=sys.stderr)
            return 1
        import logging

        from runspec.core.process import EXIT_INTERNAL

        logging.exception("a fault of runspec's own; please report it")
        return EXIT_INTERNAL
