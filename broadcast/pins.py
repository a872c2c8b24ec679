"""Pins: which versions somebody read lately, so that they are not pruned under a reader.

A pin is an empty file `<run>/pins/<version>` whose modification time is the last interest, so that
the origin (which sees the readers) and the publisher (which prunes) share it without a word.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from broadcast.manifest import WeightsManifest

VALID_S = 600.0
"""For how long interest in a version keeps it."""
TOUCH_EVERY_S = 5.0
"""A version's pin is written at most this often, however many read it."""


class Pins:
    """The pins of one run in a store.

    Args:
        store: the store's directory.
        run: the run's id.
        clock: seconds since the epoch, as files have them.
    """

    def __init__(self, store: Path, run: str, *, clock: Callable[[], float] = time.time) -> None:
        self._folder = store / run / "pins"
        self._clock = clock
        self._touched: dict[int, float] = {}

    def touch(self, version: int) -> None:
        """Notes interest in a version that the store holds; on a full disk nothing is noted."""
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
        """Versions that somebody showed interest in lately, the latest interest first."""
        now = self._clock()
        found = []
        for path in self._folder.glob("*"):
            with suppress(OSError):  # removed meanwhile
                age = now - path.stat().st_mtime
                if path.name.isdecimal() and age < VALID_S:
                    found.append((age, int(path.name)))
        return [version for _, version in sorted(found)]

    def keep_only(self, versions: Iterable[int]) -> None:
        """Forgets the pins of versions that are gone."""
        kept = set(versions)
        self._touched = {v: at for v, at in self._touched.items() if v in kept}
        for path in self._folder.glob("*"):
            if not (path.name.isdecimal() and int(path.name) in kept):
                path.unlink(missing_ok=True)


def owners(manifests: Iterable[WeightsManifest]) -> dict[str, int]:
    """The version that each chunk belongs to, without the chunks that several versions share.

    Whoever asks for such a chunk is interested in that version; a shared one tells nothing.
    """
    owner: dict[str, int] = {}
    shared = set()
    for manifest in manifests:
        for digest in manifest.chunks():
            if digest in owner:
                shared.add(digest)
            owner[digest] = manifest.version
    return {digest: version for digest, version in owner.items() if digest not in shared}
