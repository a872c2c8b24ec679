"""Origin and relay: an origin is a relay without upstream.

An origin serves the runs of a store that the publisher writes. So the process that holds the
publisher's key serves no store, and the origin writes only the pins.

A relay mirrors one run and its data (the files of its problems, `layout.data_run`) from its
upstreams, and serves a chunk as soon as it has checked it.
Invariants:
- It serves only what this process has checked: roles.json, latest.json and manifests by
  signature, chunks by digest. Chunks on disk after a restart are checked when first needed.
- A version is announced once its manifest is here. Readers may begin before its chunks are here.
- The newest version is fetched first. A newer one ends transfers that only an older one needs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from broadcast import layout
from broadcast.admission import Metrics
from broadcast.answers import Recent, ServedRun
from broadcast.fetcher import NO_TOKEN, PARALLEL_CHUNKS, Fetcher, chunk_timeout_s, for_each
from broadcast.manifest import Chunk, WeightsManifest, distinct_chunks
from broadcast.relay_store import RelayStore, StoredVersions
from broadcast.server import DEFAULT_OPTIONS, ServerOptions, serve
from broadcast.transport import Access, Attempt, cancel_all
from runspec.core.errors import UserError
from runspec.core.files import FULL

STALL_S = 5.0
"""Seconds without a byte after which a reader stops waiting for a chunk."""
MISSED_S = 3.0
"""Seconds before a chunk that no upstream had is requested again."""
_LATEST_EVERY_S = 0.025
_POLL_S = 20.0
_PAUSE_S = 0.5
_MANIFEST_DEADLINE_S = 30.0
_ON_DEMAND_S = 5.0
_MAX_LOOKUPS = 16
_LOCK_DEADLINE_S = 2.0
"""Seconds to wait for another relay; one that ends releases its folder within a second."""


@dataclass(eq=False)
class _Transfer:
    chunk: Chunk
    version: int
    """The newest version that needs it."""
    readers: int = 0
    """Readers that wait for it, besides the relay itself."""
    attempts: list[Attempt] = field(default_factory=list)
    """Requests for it so far."""


class Transfers:
    """Fetches chunks of the manifests in a relay's store.

    The newest version and the chunks of older versions that readers want have a limit each, so that
    neither delays the other.

    Args:
        fetcher: sends requests to the upstreams.
        relay_store: stores the chunks.
        complain: called with the error of a transfer that failed.
    """

    def __init__(
        self, fetcher: Fetcher, relay_store: RelayStore, complain: Callable[[BaseException], None]
    ) -> None:
        self._fetcher, self._relay_store, self._complain = fetcher, relay_store, complain
        self._running: dict[str, tuple[_Transfer, asyncio.Task[None]]] = {}
        self._newest_lane = asyncio.Semaphore(PARALLEL_CHUNKS)
        self._older_lane = asyncio.Semaphore(PARALLEL_CHUNKS)
        self._missed = Recent(MISSED_S)

    async def arrives(self, digest: str) -> bool:
        """Wait for a known chunk as long as bytes of it arrive; return whether it is here.

        Without that limit, relays that are upstream of each other would wait for each other.
        """
        if digest not in self._running and digest in self._missed:
            return False
        transfer, task = self._start(digest)
        transfer.readers += 1
        before = 0
        try:
            while not (await asyncio.wait({task}, timeout=STALL_S))[0]:
                received = sum(attempt.received for attempt in transfer.attempts)
                if received == before:
                    return False
                before = received
        finally:
            transfer.readers -= 1
        return not task.cancelled() and task.exception() is None

    async def bring(self, chunks: Iterable[Chunk]) -> None:
        """Fetch chunks in their order, some at a time; verify those that are stored already.

        Raises:
            UserError: one cannot be fetched or stored, or its version was dropped.
        """
        await for_each(chunks, self._bring_one, parallel=PARALLEL_CHUNKS)

    def cancel_all_but(self, wanted: Collection[str]) -> None:
        """End the transfers of other chunks, except those that a reader waits for."""
        for digest, (transfer, task) in self._running.items():
            if digest not in wanted and not transfer.readers:
                task.cancel()

    async def close(self) -> None:
        await cancel_all(task for _, task in self._running.values())

    async def _bring_one(self, chunk: Chunk) -> None:
        if self._relay_store.chunk_path(chunk.blake3) in self._relay_store.proven:
            return
        if chunk.blake3 not in self._relay_store.known:
            raise UserError("its version was dropped")
        task = self._start(chunk.blake3, queue=False)[1]
        await asyncio.wait({task})  # unlike `await task`, a cancellation here does not cancel it
        if task.cancelled():
            raise UserError("its transfer was ended")
        task.result()

    def _start(self, digest: str, *, queue: bool = True) -> tuple[_Transfer, asyncio.Task[None]]:
        """Return the one transfer of a chunk; without `queue` the caller limits their number."""
        if digest not in self._running:
            transfer = _Transfer(*self._relay_store.known[digest])
            newest = transfer.version == max(self._relay_store.manifests)
            lane = self._newest_lane if newest else self._older_lane
            task = asyncio.create_task(self._run(transfer, lane if queue else nullcontext()))
            self._running[digest] = (transfer, task)
            task.add_done_callback(lambda done: self._ended(digest, done))
        return self._running[digest]

    def _ended(self, digest: str, task: asyncio.Task[None]) -> None:
        del self._running[digest]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._missed.note(digest)
            self._complain(error)

    async def _run(self, transfer: _Transfer, lane: AbstractAsyncContextManager) -> None:
        chunk, version = transfer.chunk, transfer.version
        async with lane:
            if await self._relay_store.has(chunk.blake3):
                return
            what = f"chunk of version {version}"
            deadline = time.monotonic() + chunk_timeout_s(chunk.size)
            while True:
                try:
                    with self._relay_store.new_chunk(chunk, version) as into:
                        attempts = transfer.attempts
                        await self._fetcher.chunk(
                            chunk, what, deadline, into=into, attempts=attempts
                        )
                    return
                except OSError as error:
                    if error.errno in FULL and self._relay_store.drop_one(version):
                        continue
                    raise UserError(
                        f"cannot store a chunk of version {version}: {error.strerror}",
                        place=str(self._relay_store.chunk_path(chunk.blake3)),
                        remedy="free disk space; the relay tries again and serves what it holds",
                    ) from error


class Mirror(ServedRun):
    """A run that a relay fetches from its upstreams."""

    def __init__(self, fetcher: Fetcher, metrics: Metrics, relay_store: RelayStore) -> None:
        super().__init__(relay_store, metrics)
        self._fetcher, self._relay_store = fetcher, relay_store
        self._transfers = Transfers(fetcher, relay_store, complain=self._complain)
        self._believed: frozenset[str] | None = None
        """Publishers' keys by which the store was last checked; None: not checked yet."""
        self._lookups: dict[int, asyncio.Task[bool]] = {}
        self._missed = Recent(MISSED_S)
        """Versions that no upstream had."""
        self._filling: tuple[int, asyncio.Task[bool]] | None = None
        """The version being fetched, and the task that fetches it."""
        self._whole = -1
        """The newest version that was fetched completely."""

    async def recall(self) -> None:
        """Load what is on disk, so that a restarted relay serves without its upstreams."""
        self._heed_roles()
        await self._announce()

    async def roles(self) -> Path | None:
        return None if self._fetcher.roles is None else await super().roles()

    async def look(self) -> None:
        """Do nothing: `work` follows the upstreams' latest.json."""

    async def _has_manifest(self, version: int) -> bool:
        if version > self._fetcher.seen_version:
            return False
        return version in self._relay_store.manifests or await self._look_up(version)

    async def _has_chunk(self, digest: str) -> bool:
        if digest not in self._relay_store.known:
            return False
        path = self._relay_store.chunk_path(digest)
        return path in self._relay_store.proven or await self._transfers.arrives(digest)

    async def work(self) -> None:
        """Follow the upstreams' latest.json; a newer version replaces an unfinished one."""
        while True:
            try:
                self._heed_roles()
                self._relay_store.trim()
                latest = await self._fetcher.latest(self.announced.version, _POLL_S)
                if latest is not None:
                    deadline = time.monotonic() + _MANIFEST_DEADLINE_S
                    await self._take(latest.version, latest.manifest_digest, deadline)
                await self._announce()  # it may be the same version, signed again
                self._start_filling(self.announced.version)
            except (UserError, OSError) as error:
                self._complain(error)
                await asyncio.sleep(_PAUSE_S)

    async def close(self) -> None:
        """Cancel everything under way."""
        filling = () if self._filling is None else (self._filling[1],)
        await cancel_all((*self._lookups.values(), *filling))
        await self._transfers.close()
        await self._fetcher.close()

    def _heed_roles(self) -> None:
        """Load or drop stored versions when roles.json changes the keys that may sign them."""
        roles = self._fetcher.roles
        if roles is None or roles.publisher == self._believed:
            return
        self._relay_store.believe(roles.publisher)
        self._believed = roles.publisher
        if self._filling is not None and self._filling[0] not in self._relay_store.manifests:
            self._filling[1].cancel()
            self._filling = None
        if self.announced.version not in self._relay_store.manifests:
            self.announced.data, self.announced.version = None, -1

    async def _announce(self) -> None:
        version, data = self._fetcher.seen_version, self._fetcher.latest_bytes
        if data is not None and version in self._relay_store.manifests:
            if version > self.announced.version:
                self._metrics.announced(self._run, version)
                self._metrics.behind_since(self._run, time.time())
            await self.announced.post(data, version)

    async def _take(
        self, version: int, digest: str | None, deadline: float, *, keep_asking: bool = True
    ) -> None:
        self._heed_roles()
        if version in self._relay_store.manifests:
            return
        manifest, data = await self._fetcher.manifest(
            version, digest, deadline, keep_asking=keep_asking
        )
        self._heed_roles()
        if version not in self._relay_store.manifests:
            self._relay_store.adopt(manifest, data)

    async def _look_up(self, version: int) -> bool:
        """Request an older version from the upstreams, once for all clients that ask."""
        if version in self._missed:
            return False
        if version not in self._lookups:
            if len(self._lookups) >= _MAX_LOOKUPS:
                return False
            task = asyncio.create_task(self._take_older(version))
            self._lookups[version] = task
            task.add_done_callback(lambda done: self._lookups.pop(version))
        return await asyncio.shield(self._lookups[version])

    async def _take_older(self, version: int) -> bool:
        try:
            await self._take(version, None, time.monotonic() + _ON_DEMAND_S, keep_asking=False)
            self._relay_store.pins.touch(version)  # else `prune` would drop it at once
            self._relay_store.prune(self._whole)
        except (UserError, OSError) as error:
            self._log.info("version %d was asked for: %s", version, error)
            self._missed.note(version)
            return False
        return version in self._relay_store.manifests

    def _start_filling(self, version: int) -> None:
        """Start to fetch the newest version unless that is under way or done."""
        manifest = self._relay_store.manifests.get(version)
        if manifest is None:
            return
        if self._filling is not None:
            filling, task = self._filling
            if filling == version and (not task.done() or task.result()):
                return
            task.cancel()
            self._transfers.cancel_all_but(manifest.chunks())
        self._filling = (version, asyncio.create_task(self._fill(manifest)))

    async def _fill(self, manifest: WeightsManifest) -> bool:
        """Fetch a version, drop the oldest, then fetch what else a joiner needs.

        Returns:
            Whether all of it is here. If not, it is tried again after the next poll, and chunks
            are fetched on request.
        """
        version, started = manifest.version, time.monotonic()
        try:
            # First the delta, and the files that hold no tensors.
            small = [info for name, info in manifest.objects.items() if name not in manifest.files]
            chunks = list(distinct_chunks([*manifest.delta.values(), *small]).values())
            self._relay_store.check_fits(version, chunks)
            await self._transfers.bring(chunks)
            chunks = list(manifest.chunks().values())
            self._relay_store.check_fits(version, chunks)
            await self._transfers.bring(chunks)
            self._whole = version
            self._metrics.behind_since(self._run, None)
            self._relay_store.prune(version)
            self._log.info("version %d: whole, %.2f s", version, time.monotonic() - started)
            needed = chunks
            async for older in self._chain(manifest):
                chunks = to_rebuild(older)
                needed += chunks
                self._relay_store.check_fits(version, needed)
                await self._transfers.bring(chunks)
        except (UserError, OSError) as error:
            self._complain(error)
            return False
        return True

    async def _chain(self, manifest: WeightsManifest) -> AsyncIterator[WeightsManifest]:
        """Yield what a version is rebuilt from: its base, that one's base, up to an anchor."""
        while (base := manifest.rebuilt_from) is not None:
            deadline = time.monotonic() + _MANIFEST_DEADLINE_S
            await self._take(base, None, deadline, keep_asking=False)
            manifest = self._relay_store.manifests[base]
            yield manifest

    def _complain(self, error: BaseException) -> None:
        """Log an error unless it was logged recently."""
        expected = self._run == layout.roles_run(self._run)  # a run may have no data
        if (expected or self._fetcher.seen_version >= 0) and self._logged.is_new(str(error)):
            self._log.warning("%s", error)


