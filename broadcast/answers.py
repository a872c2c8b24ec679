"""Responses with a file or a range of it; sent by `sendfile` on connections without TLS.

aiohttp's own FileResponse leaks its open file when it is cancelled, compares no ETag for If-Range,
sends 16 KiB at a time over TLS, and waits for a slow reader without a limit.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from aiohttp import web

from broadcast.metrics import Metrics

IMMUTABLE = "max-age=31536000, immutable"
"""Cache-Control of files that never change.

Shared caches may store them, unless the request had an Authorization header (RFC 9111, 3.5).
"""
REVALIDATE = "no-cache"
_PIECE_BYTES = 4 * 1024 * 1024
_TLS_WRITE_BYTES = 64 * 1024
_RANGE = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})")


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
