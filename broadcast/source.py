"""Interface between a server and the versions that it serves; state of origin and relay."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from broadcast.manifest import WeightsManifest


class Source(Protocol):
    """Provides the answers of a server: `origin.StoreSource` or `relay.Mirror`.

    None means that the thing does not exist (404).
    """

    async def roles(self, run: str) -> Path | None: ...

    async def latest(self, run: str, after: int | None, wait_s: float) -> bytes | None:
        """Return latest.json. Wait up to `wait_s` for one newer than `after`."""
        ...

    async def manifest(self, run: str, version: int) -> Path | None: ...

    async def chunk(self, run: str, digest: str) -> Path | None: ...

    async def manifests(self, run: str) -> Mapping[int, WeightsManifest]:
        """Return the manifests of the versions held, by version; empty for another run."""
        ...

    async def work(self) -> None:
        """Run beside the server until cancelled."""
        ...


class Announcement:
    """The newest latest.json of a run, and the requests that wait for a newer one."""

    def __init__(self) -> None:
        self.data: bytes | None = None
        self.version = -1
        self.waiting = 0
        self._changed = asyncio.Condition()

    async def post(self, data: bytes, version: int) -> None:
        """Set latest.json. A newer version wakes the waiting requests, a new signature does not."""
        self.data = data
        if version > self.version:
            self.version = version
            async with self._changed:
                self._changed.notify_all()

    def withdraw(self) -> None:
        """Forget the newest version: its signature is no longer trusted."""
        self.data, self.version = None, -1

    async def newer_than(self, after: int | None, wait_s: float) -> bytes | None:
        """Return latest.json; wait up to `wait_s` seconds for one newer than `after`."""
        if after is not None and wait_s > 0 and self.version <= after:
            self.waiting += 1
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s), self._changed:
                        await self._changed.wait_for(lambda: self.version > after)
            finally:
                self.waiting -= 1
        return self.data


class Recent:
    """Keys noted within the last `for_s` seconds, at most the `limit` newest."""

    def __init__(
        self, for_s: float, *, limit: int = 1024, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._for_s, self._limit, self._clock = for_s, limit, clock
        self._noted: dict[Hashable, float] = {}

    def note(self, key: Hashable) -> None:
        self._noted.pop(key, None)  # keeps the keys ordered by time
        self._noted[key] = self._clock()
        while len(self._noted) > self._limit:
            del self._noted[next(iter(self._noted))]

    def is_new(self, key: Hashable) -> bool:
        """Note a key unless it was noted recently; return whether it was not."""
        if key in self:
            return False
        self.note(key)
        return True

    def __contains__(self, key: Hashable) -> bool:
        at = self._noted.get(key)
        return at is not None and self._clock() - at < self._for_s
