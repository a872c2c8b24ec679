"""Who may change a run's part of a store: one publisher at a time, or one relay."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runspec.core.errors import UserError

_LOOK_EVERY_S = 0.02


@contextmanager
def locked(store: Path, run: str, deadline_s: float) -> Iterator[None]:
    """Nobody else changes it meanwhile, in whatever process; a killed one lets go.

    Args:
        store: the store's directory.
        run: the run's id.
        deadline_s: how long to wait for another; the thread sleeps.

    Raises:
        UserError: it did not.
    """
    folder = store / run
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"another publisher or relay has held this store for {deadline_s:g} s",
                        place=str(folder),
                        remedy="let one process publish a run, and give each relay its own folder",
                    ) from None
                time.sleep(_LOOK_EVERY_S)
        yield
    finally:
        os.close(descriptor)
