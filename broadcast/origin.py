"""The origin: serves a store that the publisher writes. The origin itself writes only the pins."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from broadcast import layout
from broadcast.chunk_files import ProvenChunks
from broadcast.disk import Identity, identity
from broadcast.manifest import MAX_BYTES, WeightsManifest, open_manifest
from broadcast.metrics import Metrics
from broadcast.pins import Pins, owners
from broadcast.server import DEFAULT_OPTIONS, ServerOptions, serve
from broadcast.source import Announcement, Recent
from broadcast.store import latest_version
from runspec.core import latest as latest_format
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.signed import BadSignature

MANIFESTS_EVERY_S = 1.0
"""Shortest time between two readings of the manifests folder, in seconds."""
_LATEST_EVERY_S = 0.025
_LOG_AGAIN_S = 60.0


class StoredManifests:
    """The manifests of a run in a store on disk; each is parsed once while its file is the same.

    Args:
        store: the store's directory.
        run: the run's id.
        log: receives an error for each damaged file, once.
    """

    def __init__(self, store: Path, run: str, log: logging.Logger) -> None:
        self._store = store
        self._run = run
        self._log = log
        self._looked_at = -math.inf
        self._looking = asyncio.Lock()
        self._parsed: dict[int, tuple[Identity, WeightsManifest | None]] = {}
        self._owners: dict[str, int] = {}

    async def current(self) -> Mapping[int, WeightsManifest]:
        """Return the manifests by version, as they were at most `MANIFESTS_EVERY_S` ago."""
        async with self._looking:
            if time.monotonic() - self._looked_at >= MANIFESTS_EVERY_S:
                await asyncio.to_thread(self._look)
                self._looked_at = time.monotonic()
        return {v: manifest for v, (_, manifest) in self._parsed.items() if manifest is not None}

    async def owner(self, digest: str) -> int | None:
        """Return the one version that a chunk belongs to; None if there is none or several."""
        if digest not in self._owners:
            await self.current()
        return self._owners.get(digest)

    def _look(self) -> None:
        parsed = {}
        for version in layout.stored_versions(self._store, self._run):
            path = self._store / layout.manifest_name(self._run, version)
            found, known = identity(path), self._parsed.get(version)
            if found is None:  # pruned since
                continue
            if known and known[0] == found:
                parsed[version] = known
                continue
            with suppress(FileNotFoundError):
                parsed[version] = found, self._parse(path)
        if parsed != self._parsed:
            self._parsed = parsed
            self._owners = owners(m for _, m in parsed.values() if m is not None)

    def _parse(self, path: Path) -> WeightsManifest | None:
        try:
            return open_manifest(read_bounded(path, MAX_BYTES), run=self._run, publishers=None)
        except (BadSignature, UserError) as error:
            self._log.error("%s: damaged: %s", path, error)
            return None


class _StoredRun:
    """State of one run of a store: the announced version, the manifests, the pins."""

    def __init__(self, store: Path, run: str, log: logging.Logger) -> None:
        self.announced = Announcement()
        self.manifests = StoredManifests(store, run, log)
        self.pins = Pins(store, run)
        self.seen: Identity | None = None
        """Identity of the latest.json that was read last."""


class StoreSource:
    """A store on disk as a `source.Source`.

    While a request waits for a newer version, the inode of latest.json is polled. A request for a
    version's manifest or chunks pins the version. A chunk is hashed before it is first served,
    because a power cut may have left it short or zeroed.
    """

    def __init__(self, store: Path, metrics: Metrics, log: logging.Logger) -> None:
        self._store = store
        self._metrics = metrics
        self._log = log
        self._runs: dict[str, _StoredRun] = {}
        self._proven = ProvenChunks()
        self._logged = Recent(_LOG_AGAIN_S)
        self._asked = asyncio.Event()

    async def roles(self, run: str) -> Path | None:
        return self._existing(layout.roles_name(run))

    async def latest(self, run: str, after: int | None, wait_s: float) -> bytes | None:
        stored = self._run(run)
        if stored is None:
            return None
        await self._look(run, stored)
        self._asked.set()
        return await stored.announced.newer_than(after, wait_s)

    async def manifest(self, run: str, version: int) -> Path | None:
        path = self._existing(layout.manifest_name(run, version))
        stored = self._run(run)
        if path is not None and stored is not None:
            stored.pins.touch(version)
        return path

    async def chunk(self, run: str, digest: str) -> Path | None:
        path = self._existing(layout.chunk_name(run, digest))
        stored = self._run(run)
        if path is None or stored is None:
            return None
        version = await stored.manifests.owner(digest)
        if version is not None:
            stored.pins.touch(version)
        if await self._proven.prove(path):
            return path
        if self._logged.is_new(path):
            self._log.error("%s: damaged, not served; publish the version again to mend it", path)
        return None

    async def manifests(self, run: str) -> Mapping[int, WeightsManifest]:
        stored = self._run(run)
        return {} if stored is None else await stored.manifests.current()

    async def work(self) -> None:
        """Poll latest.json while a request waits for a newer version."""
        while True:
            waited_for = {run: s for run, s in self._runs.items() if s.announced.waiting}
            if not waited_for:
                self._asked.clear()
                await self._asked.wait()
            for run, stored in waited_for.items():
                await self._look(run, stored)
            await asyncio.sleep(_LATEST_EVERY_S)

    def _run(self, run: str) -> _StoredRun | None:
        """Return the state of a run; None if the store has no run of this name."""
        if run not in self._runs and (self._store / run).is_dir():
            self._runs[run] = _StoredRun(self._store, run, self._log)
        return self._runs.get(run)

    def _existing(self, name: str) -> Path | None:
        path = self._store / name
        return path if path.is_file() else None

    async def _look(self, run: str, stored: _StoredRun) -> None:
        """Read latest.json if it is another file than the last time."""
        path = self._store / layout.latest_name(run)
        try:
            seen = identity(path)
            if seen is None or stored.seen == seen:
                return
            data = read_bounded(path, latest_format.MAX_BYTES)
            stored.seen = seen
            version = latest_version(data, place=path)
        except OSError as error:  # for example too many open files; the next read may succeed
            if self._logged.is_new(path):
                self._log.error("%s: cannot be read: %s", path, error)
            return
        except UserError as error:  # logged once: the same file is not read again
            stored.seen = seen
            self._log.error("%s", error)
            return
        self._metrics.announced(run, version)
        await stored.announced.post(data, version)


async def run_origin(
    store: Path,
    *,
    log: logging.Logger,
    started: Callable[[int], None] = lambda port: None,
    options: ServerOptions = DEFAULT_OPTIONS,
) -> None:
    """Serve a store of one or more runs until SIGTERM. The store may still be empty.

    Args:
        store: the store's directory.
        log: of this process.
        started: called with the port once connections are accepted.
        options: address, tokens, TLS and limits of the server.

    Raises:
        UserError: the address is taken, or an option is invalid.
    """
    store.mkdir(parents=True, exist_ok=True)
    metrics = Metrics(store)
    source = StoreSource(store, metrics, log)
    await serve(source, metrics, log, options, started)
