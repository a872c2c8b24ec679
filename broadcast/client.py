"""The client: fetches versions, checks everything, and has a deadline for every wait.

Disk work runs in threads while chunks arrive.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from broadcast.assemble import Assembly, BadBase, Piece, Recipe, cheapest, delta_applier
from broadcast.disk import Cache, Cancellation, in_thread
from broadcast.fetcher import NO_TOKEN, PARALLEL_CHUNKS, Fetcher, for_each
from broadcast.manifest import WeightsManifest
from broadcast.transport import Access, cancel_all
from runspec.core.errors import UserError
from runspec.core.roles import Latest, Signers

EVERY_S = 5.0
"""Seconds between two lines in the log."""
_LOG = logging.getLogger(__name__)
T = TypeVar("T")
Manifests = Mapping[int, WeightsManifest]
DETOUR_S = 3.0
"""Seconds to request an older manifest that can only save bytes."""
_SHOWN = 4
"""Files of a manifest that a message names, at most."""


async def download(
    fetcher: Fetcher, assembly: Assembly, held: Mapping[int, WeightsManifest]
) -> int:
    """Complete a version and give it its final name.

    Args:
        fetcher: requests the chunks.
        assembly: the version's files on disk; its cancellation has the deadline.
        held: versions whose files may be copied.

    Returns:
        Bytes received over the network.

    Raises:
        BadBase: see `Assembly.apply`.
        UserError: not complete in time, the disk is full, or nothing that applies deltas is
            installed.
    """
    apply_deltas = delta_applier() if assembly.recipe.deltas else None
    cancellation = assembly.cancellation
    try:
        await in_thread(partial(assembly.begin, held), cancellation)
        pieces = await in_thread(assembly.missing, cancellation)
        jobs = [
            partial(in_thread, assembly.copy_base, cancellation),
            partial(_fetch_all, fetcher, pieces, assembly),
        ]
        await for_each(jobs, lambda job: job(), parallel=len(jobs))
        if apply_deltas is not None:
            await in_thread(partial(assembly.apply, apply_deltas), cancellation)
        await in_thread(assembly.finish, cancellation)
    except OSError as error:
        raise UserError(
            f"cannot write {assembly.name}: {error.strerror or error}",
            place=str(assembly.partial),
            remedy="free disk space or mend the permissions, then fetch again: it resumes",
        ) from error
    return sum(piece.chunk.size for piece in pieces)


async def _fetch_all(fetcher: Fetcher, pieces: Sequence[Piece], assembly: Assembly) -> None:
    """Fetch the pieces; log rate, remaining time and each server's share now and then."""
    total, done = sum(piece.chunk.size for piece in pieces), 0
    deadline = assembly.cancellation.deadline

    def received() -> dict[str, int]:
        return {upstream.url: upstream.received for upstream in fetcher.upstreams.all}

    async def report() -> None:
        at, before, counted = time.monotonic(), 0, received()
        while True:
            await asyncio.sleep(EVERY_S)
            now, new, found = time.monotonic(), done - before, received()
            rate = new / max(now - at, 1e-9)
            sent = {url: n - counted.get(url, 0) for url, n in found.items()}
            shares = ", ".join(
                f"{url} {n / sum(sent.values()):.0%}"
                for url, n in sorted(sent.items(), key=lambda item: -item[1])
                if n
            )
            left = f", {(total - done) / rate:,.0f} s left" if rate > 0 else ""
            _LOG.info(
                "%s: %.1f of %.1f MB, %.1f MB/s%s, from %s",
                *(assembly.name, done / 1e6, total / 1e6, rate / 1e6, left),
                shares or "no server just now",
            )
            at, before, counted = now, done, found

    async def fetch(piece: Piece) -> None:
        nonlocal done
        what = f"{piece.path.name} at byte {piece.offset}"
        await fetcher.chunk(piece.chunk, what, deadline, into=piece.path, offset=piece.offset)
        done += piece.chunk.size

    reporting = asyncio.create_task(report())
    try:
        await for_each(pieces, fetch, parallel=PARALLEL_CHUNKS)
    finally:
        reporting.cancel()


class WrongFiles(UserError):
    """A version does not consist of the files that it must consist of."""


