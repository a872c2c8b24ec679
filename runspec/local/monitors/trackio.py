"""Monitor that logs to trackio, which is installed in an environment of its own.

Its pins and ours exclude each other. So a small script speaks to it, and this module speaks to the
script: lines of JSON over pipes.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from runspec.core.errors import UserError
from runspec.core.files import expand_user
from runspec.core.process import RunStopped
from runspec.local.monitors import Entry, Target

SCRIPT = Path(__file__).with_name("trackio_script.py")
_MOST_BYTES = 64 * 1024
"""Of an answer."""


class Trackio:
    """A run of trackio in its local database, whose name is the record's."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, target: Target) -> None:
        setting = target.setting
        if setting.python is None:
            raise RunStopped(
                "trackio needs an environment of its own",
                place=f"monitors.{setting.name}.python",
                remedy="name its interpreter; `make trackio` makes .venv/trackio/bin/python",
            )
        target.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._process = subprocess.Popen(
                # Isolated: neither PYTHONPATH nor this folder, which has a `trackio` of its own.
                [str(expand_user(Path(setting.python))), "-I", str(SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "TRACKIO_DIR": str(target.folder)},
            )
        except OSError as error:
            raise RunStopped(
                f"cannot start {setting.python}: {error.strerror}",
                place=f"monitors.{setting.name}.python",
                remedy="name the interpreter of trackio's environment (`make trackio`)",
            ) from error
        self._ask(project=setting.project, run=target.record, config=target.spec)

    def send(self, entry: Entry) -> None:
        figures = {entry.axis: entry.at, **entry.scalars}
        self._tell(at=entry.at, figures=figures, rollouts=list(entry.rollouts))

    def flush(self) -> None:
        self._ask(flush=True)  # answered once the database has what was sent

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()  # the end of its input ends it

    def _tell(self, **message: Any) -> None:
        assert self._process is not None and self._process.stdin is not None, "start comes first"
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _ask(self, **message: Any) -> None:
        self._tell(**message)
        assert self._process is not None and self._process.stdout is not None, "start comes first"
        if not self._process.stdout.readline(_MOST_BYTES):
            raise UserError(
                f"its script ended with exit code {self._process.wait()}",
                place=str(SCRIPT),
                remedy="the lines above are its own",
            )
