"""`python -m broadcast` as processes: run to their end, or started and ended with the test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.waiting import eventually

COMMAND = (sys.executable, "-m", "broadcast")


def broadcast(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


class Processes:
    """Background processes of a test; none outlives it."""

    def __init__(self, log_folder: Path) -> None:
        self._folder = log_folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self, *arguments: object, command: tuple[str, ...] = COMMAND
    ) -> subprocess.Popen[bytes]:
        with self._log(len(self._started)).open("wb") as log:
            process = subprocess.Popen([*command, *map(str, arguments)], stdout=log, stderr=log)
        self._started.append(process)
        return process

    def said(self, process: subprocess.Popen[bytes]) -> str:
        """All that a process has written so far."""
        return self._log(self._started.index(process)).read_text()

    def url(self, process: subprocess.Popen[bytes]) -> str:
        """Where a started server listens."""
        form = re.compile(r"listening on (http\S+)")
        eventually(
            lambda: form.search(self.said(process)) is not None,
            "the server listens",
            context=lambda: self.said(process),
        )
        found = form.search(self.said(process))
        assert found
        return found[1]

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()

    def _log(self, number: int) -> Path:
        return self._folder / f"process-{number}.log"
