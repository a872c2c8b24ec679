"""The side of validators and the learner: starts the decoder, feeds it, believes little of it.

A process that ends, hangs or answers nonsense is killed and replaced. Where the same file does that
to a fresh one too, the file is at fault. A process that something outside has killed says nothing
of the file.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from runspec.core.errors import UserError
from verify.decoder.unpack import BadAnswer, largest_answer, unpack
from verify.decoder.wire import ANSWER, COLUMNS, MALFORMED, MAX_WORDS, READY, REQUEST
from verify.formats.submission import Rollout
from verify.formats.tables import MalformedTable

CPU_S = 5
"""Processor time for one file, and a second for every 4 MiB of it (`wire`)."""
DEADLINE_S = 300.0
"""For one file, on a machine that others use too."""
START_DEADLINE_S = 120.0
AGAIN = 8
"""So many times as long has who must read what a validator has read: a file may be made to take
nearly all that there is, and another machine be slower, or busier."""
_ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # others reserve address space, which is limited
    "ARROW_IO_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
_ROOT = Path(__file__).parents[2]
_PIPE_BYTES = 1 << 20
_MAX_ERRORS = 4000


class DecoderKilled(RuntimeError):
    """Something outside (the kernel, out of memory) has killed the process twice."""


class _Failed(Exception):
    """An attempt without an answer; its words say why."""


class Decoder:
    """Decodes submissions in a child process. For one thread at a time.

    Args:
        cpu_s: processor time for one file, and as much again as its size asks for.
        deadline_s: wall time for one file.
        times: of all three; `AGAIN` where a validator accepted the file.
        command: starts the process; its processor time is added.
    """

    def __init__(
        self,
        *,
        cpu_s: int = CPU_S,
        deadline_s: float = DEADLINE_S,
        times: int = 1,
        command: Sequence[str] = (sys.executable, "-m", "verify.decoder"),
    ) -> None:
        self._deadline_s = times * deadline_s
        self._command = [*command, str(cpu_s), str(times)]
        self._child: _Child | None = None

    @property
    def pid(self) -> int | None:
        """Of the child, while there is one."""
        return self._child.process.pid if self._child else None

    def decode(self, data: bytes, *, max_rows: int, max_bytes: int) -> list[Rollout]:
        """Reads a submission's Parquet bytes, as `verify.formats.submission.decode_rollouts` does.

        Raises:
            MalformedTable: not a table of the format within the limits; or two processes in a row
                have come to no answer on it.
            DecoderKilled: they were killed from outside.
            UserError: no process can be started.
        """
        if len(data) > max_bytes:
            raise MalformedTable(f"{len(data)} bytes, more than the {max_bytes} allowed")
        failed = []
        for _ in range(2):
            try:
                return self._attempt(data, max_rows, max_bytes)
            except _Failed as error:
                failed.append(str(error))
                self.close()
        words = f"the decoder came to no answer twice: {' and then '.join(failed)}"
        if any(_OUTSIDE in reason for reason in failed):
            raise DecoderKilled(words)
        raise MalformedTable(words)

    def close(self) -> None:
        """Ends the child; the next file starts another."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _attempt(self, data: bytes, max_rows: int, max_bytes: int) -> list[Rollout]:
        if self._child is None:
            self._child = _Child(self._command)
        until = time.monotonic() + self._deadline_s
        largest = largest_answer(max_rows, max_bytes)
        request = REQUEST.pack(len(data), max_rows, max_bytes)
        try:
            kind, body = self._child.ask(request, data, largest=largest, until=until)
        except BaseException:  # what is left of an answer is none to the next file
            self.close()
            raise
        if kind == MALFORMED:
            raise MalformedTable(_printable(body))
        try:
            return unpack(body, max_rows=max_rows)
        except BadAnswer as error:
            raise _Failed(f"it answered nonsense ({error})") from error


_OUTSIDE = "was killed from outside"


class _Child:
    """One process and the two pipes to it.

    Raises:
        UserError: it does not start.
    """

    def __init__(self, command: Sequence[str]) -> None:
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_ENVIRONMENT,
                cwd=_ROOT,  # so that it is this very package
                bufsize=0,
            )
        except OSError as error:
            raise _cannot_start(str(error)) from error
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self._to, self._from = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        try:
            kind, _ = self._answer(0, time.monotonic() + START_DEADLINE_S)
            if kind != READY:
                raise _Failed("it does not say that it is ready")
        except _Failed as error:
            os.set_blocking(self.process.stderr.fileno(), False)
            words = (self.process.stderr.read(_MAX_ERRORS) or b"").decode(errors="replace")
            self.kill()
            last = words.strip().splitlines()[-1:] or [str(error)]
            raise _cannot_start(f"{error}: {last[0]}") from error

    def ask(
        self, request: bytes, data: bytes, *, largest: int, until: float
    ) -> tuple[int, bytearray]:
        """Sends a file and reads the answer: what it is, and its bytes.

        Raises:
            _Failed: there is none by `until`, or it is too large.
        """
        for part in (request, data):
            view = memoryview(part)
            while view:
                self._wait(self._to, select.POLLOUT, until)
                try:
                    view = view[os.write(self._to, view[:_PIPE_BYTES]) :]
                except BrokenPipeError as error:
                    raise self._ended() from error
        kind, body = self._answer(largest, until)
        if kind not in (COLUMNS, MALFORMED):
            raise _Failed(f"it answered nonsense (kind {kind})")
        return kind, body

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def _answer(self, largest: int, until: float) -> tuple[int, bytearray]:
        kind, size = ANSWER.unpack(self._read(ANSWER.size, until))
        if size > (largest if kind == COLUMNS else MAX_WORDS):
            raise _Failed(f"it answered nonsense ({size} bytes)")
        return kind, self._read(size, until)

    def _read(self, size: int, until: float) -> bytearray:
        data = bytearray()
        while len(data) < size:  # no room is made for what may never come
            self._wait(self._from, select.POLLIN, until)
            piece = os.read(self._from, min(size - len(data), _PIPE_BYTES))
            if not piece:
                raise self._ended()
            data += piece
        return data

    def _wait(self, pipe: int, event: int, until: float) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        left = until - time.monotonic()
        if left <= 0 or not poll.poll(1000 * left):
            raise _Failed("it did not answer in time")

    def _ended(self) -> _Failed:
        """Why the other end of a pipe is closed."""
        try:
            code = self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            return _Failed("it closed a pipe")
        if code == -signal.SIGKILL:
            return _Failed(f"it {_OUTSIDE} (out of memory?)")
        if code >= 0:
            return _Failed(f"it ended with exit code {code}")
        return _Failed(f"it was ended by {signal.Signals(-code).name}")


def _cannot_start(words: str) -> UserError:
    return UserError(
        f"the decoder of submissions does not start: {words}",
        place=f"{sys.executable} -m verify.decoder",
        remedy="run it by hand; it needs numpy, pyarrow and 0.6 GB of memory",
    )


def _printable(words: bytes | bytearray) -> str:
    text = words.decode(errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)
