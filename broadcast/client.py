"""The client: fetches versions, believes nothing, waits for nothing without a deadline."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from broadcast.download import PARTIAL, download
from broadcast.fetcher import Fetcher
from broadcast.manifest import FILE_NAME, MAX_BYTES
from runspec.common.files import read_bounded
from runspec.common.hashing import digest_bytes
from runspec.common.latest import Latest

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


class AsyncWeightsClient:
    """The client for use inside an event loop; `WeightsClient` explains the methods."""

    def __init__(
        self, urls: Sequence[str], *, run: str, root_public_key: str, cache_dir: Path
    ) -> None:
        cache_dir.mkdir(parents=True, exist_ok=True)
        self._cache = cache_dir
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One download of a version at a time: its parts lie in one directory."""
        self._fetcher = Fetcher(urls, run=run, root_public_key=root_public_key, folder=cache_dir)

    async def latest(self, after: int | None, wait_s: float) -> Latest | None:
        return await self._fetcher.latest(after, wait_s)

    async def fetch(self, version: int, *, manifest_digest: str | None, deadline_s: float) -> Path:
        async with self._turns[version]:
            return await self._fetch(version, manifest_digest, deadline_s)

    async def _fetch(self, version: int, manifest_digest: str | None, deadline_s: float) -> Path:
        if manifest_digest is None and version == self._fetcher.seen_version:
            manifest_digest = self._fetcher.seen_digest
        final = self._cache / f"v{version}"
        if final.exists():
            held = digest_bytes(read_bounded(final / FILE_NAME, MAX_BYTES))
            if manifest_digest in (None, held):
                return final
            _LOG.warning("%s holds another manifest (%s): fetching anew", final, held[:16])
            shutil.rmtree(final)
        started = time.monotonic()
        deadline = started + deadline_s
        manifest, data = await self._fetcher.manifest(version, manifest_digest, deadline)
        received = await download(self._fetcher, manifest, data, final, deadline)
        _LOG.info(
            "version %d fetched: %d of %d bytes over the network, %.2f s",
            version,
            received,
            sum(info.size for info in manifest.objects.values()),
            time.monotonic() - started,
        )
        return final

    def prune(self, keep: set[int]) -> None:
        for path in [*self._cache.glob("v*"), *self._cache.glob(f"{PARTIAL}v*")]:
            number = path.name.removeprefix(PARTIAL)[1:]
            if number.isdecimal() and int(number) not in keep:
                shutil.rmtree(path)

    async def close(self) -> None:
        await self._fetcher.close()


class WeightsClient:
    """Synchronous client of origins and relays; any thread may call it.

    Args:
        urls: base URLs of relays or origins, any of which may be down, slow or lying.
        run: the run's id.
        root_public_key: pinned; all trust starts there.
        cache_dir: versions appear here as `v<N>`; partial downloads are kept here and resumed.
    """

    def __init__(
        self, urls: Sequence[str], *, run: str, root_public_key: str, cache_dir: Path
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="weights-client", daemon=True
        )
        self._thread.start()

        async def make() -> AsyncWeightsClient:
            return AsyncWeightsClient(
                urls, run=run, root_public_key=root_public_key, cache_dir=cache_dir
            )

        try:
            self._client = self._run(make())
        except BaseException:
            self._stop()
            raise

    def latest(self, after: int | None, wait_s: float) -> Latest | None:
        """The newest version where it is newer than `after` (any, where None), else None.

        Waits up to `wait_s` for one to be announced. Never goes back behind what was seen before.

        Raises:
            UserError: within `wait_s` no URL gave an answer that could be believed.
        """
        return self._run(self._client.latest(after, wait_s))

    def fetch(self, version: int, *, manifest_digest: str | None, deadline_s: float) -> Path:
        """Fetches a version: `cache_dir/v<N>`, whole and checked; at once where it is there.

        Args:
            version: which.
            manifest_digest: the only manifest accepted (of a lease or latest.json); None accepts
                any that a publisher of the run signed.
            deadline_s: seconds to give up after.

        Returns:
            The directory: the published files and `manifest.json`.

        Raises:
            UserError: not there in time; names the relays and what was wrong with each.
        """
        return self._run(
            self._client.fetch(version, manifest_digest=manifest_digest, deadline_s=deadline_s)
        )

    def prune(self, keep: set[int]) -> None:
        """Removes fetched versions other than `keep`, partial ones too."""
        self._client.prune(keep)

    def cancel(self) -> None:
        """Ends what other threads have under way: they get a `CancelledError`."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self._run(end())

    def close(self) -> None:
        """Closes the connections; no other thread may have anything under way."""
        self._run(self._client.close())
        self._stop()

    def __enter__(self) -> WeightsClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # an interrupted caller must not leave the work behind
            future.cancel()
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
