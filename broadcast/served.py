"""What a server answers of a run, and the state for it: an origin's, on which a relay builds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path

from broadcast import layout
from broadcast.disk import Identity, identity
from broadcast.metrics import Metrics
from broadcast.relay_store import StoredVersions
from broadcast.store import latest_version
from runspec.core import latest as latest_format
from runspec.core.errors import UserError
from runspec.core.files import read_bounded

_LOG_AGAIN_S = 60.0


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


class ServedRun:
    """One run of a store, as a server answers for it.

    None means that the thing does not exist (404). A request for a version's manifest or chunks
    pins the version. While a request waits for a newer version, the inode of latest.json is polled.
    A chunk is hashed before it is first served, because a power cut may have left it short or
    zeroed.

    Args:
        held: versions in the store.
        metrics: of the server.
    """

    def __init__(self, held: StoredVersions, metrics: Metrics) -> None:
        self.held, self._metrics, self._log = held, metrics, held.log
        self._run = held.run
        self.announced = Announcement()
        self._logged = Recent(_LOG_AGAIN_S)
        self._seen: Identity | None = None
        """Identity of the latest.json that was read last."""

    async def roles(self) -> Path | None:
        return self.held.store / layout.roles_name(self._run)

    async def latest(self, after: int | None, wait_s: float) -> bytes | None:
        """Return latest.json. Wait up to `wait_s` seconds for one newer than `after`."""
        await self.look()
        return await self.announced.newer_than(after, wait_s)

    async def manifest(self, version: int) -> Path | None:
        if not await self._has_manifest(version):
            return None
        self.held.pins.touch(version)
        return self.held.manifest_path(version)

    async def chunk(self, digest: str) -> Path | None:
        await self.held.note_reader(digest)
        return self.held.chunk_path(digest) if await self._has_chunk(digest) else None

    async def look(self) -> None:
        """Read latest.json if it is another file than the last time."""
        path = self.held.store / layout.latest_name(self._run)
        try:
            seen = identity(path)
            if seen is None or self._seen == seen:
                return
            data = read_bounded(path, latest_format.MAX_BYTES)
            self._seen = seen
            version = latest_version(data, place=path)
        except OSError as error:  # for example too many open files; the next read may succeed
            if self._logged.is_new(path):
                self._log.error("%s: cannot be read: %s", path, error)
            return
        except UserError as error:  # logged once: the same file is not read again
            self._seen = seen
            self._log.error("%s", error)
            return
        self._metrics.announced(self._run, version)
        await self.announced.post(data, version)

    async def _has_manifest(self, version: int) -> bool:
        return self.held.manifest_path(version).is_file()

    async def _has_chunk(self, digest: str) -> bool:
        path = self.held.chunk_path(digest)
        proven = await self.held.proven.prove(path)
        if not proven and path.is_file() and self._logged.is_new(path):
            self._log.error("%s: damaged, not served; publish the version again to mend it", path)
        return proven
