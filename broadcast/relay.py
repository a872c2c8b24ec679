"""The relay: mirrors one run from its upstreams and serves a chunk as soon as it has checked it.

Invariants:
- Nothing is served that was not checked in this process: roles.json, latest.json and manifests by
  signature, chunks by digest (those found on disk after a restart when they are first asked for).
- A version is announced once its manifest is here; its chunks follow while others already read.
- A chunk is fetched once, however many ask for it; who asks early waits, up to a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from aiohttp import web

from broadcast import layout
from broadcast.announcement import Announcement
from broadcast.fetcher import PARALLEL_CHUNKS, Fetcher, chunk_timeout_s, for_each
from broadcast.manifest import MAX_BYTES, Chunk, WeightsManifest, open_manifest
from broadcast.metrics import Metrics
from broadcast.server import DEFAULT_OPTIONS, ServerOptions, serve
from broadcast.store import prune
from runspec.common.errors import UserError
from runspec.common.files import read_bounded, remove_leftovers, temporary_name, write_atomic
from runspec.common.hashing import digest_file
from runspec.common.signed import BadSignature

_POLL_S = 20.0
_PAUSE_S = 0.5
_MANIFEST_DEADLINE_S = 30.0
_ON_DEMAND_S = 5.0
_PARALLEL_LOOKUPS = 4


class Mirror:
    """A run as the relay knows it (a `server.Source`)."""

    def __init__(
        self,
        fetcher: Fetcher,
        metrics: Metrics,
        *,
        run: str,
        store: Path,
        keep_versions: int,
        log: logging.Logger,
    ) -> None:
        self._fetcher = fetcher
        self._metrics = metrics
        self._run = run
        self._store = store
        self._keep_versions = keep_versions
        self._log = log
        self._announced = Announcement()
        self._manifests: dict[int, WeightsManifest] = {}
        self._known: dict[str, Chunk] = {}
        """Chunks of those manifests."""
        self._checked: set[str] = set()
        """Chunks on disk whose hash this process has seen to be right."""
        self._obtaining: dict[str, asyncio.Task[None]] = {}
        self._lookups = asyncio.Semaphore(_PARALLEL_LOOKUPS)
        self._filling: tuple[int, asyncio.Task[None]] | None = None
        """The version being brought here, and the task that does it."""

    async def recall(self) -> None:
        """Takes up what is on disk, so that a restarted relay serves with its upstreams away."""
        remove_leftovers(self._store / self._run)
        remove_leftovers(self._store / self._run / "chunks")
        roles = self._fetcher.roles
        if roles is None:
            return
        for version in layout.stored_versions(self._store, self._run):
            path = self._store / layout.manifest_name(self._run, version)
            try:
                data = read_bounded(path, MAX_BYTES)
                self._adopt(open_manifest(data, run=self._run, publishers=roles.publisher))
            except BadSignature as error:
                self._log.warning("%s: removed: %s", path, error)
                path.unlink()
        await self._announce()

    async def roles(self, run: str) -> Path | None:
        if run != self._run or self._fetcher.roles is None:
            return None
        return self._store / layout.roles_name(run)

    async def latest(self, run: str, after: int | None, wait_s: float) -> bytes | None:
        if run != self._run:
            return None
        return await self._announced.newer_than(after, wait_s)

    async def manifest(self, run: str, version: int) -> Path | None:
        if run != self._run or version > self._fetcher.seen_version:
            return None
        if version not in self._manifests:
            async with self._lookups:
                if version not in self._manifests and not await self._look_up(version):
                    return None
        return self._store / layout.manifest_name(run, version)

    async def chunk(self, run: str, digest: str) -> Path | None:
        if run != self._run or digest not in self._known:
            return None
        path = self._store / layout.chunk_name(run, digest)
        if digest not in self._checked or not path.exists():
            limit_s = chunk_timeout_s(self._known[digest].size)
            try:
                async with asyncio.timeout(limit_s):
                    await asyncio.shield(self._obtain(digest))
            except TimeoutError:
                raise web.HTTPGatewayTimeout(text=f"not here within {limit_s:.0f} s\n") from None
            except UserError as error:
                self._log.error("%s", error)
                raise web.HTTPBadGateway(text="cannot be had\n") from error
        return path

    async def manifests(self, run: str) -> Mapping[int, WeightsManifest]:
        return self._manifests if run == self._run else {}

    async def work(self) -> None:
        """Follows the upstreams' latest.json; a newer version takes over from an unfinished one."""
        while True:
            try:
                latest = await self._fetcher.latest(self._announced.version, _POLL_S)
                if latest is not None:
                    deadline = time.monotonic() + _MANIFEST_DEADLINE_S
                    await self._take(latest.version, latest.manifest_digest, deadline)
                await self._announce()  # perhaps the same version under a fresh signature
                self._start_filling(self._announced.version)
            except UserError as error:
                self._log.warning("%s", error)
                await asyncio.sleep(_PAUSE_S)

    async def close(self) -> None:
        """Ends the transfers that are under way."""
        tasks = [*self._obtaining.values(), *([self._filling[1]] if self._filling else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _announce(self) -> None:
        version, data = self._fetcher.seen_version, self._fetcher.latest_bytes
        if data is not None and version in self._manifests:
            self._metrics.announced(self._run, version)
            await self._announced.post(data, version)

    async def _take(
        self, version: int, digest: str | None, deadline: float, *, patient: bool = True
    ) -> None:
        if version in self._manifests:
            return
        manifest, data = await self._fetcher.manifest(version, digest, deadline, patient=patient)
        write_atomic(self._store / layout.manifest_name(self._run, version), data)
        self._adopt(manifest)

    def _adopt(self, manifest: WeightsManifest) -> None:
        self._manifests[manifest.version] = manifest
        self._known |= manifest.chunks()

    async def _look_up(self, version: int) -> bool:
        """Asks the upstreams for a version that is older than what this relay has."""
        try:
            await self._take(version, None, time.monotonic() + _ON_DEMAND_S, patient=False)
        except UserError as error:
            self._log.info("version %d was asked for: %s", version, error)
            return False
        return True

    def _obtain(self, digest: str) -> asyncio.Task[None]:
        """The one task that brings a chunk here."""
        if digest not in self._obtaining:
            task = asyncio.create_task(self._bring(self._known[digest]))
            self._obtaining[digest] = task
            task.add_done_callback(lambda done: self._brought(digest, done))
        return self._obtaining[digest]

    def _brought(self, digest: str, task: asyncio.Task[None]) -> None:
        del self._obtaining[digest]
        if not task.cancelled():
            task.exception()  # whoever awaited it has it; nobody may have

    async def _bring(self, chunk: Chunk) -> None:
        path = self._store / layout.chunk_name(self._run, chunk.blake3)
        if path.exists():
            if await asyncio.to_thread(digest_file, path) == chunk.blake3:
                self._checked.add(chunk.blake3)
                return
            self._log.warning("%s: damaged on disk, fetching it again", path)
            path.unlink()
        deadline = time.monotonic() + chunk_timeout_s(chunk.size)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(path)
        temporary.touch()
        try:
            await self._fetcher.chunk(chunk, "chunk", deadline, into=temporary)
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        self._checked.add(chunk.blake3)

    def _start_filling(self, version: int) -> None:
        """Brings the newest version here unless that is under way or done."""
        manifest = self._manifests.get(version)
        if manifest is None or manifest.chunks().keys() <= self._checked:
            return
        if self._filling is not None and not self._filling[1].done():
            if self._filling[0] == version:
                return
            self._filling[1].cancel()
        self._filling = (version, asyncio.create_task(self._fill(manifest)))

    async def _fill(self, manifest: WeightsManifest) -> None:
        """Brings a version's chunks here, then drops the oldest versions."""
        started = time.monotonic()
        missing = [digest for digest in manifest.chunks() if digest not in self._checked]
        try:
            await for_each(
                missing,
                lambda digest: asyncio.shield(self._obtain(digest)),
                parallel=PARALLEL_CHUNKS,
            )
            await asyncio.to_thread(
                prune, self._store, run=self._run, keep_versions=self._keep_versions
            )
        except UserError as error:  # tried again after the next poll, and by whoever asks for it
            self._log.warning("version %d is not whole here yet: %s", manifest.version, error)
            return
        elapsed_s = time.monotonic() - started
        self._log.info(
            "version %d: %d new chunks, %.2f s", manifest.version, len(missing), elapsed_s
        )
        kept = set(layout.stored_versions(self._store, self._run))
        self._manifests = {v: m for v, m in self._manifests.items() if v in kept}
        self._known = {d: c for m in self._manifests.values() for d, c in m.chunks().items()}
        self._checked &= self._known.keys()


async def run_relay(
    store: Path,
    *,
    run: str,
    upstreams: Sequence[str],
    root_public_key: str,
    keep_versions: int,
    host: str,
    port: int,
    log: logging.Logger,
    started: Callable[[int], None] = lambda port: None,
    options: ServerOptions = DEFAULT_OPTIONS,
) -> None:
    """Mirrors and serves a run until SIGTERM.

    Args:
        store: keeps the newest versions; a restart takes them up.
        run: the run's id.
        upstreams: base URLs of origins or relays; several for failover.
        root_public_key: pinned.
        keep_versions: how many of the newest versions, and what those are based on, stay here.
        host, port: to listen on.
        log: of this process.
        started: called with the port once connections are accepted.
        options: who may read what, how fast, and over what.

    Raises:
        UserError: `run` names none, or nothing would be kept.
    """
    if not layout.is_run(run):
        raise UserError(f"{run!r} is not the name of a run")
    if keep_versions < 1:
        raise UserError(f"--keep-versions {keep_versions}: at least 1 is needed")
    (store / run).mkdir(parents=True, exist_ok=True)
    metrics = Metrics(store)
    fetcher = Fetcher(upstreams, run=run, root_public_key=root_public_key, folder=store / run)
    mirror = Mirror(fetcher, metrics, run=run, store=store, keep_versions=keep_versions, log=log)
    try:
        await mirror.recall()
        await serve(
            mirror,
            metrics,
            host=host,
            port=port,
            log=log,
            started=started,
            options=options,
        )
    finally:
        await mirror.close()
        await fetcher.close()
