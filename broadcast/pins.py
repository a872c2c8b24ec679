"""Pins: versions that were read recently, so that they are not pruned while a client reads them.

A pin is an empty file `<run>/pins/<version>`; its modification time is the time of the last read.
The origin, which serves the readers, writes the pins. The publisher, which prunes, reads them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from broadcast.manifest import WeightsManifest

VALID_S = 600.0
"""Seconds for which a pin keeps a version."""
TOUCH_EVERY_S = 5.0
"""Shortest time between two writes of a pin, in seconds."""


class Pins:
    """The pins of one run in a store.

    Args:
        store: the store's directory.
        run: the run's id.
        clock: returns seconds since the epoch.
    """

    def __init__(self, store: Path, run: str, *, clock: Callable[[], float] = time.time) -> None:
        self._folder = store / run / "pins"
        self._clock = clock
        self._touched: dict[int, float] = {}

    def touch(self, version: int) -> None:
        """Pin a version that the store holds; do nothing if the disk is full."""
        now = self._clock()
        if 0 <= now - self._touched.get(version, 0.0) < TOUCH_EVERY_S:
            return
        self._touched[version] = now
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / str(version)
            path.touch()
            os.utime(path, (now, now))

    def newest_first(self) -> list[int]:
        """Return the pinned versions, the last read first."""
        now = self._clock()
        found = []
        for path in self._folder.glob("*"):
            with suppress(OSError):  # it was removed
                age = now - path.stat().st_mtime
                if path.name.isdecimal() and age < VALID_S:
                    found.append((age, int(path.name)))
        return [version for _, version in sorted(found)]

    def keep_only(self, versions: Iterable[int]) -> None:
        """Remove the pins of all other versions."""
        kept = set(versions)
        self._touched = {v: at for v, at in self._touched.items() if v in kept}
        for path in self._folder.glob("*"):
            if not (path.name.isdecimal() and int(path.name) in kept):
                path.unlink(missing_ok=True)


def owners(manifests: Iterable[WeightsManifest]) -> dict[str, int]:
    """Return the version of each chunk that belongs to one version only.

    A request for such a chunk shows which version its client reads. Shared chunks do not.
    """
    owner: dict[str, int] = {}
    shared = set()
    for manifest in manifests:
        for digest in manifest.chunks():
            if digest in owner:
                shared.add(digest)
            owner[digest] = manifest.version
    return {digest: version for digest, version in owner.items() if digest not in shared}
