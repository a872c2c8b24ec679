"""Running an isolated program to its end."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from sampler.sandbox.limits import Finished, Limits
from sampler.sandbox.process import start


def run(
    command: Sequence[str],
    *,
    stdin: bytes = b"",
    limits: Limits,
    files: Mapping[str, bytes] | None = None,
    readable: Sequence[Path] = (),
    mechanisms: Sequence[str] | None = None,
) -> Finished:
    """Runs a program in isolation until it ends or hits a limit; nothing of it is left then.

    Args and errors as of `start`. `stdin` is all that the program can read there.
    """
    process = start(command, limits=limits, files=files, readable=readable, mechanisms=mechanisms)
    too_much = threading.Event()

    def cut() -> None:
        too_much.set()
        process.stop()

    process.watch_stderr(limits.output_bytes, cut)
    writer = threading.Thread(target=_feed, args=(process.stdin, stdin), daemon=True)
    writer.start()
    try:
        stdout = _read(process.stdout, limits.output_bytes)
        if len(stdout) > limits.output_bytes:
            cut()
        finished = process.wait(None)
    finally:
        process.kill()
        writer.join()
    if too_much.is_set() and finished.outcome == "killed":
        finished = replace(finished, outcome="output")
    return replace(finished, stdout=stdout[: limits.output_bytes])


def _feed(stream: IO[bytes], data: bytes) -> None:
    """Writes what the program reads; it need not read it."""
    with contextlib.suppress(OSError, ValueError):
        stream.write(data)
    with contextlib.suppress(OSError, ValueError):
        stream.close()


def _read(stream: IO[bytes], limit: int) -> bytes:
    """All that comes until the end, or a little more than the limit."""
    parts, total = [], 0
    while total <= limit and (part := os.read(stream.fileno(), 64 << 10)):
        parts.append(part)
        total += len(part)
    return b"".join(parts)
