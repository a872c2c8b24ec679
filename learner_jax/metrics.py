"""metrics.jsonl and samples.jsonl: whole lines or none, and each step's lines once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runspec.core.errors import UserError

_BLOCK = 64 * 1024


class JsonLines:
    """An append-only file of JSON lines, each with the `step` that it is of.

    A line that a killed process left torn is dropped on opening. Steps come in order, so that the
    last whole line says which are written already: a replayed step writes nothing twice.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        _drop_torn_line(path)
        self.last_step = _last_step(path)
        """The newest step that has lines; -1 for none."""

    def append(self, step: int, lines: list[dict[str, Any]]) -> bool:
        """Writes the lines of a step in one write; False when the step has its lines already."""
        if step <= self.last_step:
            return False
        self.write(step, lines)
        return True

    def write(self, step: int, lines: list[dict[str, Any]]) -> None:
        """Writes lines of a step in one write, whether it has some already or not."""
        data = "".join(json.dumps({"step": step, **line}) + "\n" for line in lines).encode()
        try:
            with self._path.open("ab", buffering=0) as file:
                written = file.write(data)
            if written != len(data):
                raise OSError(f"only {written} of {len(data)} bytes written")
        except OSError as error:
            raise UserError(
                f"cannot write: {error.strerror or error}",
                place=str(self._path),
                remedy="free disk space, then start again",
            ) from error
        self.last_step = step


class Clock:
    """Splits the learner's time into training and waiting, honestly: each second is one or other.

    Time before it is made, that of start-up and compilation, is neither.

    Args:
        now: seconds, never going back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._at = now()
        self._train_s = 0.0
        self._waits: dict[str, float] = {}

    def trained(self) -> None:
        """Counts the time since the last call as training."""
        self._train_s += self._elapsed()

    def waited(self, whom: str) -> None:
        """Counts the time since the last call as waiting for `whom`."""
        self._waits[whom] = self._waits.get(whom, 0.0) + self._elapsed()

    def take(self) -> tuple[float, dict[str, float]]:
        """Seconds since the last `take`: of training, and of waiting by whom it was for."""
        result = self._train_s, self._waits
        self._train_s, self._waits = 0.0, {}
        return result

    def _elapsed(self) -> float:
        now = self._now()
        elapsed, self._at = now - self._at, now
        return elapsed


def _drop_torn_line(path: Path) -> None:
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        keep = _after_last_newline(file, end)
        if keep != end:
            file.truncate(keep)


def _after_last_newline(file: Any, end: int) -> int:
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        at = file.read(end - start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def _last_step(path: Path) -> int:
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        if end == 0:
            return -1
        start = _after_last_newline(file, end - 1)
        file.seek(start)
        line = file.read()
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"its last line is not one of ours: {line[:80]!r}",
            place=str(path),
            remedy="remove that line, then start again",
        ) from error
