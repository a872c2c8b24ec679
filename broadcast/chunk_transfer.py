"""Fetches one chunk of a version from one server into a file.

The event loop receives; threads hash and write, so that a slow disk does not block the loop.

aiohttp is fast enough: a client of our own with blocking sockets and a thread for each connection
reached 1.10 GB/s and used 0.57 s of CPU for a GB, aiohttp 0.94 GB/s and 0.78 s. Measured with 1 GiB
in chunks of 8 MiB, eight at a time, over loopback into tmpfs on 2 cores.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
from blake3 import blake3

from broadcast.disk import ended
from broadcast.manifest import Chunk
from broadcast.transport import Fault, Lie, TooSlow, faults, refusal
from runspec.core.http_client import AS_IT_IS, CONNECT_S, Answer, translated_errors

_WRITE_BYTES = 1024 * 1024
_LOOK_EVERY_S = 0.5


@dataclass
class Transfer:
    """One chunk that is being received into an existing file."""

    chunk: Chunk
    into: Path
    offset: int
    """Position of the chunk's first byte in the file."""
    received: int = 0
    """Bytes of the body received so far."""


async def fetch_chunk(
    session: aiohttp.ClientSession,
    url: str,
    transfer: Transfer,
    *,
    timeout_s: float,
    is_hopeless: Callable[[float], bool] = lambda elapsed_s: False,
) -> None:
    """Fetch one chunk; when this returns or raises, no thread writes to the file any more.

    Args:
        session: from `new_session`.
        url: URL of the chunk. Redirects are not followed.
        transfer: the chunk and its file; after a failure the file's bytes there are undefined.
        timeout_s: limit of the whole transfer, so that a server cannot send slowly for ever.
        is_hopeless: called every half second with the seconds since the start; True ends it.

    Raises:
        NotThere, Busy, Lie, TooSlow, Fault: the server gave no correct answer.
        OSError: the file cannot be written.
    """
    started = time.monotonic()
    receiving = asyncio.create_task(_receive(session, url, transfer))
    try:
        async with asyncio.timeout(timeout_s):
            while not (await asyncio.wait([receiving], timeout=_LOOK_EVERY_S))[0]:
                if is_hopeless(time.monotonic() - started):
                    raise TooSlow(f"{_so_far(transfer)} so far")
            receiving.result()
    except TimeoutError as error:
        raise Fault(f"{_so_far(transfer)} within {timeout_s:.1f} s") from error
    finally:
        receiving.cancel()
        await ended(receiving)


def _so_far(transfer: Transfer) -> str:
    return f"{transfer.received} of {transfer.chunk.size} bytes"


async def _receive(session: aiohttp.ClientSession, url: str, transfer: Transfer) -> None:
    chunk, hasher = transfer.chunk, blake3()
    timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_S)
    with faults(), translated_errors(f"no connection within {CONNECT_S:g} s"):
        async with session.get(
            url, headers=AS_IT_IS, timeout=timeout, allow_redirects=False
        ) as response:
            if response.status != 200:
                retry_after = response.headers.get("Retry-After", "")
                raise refusal(Answer(response.status, retry_after, b""))
            if response.content_length is None:
                raise Fault("its answer has no Content-Length")
            if response.content_length != chunk.size:
                raise Lie(f"{response.content_length} bytes that are not the chunk's {chunk.size}")
            descriptor = os.open(transfer.into, os.O_WRONLY)
            writing: asyncio.Future[None] | None = None
            try:
                pieces: list[bytes] = []
                offset, size = transfer.offset, 0
                async for piece, _ in response.content.iter_chunks():
                    pieces.append(piece)
                    size += len(piece)
                    transfer.received += len(piece)
                    if size >= _WRITE_BYTES or transfer.received >= chunk.size:
                        if writing is not None:
                            await asyncio.shield(writing)
                        work = partial(_store, hasher, descriptor, pieces, offset)
                        writing = asyncio.ensure_future(asyncio.to_thread(work))
                        pieces, offset, size = [], offset + size, 0
                if writing is not None:
                    await asyncio.shield(writing)
            finally:
                if writing is not None:
                    await ended(writing)
                os.close(descriptor)
    if hasher.hexdigest() != chunk.blake3:
        raise Lie(f"{chunk.size} bytes that are not the chunk's")


def _store(hasher: blake3, descriptor: int, pieces: Sequence[bytes], offset: int) -> None:
    for piece in pieces:
        hasher.update(piece)
        rest = memoryview(piece)
        while rest:
            written = os.pwrite(descriptor, rest, offset)
            rest, offset = rest[written:], offset + written
