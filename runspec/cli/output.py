"""Output whose reader may go away: `runspec apply ... | head` trains on, and prints to nobody.

Every command goes on without output and exits by what came of its work. One that prints without end
asks `reader_gone`.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any


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
