"""Isolation of programs that a model wrote: no network, no files, bounded, killed as a group.

    from sampler.sandbox import PYTHON, Limits, run

    finished = run([*PYTHON, "-c", source], limits=Limits(wall_s=2.0))

There are two sets of mechanisms, each enough by itself; those that work on the machine are applied
together. A: user, PID, network, mount, IPC and UTS namespaces. B: Landlock and seccomp. See
docs/sandbox.md.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sampler.sandbox.limits import Finished, Limits
from sampler.sandbox.probe import probe, require
from sampler.sandbox.process import (
    PORTION_BYTES,
    PYTHON,
    Isolated,
    NotIsolated,
    launch,
)

__all__ = [
    "PYTHON",
    "Limits",
    "NotIsolated",
    "probe",
    "require",
    "run",
    "start",
]


def start(
    command: Sequence[str],
    *,
    limits: Limits,
    files: Mapping[str, bytes] | None = None,
    readable: Sequence[Path] = (),
    mechanisms: Sequence[str] | None = None,
) -> Isolated:
    """Start a program in isolation like `launch`; by default with all mechanisms that work here.

    Raises:
        NotIsolated: a mechanism fails, or the program or a path is missing.
        UserError: no set of mechanisms works here.
    """
    if mechanisms is None:
        require("sandbox")
        mechanisms = probe().working
    return launch(command, limits=limits, mechanisms=mechanisms, files=files, readable=readable)


def run(
    command: Sequence[str],
    *,
    stdin: bytes = b"",
    limits: Limits,
    files: Mapping[str, bytes] | None = None,
    readable: Sequence[Path] = (),
    mechanisms: Sequence[str] | None = None,
) -> Finished:
    """Run a program in isolation until it ends or hits a limit; none of its processes is left then.

    Args and errors are those of `start`. `stdin` is the whole standard input of the program.
    """
    process = start(command, limits=limits, files=files, readable=readable, mechanisms=mechanisms)
    process.limit_stderr(limits.output_bytes)

    def feed() -> None:
        """Write the program's standard input, which the program need not read."""
        with contextlib.suppress(OSError, ValueError):
            process.stdin.write(stdin)
        with contextlib.suppress(OSError, ValueError):
            process.stdin.close()

    writer = threading.Thread(target=feed, daemon=True)
    writer.start()
    stdout = bytearray()
    try:
        while len(stdout) <= limits.output_bytes:
            if not (part := os.read(process.stdout.fileno(), PORTION_BYTES)):
                break
            stdout += part
        else:
            process.stop()
        finished = process.wait(None)
    finally:
        process.kill()
        writer.join()
    too_much = len(stdout) > limits.output_bytes or process.wrote_too_much
    if too_much and finished.outcome == "killed":
        finished = replace(finished, outcome="output")
    return replace(finished, stdout=bytes(stdout[: limits.output_bytes]))
