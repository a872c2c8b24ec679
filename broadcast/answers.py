"""Answers with a file: whole or a range of it, by sendfile where the connection is plain.

aiohttp's own FileResponse leaks its open file when it is cancelled, compares no ETag for If-Range,
sends 16 KiB at a time over TLS, and waits for a slow reader for ever.
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
"""Of what never changes. Caches that many share keep it too, but not where a token was sent."""
REVALIDATE = "no-cache"
_PIECE_BYTES = 4 * 1024 * 1024
_TLS_WRITE_BYTES = 64 * 1024
_RANGE = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})")


@dataclass(frozen=True)
class Kind:
    """What a file is to those who read it."""

    what: str
    """Names it in the metrics."""
    cache: str
    """Cache-Control."""
    content_type: str = "application/octet-stream"


class FileAnswers:
    """Sends files.

    Args:
        metrics: counts bytes, transfers and slow readers.
        floor_bytes_per_s: a reader that takes the next 4 MiB more slowly is disconnected, so that
            it cannot keep a file (and the disk space of a removed one) for ever.
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
        """Answers a GET or HEAD, which may have Range, If-Range and If-None-Match.

        Args:
            request: to answer.
            path: the file; None, or one that is gone meanwhile, is a 404.
            kind: what it is.
            pay: called with the number of bytes before they are sent; may raise instead.
            etag: names the contents wherever they lie; None: the file's time and size do.
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
            part = None
            if request.headers.get("If-Range") in (None, headers["ETag"]):
                part = byte_range(request.headers.get("Range"), status.st_size)
            if part is not None and not part:
                unsatisfied = {"Content-Range": f"bytes */{status.st_size}"}
                raise web.HTTPRequestRangeNotSatisfiable(headers=unsatisfied)
            if part is not None:
                headers["Content-Range"] = f"bytes {part[0]}-{part[-1]}/{status.st_size}"
            headers["Content-Type"] = kind.content_type
            response = web.StreamResponse(status=200 if part is None else 206, headers=headers)
            wanted = range(status.st_size) if part is None else part
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
        """Sends head and body; whoever is gone or too slow is disconnected."""
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
        await asyncio.sleep(0)  # for others, and to hear that the reader is gone


def not_modified(request: web.Request, etag: str) -> bool:
    """Whether If-None-Match says that the reader has these contents."""
    known = request.if_none_match or ()
    return any(tag.value in (etag, "*") for tag in known)


def byte_range(header: str | None, size: int) -> range | None:
    """The bytes that a Range header asks for.

    Args:
        header: its value, if there is one.
        size: of the whole, in bytes.

    Returns:
        None for the whole: without a header, and for forms that a server may ignore (several
        ranges, other units, nonsense). An empty range where none of the bytes asked for exist.
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
