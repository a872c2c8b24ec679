"""Transfers of chunks to a relay's disk: each chunk is fetched once for all readers and checked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from broadcast.disk import cancel_all
from broadcast.fetcher import PARALLEL_CHUNKS, Fetcher, chunk_timeout_s, for_each
from broadcast.manifest import Chunk
from broadcast.relay_store import RelayStore
from broadcast.served import Recent
from runspec.core.errors import UserError
from runspec.core.files import FULL

STALL_S = 5.0
"""Seconds without a byte after which a reader stops waiting for a chunk."""
MISSED_S = 3.0
"""Seconds before a chunk that no upstream had is requested again."""


@dataclass(eq=False)
class _Transfer:
    chunk: Chunk
    version: int
    """The newest version that needs it."""
    readers: int = 0
    """Readers that wait for it, besides the relay itself."""
    into: Path | None = None
    """The file that receives it."""

    def arrived(self) -> tuple[int, int] | None:
        """Return a value that changes with every received byte; None before the first."""
        try:
            status = self.into.stat() if self.into is not None else None
        except FileNotFoundError:
            return None
        return (status.st_size, status.st_mtime_ns) if status and status.st_size else None


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
        seen = None
        try:
            while not (await asyncio.wait({task}, timeout=STALL_S))[0]:
                now = transfer.arrived()
                if now == seen:
                    return False
                seen = now
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
                        transfer.into = into
                        await self._fetcher.chunk(chunk, what, deadline, into=into)
                    return
                except OSError as error:
                    if error.errno in FULL and self._relay_store.drop_one(version):
                        continue
                    raise UserError(
                        f"cannot store a chunk of version {version}: {error.strerror}",
                        place=str(self._relay_store.chunk_path(chunk.blake3)),
                        remedy="free disk space; the relay tries again and serves what it holds",
                    ) from error
