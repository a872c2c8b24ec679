"""A volunteer's worker process: starts it, keeps its log, shows its warnings, ends it in order."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

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


class Worker:
    """A worker process, the lines of its log that the volunteer is shown, and its end.

    Args:
        link: of the run.
        weights: URLs of relays and origin.
        key: file of the volunteer's key.
        folder: keeps its versions, the problems' files and its log.
        pool: that it serves.
        cores: that it may use.
        tell: called with each line for the volunteer, without time and role, from a thread.

    Raises:
        UserError: its log cannot be written.
    """

    def __init__(
        self,
        link: JoinLink,
        weights: Sequence[str],
        key: Path,
        folder: Path,
        pool: SamplerPool,
        cores: Sequence[int],
        tell: Callable[[str], None],
    ) -> None:
        path = folder / LOG_FILE
        try:
            self._log = path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(
                f"cannot write the worker's log: {error.strerror or error}",
                place=str(path),
                remedy="free disk space, mend the permissions, or name another --dir",
            ) from error
        self._tell = tell
        self.last_error = ""
        """The last error that it logged."""
        on_cpu, tensor = pool.hardware.kind == "cpu", pool.parallel.tensor
        environment = thread_limits(cores) | vllm_environment(cores, on_cpu=on_cpu, tensor=tensor)
        # In a session of its own, so that a Ctrl-C in the terminal reaches it only through us.
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sampler", "work"),
                *("--run", link.run or "", "--coordinator", link.coordinator),
                *(option for url in weights for option in ("--weights", url)),
                *("--public-key", link.root or "", "--key", str(key)),
                *("--dir", str(folder), "--pool", pool.name),
            ],
            env={**os.environ, **environment, SUPERVISOR: str(os.getpid())},
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
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(OSError):  # a full disk: what matters is told below
                self._log.write(line)
            found = _LOGGED.match(line.decode(errors="replace").rstrip("\n"))
            if found is None:
                continue
            level, message = found.groups()
            if level in "EC":
                self.last_error = message
            if level in "WEC" or _WORTH_TELLING.match(message):
                self._tell(message)
