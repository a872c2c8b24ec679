"""The origin: serves a store that the publisher writes, read-only but for the pins."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from broadcast import layout
from broadcast.announcement import Announcement
from broadcast.chunk_files import ProvenChunks
from broadcast.disk import Identity, identity
from broadcast.manifest import WeightsManifest
from broadcast.metrics import Metrics
from broadcast.pins import Pins
from broadcast.recent import Recent
from broadcast.server import DEFAULT_OPTIONS, ServerOptions, serve
from broadcast.store import latest_version
from broadcast.stored_manifests import StoredManifests
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.latest import MAX_BYTES

_WATCH_EVERY_S = 0.025
_SAY_AGAIN_S = 60.0


class _StoredRun:
    """A run of a store: what of it is announced, held and read."""

    def __init__(self, store: Path, run: str, log: logging.Logger) -> None:
        self.announced = Announcement()
        self.manifests = StoredManifests(store, run, log)
        self.pins = Pins(store, run)
        self.seen: Identity | None = None
        """The latest.json that was read last."""


class StoreSource:
    """A store on disk (an `app.Source`). latest.json is watched by its inode while someone waits
    for a change; who asks for a version's manifest or chunks pins it. A chunk is hashed before it
    is first served: a power cut may have left it short or zeroed."""

    def __init__(self, store: Path, metrics: Metrics, log: logging.Logger) -> None:
        self._store = store
        self._metrics = metrics
        self._log = log
        self._runs: dict[str, _StoredRun] = {}
        self._proven = ProvenChunks()
        self._said = Recent(_SAY_AGAIN_S)
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
        if path not in self._said:
            self._said.note(path)
            self._log.error("%s: damaged, not served; publish the version again to mend it", path)
        return None

    async def manifests(self, run: str) -> Mapping[int, WeightsManifest]:
        stored = self._run(run)
        return {} if stored is None else await stored.manifests.current()

    async def work(self) -> None:
        """Looks for news while somebody waits for them."""
        while True:
            waited_for = [
                (r, stored) for r, stored in self._runs.items() if stored.announced.waiting
            ]
            if not waited_for:
                self._asked.clear()
                await self._asked.wait()
            for run, stored in waited_for:
                await self._look(run, stored)
            await asyncio.sleep(_WATCH_EVERY_S)

    def _run(self, run: str) -> _StoredRun | None:
        """What is known of a run; None where the store has none of this name."""
        if run not in self._runs and (self._store / run).is_dir():
            self._runs[run] = _StoredRun(self._store, run, self._log)
        return self._runs.get(run)

    def _existing(self, name: str) -> Path | None:
        path = self._store / name
        return path if path.is_file() else None

    async def _look(self, run: str, stored: _StoredRun) -> None:
        """Reads latest.json where it is another file than the last time."""
        path = self._store / layout.latest_name(run)
        try:
            seen = identity(path)
            if seen is None or stored.seen == seen:
                return
            data = read_bounded(path, MAX_BYTES)
            stored.seen = seen
            version = latest_version(data, place=path)
        except OSError as error:  # too many open files, say: the next look may be luckier
            if path not in self._said:
                self._said.note(path)
                self._log.error("%s: cannot be read: %s", path, error)
            return
        except UserError as error:  # said once: it is looked at again when it is another file
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
    """Serves a store, of one run or many, until SIGTERM. The store may still be empty.

    Args:
        store: the store's directory.
        log: of this process.
        started: called with the port once connections are accepted.
        options: where to listen, who may read what, how fast, and over what.

    Raises:
        UserError: the address is taken; options that cannot be.
    """
    store.mkdir(parents=True, exist_ok=True)
    metrics = Metrics(store)
    source = StoreSource(store, metrics, log)
    await serve(source, metrics, log, options, started)
