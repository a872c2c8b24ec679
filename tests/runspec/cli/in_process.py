"""The `runspec` command without a process of its own."""

from __future__ import annotations

import gc
import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

from runspec.cli import main


def runspec(*arguments: str | Path) -> CompletedProcess[str]:
    """What the command exits with and prints, as `tests.harness.runspec` gives it."""
    words = ["runspec", *map(str, arguments)]
    # With a buffer of bytes below, as a process's own streams have one.
    out, err = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
    code = 0
    collected = gc.get_threshold()  # `main` is for a process of its own, and sets another
    streams = patch.multiple(sys, argv=words, stdin=io.StringIO())  # nobody answers questions
    with streams, redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            gc.set_threshold(*collected)
    printed, logged = (stream.buffer.getvalue().decode() for stream in (out, err))
    return CompletedProcess(words, code, printed, logged)