def to_rebuild(manifest: WeightsManifest) -> list[Chunk]:
    """Return the chunks of an older version from which newer ones are rebuilt."""
    parts = manifest.objects if manifest.is_anchor else manifest.delta
    return list(distinct_chunks(parts.values()).values())


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
    runs: dict[str, ServedRun] = {}
    asked = asyncio.Event()

    def find(name: str) -> ServedRun | None:
        asked.set()
        if name not in runs and (store / name).is_dir():
            runs[name] = ServedRun(StoredVersions(store, name, log), metrics)
        return runs.get(name)

    async def work() -> None:
        while True:
            waited_for = [run for run in runs.values() if run.announced.waiting]
            if not waited_for:
                asked.clear()
                await asked.wait()
            for run in waited_for:
                await run.look()
            await asyncio.sleep(_LATEST_EVERY_S)

    await serve(find, work, metrics, log, options, started)


async def run_relay(
    store: Path,
    *,
    run: str,
    upstreams: Sequence[str],
    root_public_key: str,
    keep_versions: int,
    log: logging.Logger,
    started: Callable[[int], None] = lambda port: None,
    max_bytes: int | None = None,
    access: Access = NO_TOKEN,
    options: ServerOptions = DEFAULT_OPTIONS,
) -> None:
    """Mirror and serve a run and its data until SIGTERM. The upstreams may start later.

    Args:
        store: holds the newest versions, also over restarts.
        run: the run's id.
        upstreams: base URLs of origins or relays; several for failover.
        root_public_key: pinned.
        keep_versions: number of newest versions to hold, at least 1, besides their bases.
        log: of this process.
        started: called with the port once connections are accepted.
        max_bytes: limit on manifests and chunks on disk, the data's first; None: no limit.
        access: token and certificates for the upstreams.
        options: address, tokens, TLS and limits of the server.

    Raises:
        UserError: `run` is malformed, or another relay uses the folder.
    """
    if not layout.is_run(run):
        raise UserError(f"{run!r} is not the name of a run")
    new_fetcher = partial(Fetcher, upstreams, root_public_key=root_public_key, access=access)
    new_store = partial(RelayStore, store, max_bytes=max_bytes, log=log)
    async with AsyncExitStack() as up:
        up.enter_context(layout.locked(store, run, _LOCK_DEADLINE_S))
        metrics = Metrics(store)
        data = new_store(layout.data_run(run), keep_versions=1)
        versions = new_store(run, keep_versions=keep_versions, beside=data)
        metrics.report_versions(run, versions.shares)
        mirrors: dict[str, Mirror] = {}
        for held in (data, versions):
            fetcher = new_fetcher(run=held.run, folder=store / held.run)
            mirrors[held.run] = mirror = Mirror(fetcher, metrics, held)
            up.push_async_callback(mirror.close)
            await mirror.recall()

        async def work() -> None:
            await for_each(mirrors.values(), Mirror.work, parallel=len(mirrors))

        await serve(mirrors.get, work, metrics, log, options, started)
