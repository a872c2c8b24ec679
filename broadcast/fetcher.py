"""Requests to untrusted servers, with checked answers; used by client and relay.

All trust starts at the pinned root key. It signs roles.json, which names the publishers. A
publisher signs latest.json and the manifests; in the store of a learner island, an island does.
A manifest has the digest of each chunk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import aiohttp

from broadcast import layout
from broadcast.manifest import MAX_BYTES, Chunk, WeightsManifest, open_manifest
from broadcast.transport import (
    Access,
    Attempt,
    Fault,
    Lie,
    base_url,
    cancel_all,
    fetch_chunk,
    get,
    new_session,
)
from broadcast.upstreams import SLOW_AFTER_S, Requester, Upstream, Wanted, pause_after
from runspec.core import roles as roles_format
from runspec.core.address import is_server_url
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.core.roles import (
    LATEST,
    MAX_LATEST_BYTES,
    Latest,
    Roles,
    Signers,
    issued_at,
    open_latest,
    open_roles,
)
from runspec.core.signed import CLOCK_SKEW_S, BadSignature, open_document

T = TypeVar("T")
PARALLEL_CHUNKS = 8
MOST_CHUNKS = 16
"""Largest number of chunks in transfer at a time, from all servers together."""
POLL_S = 20.0
"""Seconds of one long poll."""
GRACE_S = 5.0
"""Seconds that a server may take to answer after the end of a long poll."""
_LAST_GRACE_S = 1.0
"""Seconds that a server may take to answer the last poll before a deadline."""
ROLES_EVERY_S = 60.0
"""Seconds between requests for roles.json to a server, so that revoked keys are soon refused."""
_SMALL_TIMEOUT_S = 15.0
_STATIC_POLL_S = 0.5
_SLOWEST_BYTES_PER_S = 256 * 1024
_LOG = logging.getLogger(__name__)
NO_TOKEN = Access()
"""Access without a token; https servers are checked by the system's certificates."""


def chunk_timeout_s(size: int) -> float:
    """Seconds that one attempt at a chunk may take before another server is tried."""
    return 10.0 + size / _SLOWEST_BYTES_PER_S


