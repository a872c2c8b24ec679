"""Measures solve rates: samples every problem a few times with a model and counts the solved tries.

Progress is written to disk line by line, so a killed measurement continues.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from sampler.evaluation.ask import SOLVED, Questions, answered

if TYPE_CHECKING:
    from sampler.engine.engine import Engine

MAX_BYTES = 1 << 30
_LOG_EVERY_S = 5.0


@dataclass(frozen=True)
class Tries:
    """Number of tries of one problem, and of solved ones."""

    index: int
    """Index of the problem in the task set."""
    solved: int
    """Tries with a task reward of 1 or more."""
    graded: int
    """Tries that were graded; a fault of a grader leaves a try out."""

    @property
    def rate(self) -> float | None:
        """Share of solved tries; None if no try could be graded."""
        return self.solved / self.graded if self.graded else None


class Progress:
    """Progress file: what is measured, then one line for each problem. It has one writer."""

    def __init__(self, path: Path, file: BinaryIO, done: dict[int, Tries]) -> None:
        self._path, self._file = path, file
        self.done = done
        """Tries by index of the problem."""

    def add(self, tries: Iterable[Tries]) -> None:
        """Store more problems; they are on disk when this returns.

        Raises:
            UserError: they cannot be written.
        """
        for one in tries:
            self.done[one.index] = one
            self.write(json.dumps(asdict(one)).encode())
        with _said(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def write(self, line: bytes) -> None:
        """Write a line."""
        with _said(self._path):
            self._file.write(line + b"\n")


@contextmanager
def open_progress(path: Path, about: Mapping[str, object]) -> Iterator[Progress]:
    """Continue a measurement, or start one.

    Args:
        path: of the progress file.
        about: all that the solve rates depend on.

    Raises:
        UserError: the file belongs to another measurement, or cannot be read or written.
    """
    head = json.dumps(about, sort_keys=True).encode()
    with _said(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        data = read_bounded(path, MAX_BYTES) if path.exists() else b""
        whole = data.rfind(b"\n") + 1  # a killed process may leave half a line
        lines = data[:whole].splitlines()
        if lines and lines[0] != head:
            raise UserError(
                "this is the progress of a measurement with another model, data or settings",
                place=str(path),
                remedy="use the same model, data and settings, or delete the file to start again",
            )
        done = _tries(lines[1:], path)
        file = path.open("r+b" if lines else "wb")
    with file:
        file.truncate(whole)
        file.seek(whole)
        progress = Progress(path, file, done)
        if not lines:
            progress.write(head)
        yield progress


@contextmanager
def _said(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot store the progress: {error.strerror or error}",
            place=str(path),
            remedy="free disk space or fix the permissions; the same command continues",
        ) from error


def _tries(lines: list[bytes], path: Path) -> dict[int, Tries]:
    try:
        found = [Tries(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise UserError(
            f"damaged: {error}", place=str(path), remedy="delete the file to start again"
        ) from error
    return {one.index: one for one in found}


def measure(
    asked: Questions,
    engine: Engine,
    progress: Progress,
    log: logging.Logger,
    stop: threading.Event,
) -> bool:
    """Measure the problems that `progress` lacks; the engine stays full while answers are graded.

    Returns:
        Whether all are measured; False if `stop` was set.

    Raises:
        UserError: the engine died, or nothing can be graded here.
    """
    begun = said = time.monotonic()
    before = sum(index < asked.count for index in progress.done)
    left = (index for index in range(asked.count) if index not in progress.done)
    for found in answered(asked, engine, left, stop):
        graded = {index: [r for r in one.rewards if r is not None] for index, one in found.items()}
        progress.add(
            Tries(index, sum(reward >= SOLVED for reward in rewards), len(rewards))
            for index, rewards in graded.items()
        )
        done = [one.rate for one in progress.done.values() if one.index < asked.count]
        missing, now = asked.count - len(done), time.monotonic()
        if now - said >= _LOG_EVERY_S or not missing:
            said = now
            rates = [rate for rate in done if rate is not None]
            log.info(
                "%d of %d problems, mean solve rate %.3f, %d without one; about %.0f s left",
                *(len(done), asked.count, sum(rates) / max(1, len(rates)), len(done) - len(rates)),
                missing * (now - begun) / max(1, len(done) - before),
            )
    return all(index in progress.done for index in range(asked.count))
