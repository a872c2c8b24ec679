"""Processes with limits but without walls, for machines on which no sandbox works.

They have a directory of their own, an empty environment and limits of time, memory and file size,
and end as a group, also where whoever started them is killed: another process waits for that, since
one that hangs hears nothing. They see what their user sees: only terms that run no program of the
model, and runs of trusted pools that say `sandboxed: false`, are graded so.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from sampler.sandbox import Finished, Limits

_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}
_STDERR_BYTES = 64 << 10
_PORTION = 64 << 10
_END_S = 30.0
_WATCH = """\
import os, shutil, signal, sys
if not os.read(0, 1):  # whoever would have said that all is well is gone
    try:
        os.killpg(int(sys.argv[1]), signal.SIGKILL)
    except ProcessLookupError:
        pass
    shutil.rmtree(sys.argv[2], ignore_errors=True)
"""


class Unconfined:
    """A running process; the same face as `sampler.sandbox.Isolated`."""

    def __init__(self, command: Sequence[str], limits: Limits, files: Mapping[str, bytes]) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="grading-", ignore_cleanup_errors=True)
        for name, content in files.items():
            (Path(self._scratch.name) / name).write_bytes(content)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._scratch.name,
            env=_ENVIRONMENT,
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._watch = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-c", _WATCH),
                *(str(self._process.pid), self._scratch.name),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_ENVIRONMENT,
            start_new_session=True,
        )
        self.stdin: IO[bytes] = self._process.stdin
        self.stdout: IO[bytes] = self._process.stdout
        self._verdict = ""
        self._finished: Finished | None = None
        self._said = bytearray()
        self._limit(limits)
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()
        self._timer: threading.Timer | None = None
        if limits.wall_s is not None:
            self._timer = threading.Timer(limits.wall_s, self.stop, ["time"])
            self._timer.daemon = True
            self._timer.start()

    @property
    def stderr(self) -> bytes:
        """The last of what it wrote there."""
        return bytes(self._said)

    def stop(self, verdict: str = "killed") -> None:
        """Ends the process and its group, without waiting."""
        if self._process.poll() is None:
            self._verdict = self._verdict or verdict
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> Finished:
        """Ends the process and its group."""
        self.stop()
        return self.wait(_END_S)

    def wait(self, timeout_s: float | None) -> Finished:
        """How it ended.

        Raises:
            TimeoutError: it has not ended in time.
        """
        if self._finished is not None:
            return self._finished
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the process runs after {timeout_s} s") from None
        self.stop()  # what it started
        if self._timer is not None:
            self._timer.cancel()
        self._reader.join(_END_S)
        for stream in (self.stdin, self.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        self._watch.communicate(b".")
        self._scratch.cleanup()
        outcome: Any = self._verdict or ("signal" if code < 0 else "exit")
        if code in (-signal.SIGXCPU, -signal.SIGXFSZ):
            outcome = "cpu" if code == -signal.SIGXCPU else "files"
        elif b"MemoryError" in self.stderr[-200:]:
            outcome = "memory"
        self._finished = Finished(outcome, code, stderr=self.stderr)
        return self._finished

    def _limit(self, limits: Limits) -> None:
        bounds = {
            resource.RLIMIT_AS: limits.memory_bytes,
            resource.RLIMIT_FSIZE: limits.file_bytes,
            resource.RLIMIT_CORE: 0,
        }
        if limits.cpu_s is not None:
            bounds[resource.RLIMIT_CPU] = max(1, round(limits.cpu_s))
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            for kind, bound in bounds.items():
                resource.prlimit(self._process.pid, kind, (bound, bound))

    def _listen(self) -> None:
        assert self._process.stderr
        while part := os.read(self._process.stderr.fileno(), _PORTION):
            self._said += part
            del self._said[:-_STDERR_BYTES]


def start(
    command: Sequence[str],
    *,
    limits: Limits,
    files: Mapping[str, bytes] | None = None,
    readable: Sequence[Path] = (),
) -> Unconfined:
    """Starts a process; `readable` is for the sandbox's sake, all can be read here."""
    return Unconfined(command, limits, files or {})


def run(
    command: Sequence[str],
    *,
    stdin: bytes = b"",
    limits: Limits,
    files: Mapping[str, bytes] | None = None,
    readable: Sequence[Path] = (),
) -> Finished:
    """Runs a process to its end; see `sampler.sandbox.run`."""
    process = start(command, limits=limits, files=files, readable=readable)
    writer = threading.Thread(target=_feed, args=(process.stdin, stdin), daemon=True)
    writer.start()
    output = bytearray()
    while part := os.read(process.stdout.fileno(), _PORTION):
        output += part
        if len(output) > limits.output_bytes:
            process.stop("output")
            break
    finished = process.wait(None if limits.wall_s is None else limits.wall_s + _END_S)
    writer.join(_END_S)
    return Finished(finished.outcome, finished.code, bytes(output), finished.stderr)


def _feed(stream: IO[bytes], data: bytes) -> None:
    with contextlib.suppress(OSError, ValueError):
        stream.write(data)
    with contextlib.suppress(OSError, ValueError):
        stream.close()