class Fetcher:
    """Sends requests to several servers and returns only checked answers.

    It is created and used inside one event loop, and ended by `close`.

    Args:
        urls: base URLs of relays or origins.
        run: the run's id.
        root_public_key: the pinned key that signs roles.json.
        folder: stores roles.json and the newest latest.json for the next start.
        access: token and certificates for these servers.
        signers: whose keys sign latest.json and the manifests.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        run: str,
        root_public_key: str,
        folder: Path,
        access: Access = NO_TOKEN,
        signers: Signers = "publisher",
    ) -> None:
        self._requester = Requester([base_url(url) for url in urls], most=MOST_CHUNKS)
        self.upstreams = self._requester.upstreams
        self.latest_bytes: bytes | None = None
        self.seen_version = -1
        """The newest version that a checked latest.json named; an older one is refused."""
        self.seen_digest = ""
        """Manifest digest of `seen_version`."""
        self.roles: Roles | None = None
        self._issued = 0.0
        self._roles_asked: dict[Upstream, float] = {}
        self._opening = asyncio.Lock()
        self._run, self._signers = run, signers
        self._root = root_public_key
        self._roles_path = folder / "roles.json"
        self._latest_path = folder / "latest.json"
        self._recall()
        self._session = new_session(access)
        self._strangers: aiohttp.ClientSession | None = None
        """Connections to strangers' servers, without a token."""

    @property
    def received(self) -> int:
        """Bytes of chunks received so far, damaged and repeated ones too; any thread may ask."""
        now = sum(upstream.received for upstream in self.upstreams.all)
        return self.upstreams.removed_bytes + now

    async def close(self) -> None:
        """Close the connections; no request may be under way."""
        await self._session.close()
        if self._strangers is not None:
            await self._strangers.close()

    async def set_volunteers(self, urls: Collection[str], *, public_only: bool) -> None:
        """Ask these strangers' relays for chunks too, and no others; see `WeightsClient`."""
        if self._strangers is None:
            self._strangers = new_session(NO_TOKEN, public_only=public_only)
        self.upstreams.set_strangers({url.rstrip("/") for url in urls if is_server_url(url)})

    async def latest(self, after: int | None, wait_s: float) -> Latest | None:
        """Wait for a latest.json that names a version newer than `after`; None if none arrives.

        It returns any version if the newest one seen is withdrawn, because its key was revoked. All
        servers are polled at once, so that a stale server cannot hide a newer version.

        Raises:
            UserError: no server gave a valid answer within `wait_s`.
        """
        deadline = time.monotonic() + wait_s
        answered: set[Upstream] = set()
        polls = {
            asyncio.create_task(self._poll(upstream, after, deadline, answered))
            for upstream in self.upstreams.own
        }
        pending = polls
        try:
            while pending and not (answered and time.monotonic() >= deadline):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for poll in done:
                    if (newer := poll.result()) is not None:
                        return newer
        finally:
            await cancel_all(polls)
        if not answered:
            raise UserError(
                f"no believable latest.json of run {self._run} within {wait_s:.0f} s",
                place=self.upstreams.faults(),
                remedy="check the URLs, the run's id and --public-key, and that a version is out",
            )
        return None

    async def manifest(
        self, version: int, digest: str | None, deadline: float, *, keep_asking: bool = True
    ) -> tuple[WeightsManifest, bytes]:
        """Fetch the manifest of a version; return it and its signed bytes.

        Args:
            version: number of the version.
            digest: the only digest accepted; None accepts any manifest that a publisher signed.
            deadline: of the monotonic clock.
            keep_asking: False ends the search once every server answered 404.

        Raises:
            UserError: not fetched in time; the message names each server and its fault.
        """

        async def get_it(
            upstream: Upstream, wanted: Wanted, attempt: Attempt
        ) -> tuple[WeightsManifest, bytes]:
            others = set(self.upstreams.own) - wanted.shunned - {upstream}
            # A relay may first request an older manifest from its own upstreams: allow it the time.
            limit_s = SLOW_AFTER_S if others and keep_asking else _SMALL_TIMEOUT_S
            name = layout.manifest_name(self._run, version)
            data = await self._get(upstream, name, MAX_BYTES, _within(deadline, limit_s))
            if digest is not None and (found := digest_bytes(data)) != digest:
                raise Lie(f"its digest is {found[:16]}, not {digest[:16]}")

            async def check(roles: Roles) -> WeightsManifest:
                # It may take a second and 256 MB: in a thread, one manifest at a time.
                async with self._opening:
                    return await asyncio.to_thread(
                        open_manifest, data, run=self._run, publishers=roles.signers(self._signers)
                    )

            manifest = await self._checked(upstream, check, deadline)
            if manifest.version != version:
                raise Lie(f"is of version {manifest.version}")
            return manifest, data

        what = f"manifest of version {version}"
        return await self._requester.request(what, get_it, deadline, keep_asking=keep_asking)

    async def chunk(
        self,
        chunk: Chunk,
        what: str,
        deadline: float,
        *,
        into: Path,
        offset: int = 0,
        attempts: list[Attempt] | None = None,
    ) -> None:
        """Fetch a chunk into a file at [offset, offset + size).

        These bytes are undefined if it fails or is cancelled.

        Args:
            chunk: the chunk.
            what: name of the chunk in messages.
            deadline: of the monotonic clock.
            into: an existing file.
            offset: position in the file, in bytes.
            attempts: gets each request for it, whose bytes are counted as they come.

        Raises:
            UserError: not fetched in time; the message names each server and its fault.
            OSError: the file cannot be written.
        """

        async def bring(upstream: Upstream, wanted: Wanted, attempt: Attempt) -> None:
            if attempts is not None:
                attempts.append(attempt)

            def is_hopeless(elapsed_s: float) -> bool:
                return self.upstreams.is_hopeless(
                    time.monotonic(), wanted, upstream, attempt.received, elapsed_s
                )

            url = f"{upstream.url}/{layout.chunk_name(self._run, chunk.blake3)}"
            timeout_s = _within(deadline, chunk_timeout_s(chunk.size))
            session = self._strangers if upstream.stranger else self._session
            assert session is not None
            await fetch_chunk(
                *(session, url, chunk, into, offset, attempt),
                timeout_s=timeout_s,
                is_hopeless=is_hopeless,
            )

        what = f"{what}, chunk {chunk.blake3[:16]}"
        await self._requester.request(what, bring, deadline, size=chunk.size)

    async def _poll(
        self, upstream: Upstream, after: int | None, deadline: float, answered: set[Upstream]
    ) -> Latest | None:
        """Poll one server for latest.json until it names a newer version or the time is up.

        Faults here do not influence which server is asked for chunks, except for lies.
        """
        floor = -1 if after is None else after
        seen, failures = self.seen_version, 0
        while True:
            asked = time.monotonic()
            hold_s = min(POLL_S, max(0.0, deadline - asked))
            try:
                latest = await self._latest_of(upstream, floor, hold_s, deadline + _LAST_GRACE_S)
                failures = 0
                answered.add(upstream)
                if latest.version > floor or self.seen_version < seen:
                    return latest
                # A server that answers at once without news is a plain file server.
                pause_s = _STATIC_POLL_S if time.monotonic() - asked < hold_s / 2 else 0.0
            except Fault as fault:
                upstream.noted(time.monotonic(), fault, "latest.json", _LOG)
                pause_s = pause_after(fault, failures)
                failures += 1
            if failures and time.monotonic() + pause_s >= deadline:
                return None  # there is no time for another request
            await asyncio.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
            if time.monotonic() >= deadline:
                return None

    async def _latest_of(
        self, upstream: Upstream, floor: int, hold_s: float, deadline: float
    ) -> Latest:
        await self._ask_for_roles(upstream, deadline)
        name = f"{layout.latest_name(self._run)}?after={floor}&wait={hold_s:.3f}"
        timeout_s = _within(deadline, hold_s + GRACE_S)
        data = await self._get(upstream, name, MAX_LATEST_BYTES, timeout_s)

        async def check(roles: Roles) -> Latest:
            return open_latest(data, run=self._run, publishers=roles.signers(self._signers))

        latest = await self._checked(upstream, check, deadline)
        # No `await` from here on: no other poll may change the fields in between.
        if latest.version < self.seen_version:
            # A relay that lags is not dishonest, but an older version is refused.
            raise Fault(
                f"offers version {latest.version} as the newest, {self.seen_version} was seen"
            )
        if latest.version == self.seen_version and latest.manifest_digest != self.seen_digest:
            raise Lie(f"names another manifest for version {latest.version} than was seen")
        if latest.issued > self._issued or latest.version > self.seen_version:
            write_atomic(self._latest_path, data)
            self._note(latest, data)
        return latest

    def _note(self, latest: Latest, data: bytes) -> None:
        self.latest_bytes, self._issued = data, latest.issued
        self.seen_version, self.seen_digest = latest.version, latest.manifest_digest

    async def _get(self, upstream: Upstream, name: str, max_bytes: int, timeout_s: float) -> bytes:
        url = f"{upstream.url}/{name}"
        return await get(self._session, url, max_bytes=max_bytes, timeout_s=timeout_s)

    async def _checked(
        self, upstream: Upstream, check: Callable[[Roles], Awaitable[T]], deadline: float
    ) -> T:
        """Run a check with the known roles; if it fails, run it again with the newest roles."""
        roles = self.roles
        if roles is None or _is_expired(roles):
            roles = await self._newest_roles(upstream, deadline)
        while True:
            try:
                return await check(roles)
            except BadSignature as error:
                newest = await self._newest_roles(upstream, deadline)
                if newest == roles:
                    raise Lie(str(error)) from error
                roles = newest

    async def _ask_for_roles(self, upstream: Upstream, deadline: float) -> None:
        """Request roles.json every `ROLES_EVERY_S`, for revoked keys; ignore faults."""
        now = time.monotonic()
        if now - self._roles_asked.get(upstream, -ROLES_EVERY_S) >= ROLES_EVERY_S:
            self._roles_asked[upstream] = now
            with suppress(Fault):
                await self._newest_roles(upstream, deadline)

    async def _newest_roles(self, upstream: Upstream, deadline: float) -> Roles:
        """Request roles.json; return it, or the known one if that was issued later."""
        name, timeout_s = layout.roles_name(self._run), _within(deadline, _SMALL_TIMEOUT_S)
        data = await self._get(upstream, name, roles_format.MAX_BYTES, timeout_s)
        try:
            roles = open_roles(data, root_public_key=self._root, run=layout.roles_run(self._run))
        except BadSignature as error:
            raise Lie(str(error)) from error
        if self.roles is None or roles.issued > self.roles.issued:
            write_atomic(self._roles_path, data)
            self.roles = roles
            self._forget_revoked()
        elif _is_expired(self.roles):
            raise Fault("offers a roles.json older than one seen before, which has expired")
        return self.roles

    def _forget_revoked(self) -> None:
        """Forget the newest version if its key was revoked: no such version may exist."""
        if self.latest_bytes is None or self.roles is None:
            return
        try:
            open_document(
                self.latest_bytes,
                kind=LATEST,
                keys=self.roles.signers(self._signers),
                max_bytes=MAX_LATEST_BYTES,
            )
        except BadSignature as error:
            _LOG.warning("version %d is not the newest any more: %s", self.seen_version, error)
            self._latest_path.unlink(missing_ok=True)
            self.latest_bytes, self._issued = None, 0.0
            self.seen_version, self.seen_digest = -1, ""

    def _recall(self) -> None:
        """Load the documents that the last process of this folder checked and wrote.

        They may have expired. They still serve to refuse documents that were issued earlier.
        """
        for path, most, recall in (
            (self._roles_path, roles_format.MAX_BYTES, self._recall_roles),
            (self._latest_path, MAX_LATEST_BYTES, self._recall_latest),
        ):
            try:
                recall(read_bounded(path, most))
            except FileNotFoundError:
                continue
            except (BadSignature, UserError, TypeError) as error:
                _LOG.warning("%s: not used: %s", path, error)

    def _recall_roles(self, data: bytes) -> None:
        now = issued_at(data)
        run = layout.roles_run(self._run)
        self.roles = open_roles(data, root_public_key=self._root, run=run, now=now)

    def _recall_latest(self, data: bytes) -> None:
        document = open_document(data, kind=LATEST, keys=None, max_bytes=MAX_LATEST_BYTES)
        latest = Latest(**document.payload)
        if latest.run == self._run:
            self._note(latest, data)
            self._forget_revoked()


async def for_each(
    items: Iterable[T], work: Callable[[T], Awaitable[None]], *, parallel: int
) -> None:
    """Do `work` on the items in order, `parallel` at a time; the first failure ends the rest."""
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:  # one iterator for all workers
            await work(item)

    workers = [asyncio.create_task(worker()) for _ in range(parallel)]
    try:
        await asyncio.gather(*workers)
    finally:
        await cancel_all(workers)


def _is_expired(roles: Roles) -> bool:
    return time.time() > roles.expires + CLOCK_SKEW_S


def _within(deadline: float, limit_s: float) -> float:
    return max(0.1, min(limit_s, deadline - time.monotonic()))
