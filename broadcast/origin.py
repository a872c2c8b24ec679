"""The origin: serves a store that the publisher writes, read-only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from broadcast import layout
from broadcast.server import DEFAULT_OPTIONS, Announcement, Metrics, ServerOptions, serve
from broadcast.store import latest_version
from runspec.common.errors import UserError
from runspec.common.files import read_bounded
from runspec.common.latest import MAX_BYTES

_WATCH_EVERY_S = 0.025


class StoreSource:
    """A store on disk. latest.json is watched by its inode while someone waits for a change."""

    def __init__(self, store: Path, metrics: Metrics, log: logging.Logger) -> None:
        self._store = store
        self._metrics = metrics
        self._log = log
        self._announced: dict[str, Announcement] = {}
        self._seen: dict[str, tuple[int, int]] = {}

    async def roles(self, run: str) -> Path | None:
        return self._existing(layout.roles_name(run))

    async def latest(self, run: str, after: int | None, wait_s: float) -> bytes | None:
        if run not in self._announced:
            if not (self._store / run).is_dir():
                return None
            self._announced[run] = Announcement()
        await self._look(run)
        return await self._announced[run].newer_than(after, wait_s)

    async def manifest(self, run: str, version: int) -> Path | None:
        return self._existing(layout.manifest_name(run, version))

    async def chunk(self, run: str, digest: str) -> Path | None:
        return self._existing(layout.chunk_name(run, digest))

    async def work(self) -> None:
        while True:
            for run, announced in list(self._announced.items()):
                if announced.waiting:
                    await self._look(run)
            await asyncio.sleep(_WATCH_EVERY_S)

    def _existing(self, name: str) -> Path | None:
        path = self._store / name
        return path if path.is_file() else None

    async def _look(self, run: str) -> None:
        """Reads latest.json where it is another file than the last time."""
        path = self._store / layout.latest_name(run)
        try:
            status = path.stat()
            seen = (status.st_ino, status.st_mtime_ns)
            if self._seen.get(run) == seen:
                return
            self._seen[run] = seen
            data = read_bounded(path, MAX_BYTES)
            version = latest_version(data, place=path)
        except FileNotFoundError:
            return
        except UserError as error:  # said once: it is looked at again when it is another file
            self._log.error("%s", error)
            return
        self._metrics.newest.labels(run).set(version)
        await self._announced[run].post(data, version)


async def run_origin(
    store: Path,
    *,
    host: str,
    port: int,
    log: logging.Logger,
    started: Callable[[int], None] = lambda port: None,
    options: ServerOptions = DEFAULT_OPTIONS,
) -> None:
    """Serves a store, of one run or many, until SIGTERM. The store may still be empty."""
    store.mkdir(parents=True, exist_ok=True)
    metrics = Metrics(store)
    source = StoreSource(store, metrics, log)
    await serve(source, metrics, host=host, port=port, log=log, started=started, options=options)