class WeightsClient:
    """Synchronous client of origins and relays; any thread may call it.

    Args:
        urls: base URLs of relays or origins, any of which may be down, slow or dishonest.
        run: the run's id.
        root_public_key: the pinned key that signs roles.json.
        cache_dir: versions appear here as `v<N>`; partial downloads are kept here and resumed.
            Clients and processes may share it: one fetches a version, and all read it.
        access: token and certificates for the servers.
        signers: whose keys sign the versions.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        run: str,
        root_public_key: str,
        cache_dir: Path,
        access: Access = NO_TOKEN,
        signers: Signers = "publisher",
    ) -> None:
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = runner.get_loop()

        def serve() -> None:
            with runner:  # its exit cancels unfinished tasks
                self._loop.run_forever()

        self._thread = threading.Thread(target=serve, name="weights-client", daemon=True)
        self._thread.start()

        async def make() -> Fetcher:
            return Fetcher(
                urls,
                run=run,
                root_public_key=root_public_key,
                folder=cache_dir,
                access=access,
                signers=signers,
            )

        try:
            self._cache = Cache(cache_dir, run=run)
            self._fetcher = self._run(make())
        except BaseException:
            self._stop()
            raise
        self._distrusted: set[int] = set()
        """Held versions that are damaged: deltas on them gave another result than the manifest."""

    def latest(self, after: int | None, wait_s: float) -> Latest | None:
        """Return the newest version if it is newer than `after` (None: any), else None.

        Waits up to `wait_s` seconds for an announcement. An older version than one seen before is
        refused, unless the key that signed the newer one was revoked.

        Raises:
            UserError: within `wait_s` no URL gave a valid answer.
        """
        return self._run(self._fetcher.latest(after, wait_s))

    @property
    def received(self) -> int:
        """Bytes of chunks received so far, damaged and repeated ones too."""
        return self._fetcher.received

    def fetch(
        self,
        version: int,
        *,
        manifest_digest: str | None,
        deadline_s: float,
        sizes: Mapping[str, int] | None = None,
    ) -> Path:
        """Fetch a version to `cache_dir/v<N>`, complete and checked; return at once if it is there.

        The client holds it: nobody removes it until a `prune` without it, `close`, or its own next
        fetch of another version of this number.
        It chooses the way with the fewest bytes: the files of an anchor, or deltas on the files of
        a held version or of an older anchor.

        Args:
            version: its number.
            manifest_digest: the only manifest accepted (of a lease or latest.json); None accepts
                any that a publisher of the run signed.
            deadline_s: seconds until it gives up. Deltas that have all arrived are still applied.
            sizes: bytes of each file that the version must consist of, without a delta; compared
                with the manifest before any file is fetched. None accepts any files.

        Returns:
            The directory: the published files and `manifest.json`.

        Raises:
            WrongFiles: the manifest names other files or sizes.
            UserError: not fetched in time; the message names each server and its fault.
        """
        return self._run(self._fetch(version, manifest_digest, deadline_s, sizes))

    def set_volunteers(self, urls: Collection[str], *, public_only: bool) -> None:
        """Use these relays of strangers for chunks too, instead of those of the last call.

        They get no token and may serve nothing else. At most 8 are used; one that lied is not
        asked again.

        Args:
            urls: their base URLs; one that is malformed is left out.
            public_only: as the first call says it: connect to strangers at public addresses only.
        """
        self._run(self._fetcher.set_volunteers(urls, public_only=public_only))

    def prune(self, keep: set[int]) -> None:
        """Release and remove versions other than `keep`, partial ones too.

        Those stay that a fetch works on, or that another client holds.
        """
        self._cache.prune(keep)

    def cancel(self) -> None:
        """Cancel the calls of other threads: they raise a `CancelledError`."""

        async def end() -> None:
            await cancel_all(asyncio.all_tasks() - {asyncio.current_task()})

        self._run(end())

    def close(self) -> None:
        """Close the connections; no other thread may have a call under way."""
        self._run(self._fetcher.close())
        self._stop()
        self._cache.close()

    def __enter__(self) -> WeightsClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # the work must not outlive an interrupted caller
            future.cancel()
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _fetch(
        self,
        version: int,
        manifest_digest: str | None,
        deadline_s: float,
        sizes: Mapping[str, int] | None,
    ) -> Path:
        deadline = time.monotonic() + deadline_s
        if manifest_digest is None and version == self._fetcher.seen_version:
            manifest_digest = self._fetcher.seen_digest
        # A fetched version is held only after others may remove it: then it is fetched once more.
        while not (self._cache.hold(version) and self._is_here(version, manifest_digest)):
            self._cache.release(version)  # it may be replaced, unless others hold it
            with self._cache.locked(version) as mine:
                if not mine:
                    await self._cache.wait(version, deadline)
                elif not self._is_here(version, manifest_digest):
                    if digest := self._cache.digest(version):
                        as_what = "damaged" if version in self._distrusted else f"as {digest[:16]}"
                        _LOG.warning("version %d is here %s: fetching anew", version, as_what)
                        self._cache.remove(version)
                    self._distrusted.discard(version)
                    with self._cache.reading() as versions:
                        await self._obtain(version, manifest_digest, versions, deadline, sizes)
        return self._cache.whole(version)

    def _is_here(self, version: int, digest: str | None) -> bool:
        """Return whether a version is here, with this digest, and trusted."""
        held = self._cache.digest(version)
        return held is not None and digest in (None, held) and version not in self._distrusted

    async def _obtain(
        self,
        version: int,
        digest: str | None,
        held: Manifests,
        deadline: float,
        sizes: Mapping[str, int] | None,
    ) -> None:
        """Fetch a version; fetch it again from an anchor if a held base proves damaged."""
        started = time.monotonic()
        manifest, data = await self._fetcher.manifest(version, digest, deadline)
        if sizes is not None:
            self._check_files(manifest, sizes)
        usable = held.keys() - self._distrusted
        cancellation = Cancellation(deadline)
        blamed: int | None = None
        while True:
            recipe = await self._recipe(manifest, data, held, usable, deadline)
            assembly = Assembly(recipe, self._cache, cancellation)
            try:
                received = await download(self._fetcher, assembly, held)
                break
            except BadBase as error:
                if assembly.resumed:
                    _LOG.warning("what a killed fetch left: %s; making it anew", error)
                elif recipe.base is not None:
                    _LOG.warning("%s; it is no base any more, fetching an anchor", error)
                    blamed = recipe.start.version
                    self._distrusted.add(blamed)
                    usable = set()
                else:  # an anchor failed too, so the held base was not at fault
                    if blamed is not None:
                        self._distrusted.discard(blamed)
                    raise
        files = self._cache.whole(version).iterdir()
        _LOG.info(
            "version %d fetched%s: %d bytes over the network for %d, %.2f s",
            version,
            _way(recipe),
            received,
            sum(file.stat().st_size for file in files),
            time.monotonic() - started,
        )

    def _check_files(self, manifest: WeightsManifest, sizes: Mapping[str, int]) -> None:
        found = {name: info.size for name, info in manifest.objects.items()}
        if found == sizes and manifest.base is None:
            return
        listed = ", ".join(f"{name} of {size} bytes" for name, size in sizes.items())
        named = ", ".join(f"{name} of {size}" for name, size in [*found.items()][:_SHOWN])
        raise WrongFiles(
            f"version {manifest.version} must be {listed}; its manifest names {named}"
            + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
            + ("" if manifest.base is None else f" and a delta of version {manifest.base}"),
            place=", ".join(upstream.url for upstream in self._fetcher.upstreams.all),
            remedy="its publisher is at fault; nothing of it was fetched",
        )

    async def _recipe(
        self,
        manifest: WeightsManifest,
        data: bytes,
        held: Manifests,
        usable: set[int],
        deadline: float,
    ) -> Recipe:
        """Choose the way with the fewest bytes; request as many older manifests as it needs.

        If an anchor is known already, the search for a cheaper way is short.
        """
        target = manifest.version
        manifests: dict[int, WeightsManifest | None] = {target: manifest}
        try:
            while isinstance(chain := cheapest(target, manifests, usable), int):
                detour = any(other is not None and other.is_anchor for other in manifests.values())
                until = min(deadline, time.monotonic() + DETOUR_S) if detour else deadline
                manifests[chain] = None
                try:
                    manifests[chain], _ = await self._fetcher.manifest(
                        chain, None, until, keep_asking=False
                    )
                except UserError as error:  # no server gave it in time
                    _LOG.info("%s", error)
        except UserError as error:
            faults = self._fetcher.upstreams.faults()
            raise UserError(error.thing, place=faults, remedy=error.remedy) from error
        known = {version: other for version, other in manifests.items() if other is not None}
        return Recipe(
            manifest=manifest,
            data=data,
            start=held[chain.start] if chain.held else known[chain.start],
            base=self._cache.whole(chain.start) if chain.held else None,
            deltas=tuple(known[version] for version in chain.deltas),
        )


def _way(recipe: Recipe) -> str:
    if not recipe.deltas:
        return ""
    start = "held" if recipe.base is not None else "fetched"
    return f" from {start} version {recipe.start.version} and deltas {recipe.numbers}"
