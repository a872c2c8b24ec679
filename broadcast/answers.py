"""What a server answers of a run, and responses with a file or a range of it.

Files are sent by `sendfile` on connections without TLS. aiohttp's own FileResponse leaks its open
file when it is cancelled, compares no ETag for If-Range, sends 16 KiB at a time over TLS, and waits
for a slow reader without a limit.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from aiohttp import web

from broadcast import layout
from broadcast.admission import Metrics
from broadcast.disk import Identity, identity
from broadcast.relay_store import StoredVersions
from broadcast.store import latest_version
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.roles import MAX_LATEST_BYTES

_LOG_AGAIN_S = 60.0
IMMUTABLE = "max-age=31536000, immutable"
"""Cache-Control of files that never change.

Shared caches may store them, unless the request had an Authorization header (RFC 9111, 3.5).
"""
REVALIDATE = "no-cache"
_PIECE_BYTES = 4 * 1024 * 1024
_TLS_WRITE_BYTES = 64 * 1024
_RANGE = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})")


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
            data = read_bounded(path, MAX_LATEST_BYTES)
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


@dataclass(frozen=True)
class Kind:
    """How a kind of file is named in the metrics and described in headers."""

    what: str
    """Name of the kind in the metrics."""
    cache: str
    """Value of Cache-Control."""
    content_type: str = "application/octet-stream"


class FileAnswers:
    """Sends files.

    Args:
        metrics: counts bytes, transfers and slow readers.
        floor_bytes_per_s: lowest rate of a reader, over 4 MiB. A slower reader is disconnected, so
            that it cannot keep a file open (and the disk space of a removed one) without a limit.
    """

    def __init__(self, metrics: Metrics, *, floor_bytes_per_s: float) -> None:
        self._metrics = metrics
        self._piece_s = _PIECE_BYTES / floor_bytes_per_s

    async def send(
        self,
        request: web.Request,
        path: Path | None,
        kind: Kind,
        *,
        pay: Callable[[int], None],
        etag: str | None = None,
    ) -> web.StreamResponse:
        """Answer a GET or HEAD, which may have Range, If-Range and If-None-Match.

        Args:
            request: the request.
            path: the file; the answer is 404 if it is None or was removed.
            kind: kind of the file.
            pay: called with the number of bytes before they are sent; may raise an error instead.
            etag: identifies the contents; None: made from the file's time and size.
        """
        try:
            file = path.open("rb") if path is not None else None
        except FileNotFoundError:
            file = None
        if file is None:
            raise web.HTTPNotFound(text="not here\n")
        with file:
            status = os.fstat(file.fileno())
            etag = etag or f"{status.st_mtime_ns:x}-{status.st_size:x}"
            headers = {"ETag": f'"{etag}"', "Cache-Control": kind.cache, "Accept-Ranges": "bytes"}
            if not_modified(request, etag):
                return web.Response(status=304, headers=headers)
            size, part = status.st_size, None
            if request.headers.get("If-Range") in (None, headers["ETag"]):
                part = byte_range(request.headers.get("Range"), size)
            if part is not None:
                if not part:
                    unsatisfied = {"Content-Range": f"bytes */{size}"}
                    raise web.HTTPRequestRangeNotSatisfiable(headers=unsatisfied)
                headers["Content-Range"] = f"bytes {part[0]}-{part[-1]}/{size}"
            headers["Content-Type"] = kind.content_type
            response = web.StreamResponse(status=200 if part is None else 206, headers=headers)
            wanted = range(size) if part is None else part
            response.content_length = len(wanted)
            if request.method == "GET":
                pay(len(wanted))
                await self._send(request, response, file, wanted, kind.what)
            return response

    async def _send(
        self,
        request: web.Request,
        response: web.StreamResponse,
        file: BinaryIO,
        wanted: range,
        what: str,
    ) -> None:
        """Send head and body; disconnect a reader that is too slow."""
        transport = request.transport
        if transport is None:
            return
        over_tls = transport.get_extra_info("sslcontext") is not None
        with self._metrics.transfers.track_inprogress():
            try:
                await response.prepare(request)
                for start in range(wanted.start, wanted.stop, _PIECE_BYTES):
                    size = min(_PIECE_BYTES, wanted.stop - start)
                    async with asyncio.timeout(self._piece_s):
                        if over_tls:
                            await _write(response, file, start, size)
                        else:
                            await _sendfile(transport, file, start, size)
                    self._metrics.sent(what, size)
            except TimeoutError:
                self._metrics.dropped("slow reader")
                transport.abort()
            except ConnectionError:  # the reader is gone
                transport.abort()


async def _sendfile(
    transport: asyncio.WriteTransport, file: BinaryIO, start: int, size: int
) -> None:
    if transport.is_closing():
        raise ConnectionResetError("the reader is gone")
    sent = await asyncio.get_running_loop().sendfile(transport, file, start, size)
    if sent != size:
        raise ConnectionAbortedError("the file has become shorter")


async def _write(response: web.StreamResponse, file: BinaryIO, start: int, size: int) -> None:
    file.seek(start)
    for offset in range(0, size, _TLS_WRITE_BYTES):
        data = file.read(min(_TLS_WRITE_BYTES, size - offset))
        if not data:
            raise ConnectionAbortedError("the file has become shorter")
        await response.write(data)
        await asyncio.sleep(0)  # other tasks run, and a closed connection is noticed


def not_modified(request: web.Request, etag: str) -> bool:
    """Return whether If-None-Match says that the reader has these contents."""
    known = request.if_none_match or ()
    return any(tag.value in (etag, "*") for tag in known)


def byte_range(header: str | None, size: int) -> range | None:
    """Return the bytes that a Range header requests.

    Args:
        header: value of the header; None if there is none.
        size: bytes of the whole file.

    Returns:
        None for the whole file: without a header, and for forms that a server may ignore (several
        ranges, other units, malformed ones). An empty range if no requested byte exists.
    """
    match = _RANGE.fullmatch(header or "")
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        return range(max(0, size - int(match[2])), size)
    first, last = int(match[1]), int(match[2] or size - 1)
    if match[2] and last < first:
        return None
    return range(first, min(last + 1, size))
