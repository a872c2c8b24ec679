"""A volunteer's worker process: starts it, keeps its log, shows its warnings, ends it in order."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from runspec.core.address import JoinLink
from runspec.core.errors import UserError
from runspec.core.process import SUPERVISOR
from runspec.core.spec.schema import SamplerPool
from runspec.local.cores import thread_limits, vllm_environment

LOG_FILE = "worker.log"
LEAVE_S = 15.0
"""How long the worker may take to leave before it is killed."""
# Time, level and role before the message, as `runspec.core.process.setup_logging` writes them.
_LOGGED = re.compile(r"^\S+ \S+ ([A-Z]) (?:sampler )?\S+ (.*)$")
_WORTH_TELLING = re.compile(r"version \d+ loaded|fetching|loading vLLM|the run is finished|stopped")


@dataclass(frozen=True)
class Worker:
    """The arguments of a volunteer's worker."""

    link: JoinLink
    weights: Sequence[str]
    """URLs of relays and origin."""
    key: Path
    folder: Path
    """Keeps its versions, the problems' files and its log."""
    pool: SamplerPool

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "sampler", "work"),
            *("--run", self.link.run or "", "--coordinator", self.link.coordinator),
            *(option for url in self.weights for option in ("--weights", url)),
            *("--public-key", self.link.root or "", "--key", str(self.key)),
            *("--dir", str(self.folder), "--pool", self.pool.name),
        ]

    def environment(self, inherited: Mapping[str, str], cores: Sequence[int]) -> dict[str, str]:
        on_cpu = self.pool.hardware.kind == "cpu"
        engine = vllm_environment(cores, on_cpu=on_cpu, tensor=self.pool.parallel.tensor)
        return {**inherited, **thread_limits(cores), **engine, SUPERVISOR: str(os.getpid())}


class Running:
    """A worker process, and the lines of its log that are shown to the volunteer.

    Args:
        worker: what to start.
        cores: that it may use.

    Raises:
        UserError: its log cannot be written.
    """

    def __init__(self, worker: Worker, cores: Sequence[int]) -> None:
        path = worker.folder / LOG_FILE
        try:
            worker.folder.mkdir(parents=True, exist_ok=True)
            self._log = path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(
                f"cannot write the worker's log: {error.strerror or error}",
                place=str(path),
                remedy="free disk space, mend the permissions, or name another --dir",
            ) from error
        self.told: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Lines for the volunteer, without time and role."""
        self.last_error = ""
        """The last error that it logged."""
        # In a session of its own, so that a Ctrl-C in the terminal reaches it only through us.
        self._process = subprocess.Popen(
            worker.command(),
            env=worker.environment(os.environ, cores),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="log", daemon=True)
        self._reader.start()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> bool:
        """Waits for its end, no longer than `timeout_s` seconds; whether it came."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(timeout_s)
        return True

    def leave(self) -> None:
        """Asks it to submit finished groups and to return its other leases."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it, and all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        output: IO[bytes] | None = self._process.stdout
        assert output is not None
        for line in output:
            with suppress(OSError):  # a full disk: what matters is told below
                self._log.write(line)
            self._tell(line.decode(errors="replace").rstrip("\n"))

    def _tell(self, line: str) -> None:
        found = _LOGGED.match(line)
        if found is None:
            return
        level, message = found.groups()
        if level in "EC":
            self.last_error = message
        if level in "WEC" or _WORTH_TELLING.match(message):
            self.told.put(message)
