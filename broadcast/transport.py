"""HTTP GET with limits, for servers that may be down, slow or dishonest; and one chunk into a file.

For a chunk the event loop receives; threads hash and write, so that a slow disk does not block the
loop. aiohttp is fast enough: a client of our own with blocking sockets and a thread for each
connection reached 1.10 GB/s and used 0.57 s of CPU for a GB, aiohttp 0.94 GB/s and 0.78 s. Measured
with 1 GiB in chunks of 8 MiB, eight at a time, over loopback into tmpfs on 2 cores.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from blake3 import blake3

from broadcast.manifest import Chunk
from runspec.core import http_client
from runspec.core.address import is_server_url
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.http_client import (
    AS_IT_IS,
    CONNECT_S,
    Answer,
    LateAnswer,
    NoAnswer,
    fetch,
    translated_errors,
)

_READ_BUFFER = 1024 * 1024
_PRINTABLE = re.compile(r"[!-~]+")
_WRITE_BYTES = 1024 * 1024
_LOOK_EVERY_S = 0.5


Fault = NoAnswer
"""An answer that cannot be used: unreachable, an error status, too slow."""
TooSlow = LateAnswer
"""The server is so slow that another one is expected to be faster."""


class NotThere(Fault):
    """The server has no such file (404). This does not count against the server."""


class Busy(Fault):
    """The server refuses too many requests (429). This does not count against the server."""

    def __init__(self, retry_after_s: float | None) -> None:
        super().__init__("too many requests (429)")
        self.retry_after_s = retry_after_s
        """Seconds that Retry-After names, unchecked; None if it names none."""


class Lie(Fault):
    """An answer that failed its check: the wrong bytes, signature, run or version."""


async def ended(work: asyncio.Future[Any]) -> None:
    """Wait until `work` has ended; a cancellation takes effect only then.

    A started thread continues to the end of its write. Until then it owns the file.
    """
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancelled = True
    with suppress(asyncio.CancelledError):
        work.exception()  # retrieved, or asyncio would log it
    if cancelled:
        raise asyncio.CancelledError


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until they have ended; their results and errors are dropped."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)


@dataclass(frozen=True)
class Access:
    """Token and certificates for requests to servers.

    Raises:
        UserError: the token is not valid in a header (the message does not show it).
    """

    token: str | None = field(default=None, repr=False)
    """Bearer token that is sent to every server; None: no token."""
    ca_file: Path | None = None
    """Root certificates (PEM) for https servers; None: those that the system trusts."""

    def __post_init__(self) -> None:
        if self.token is not None and _PRINTABLE.fullmatch(self.token) is None:
            raise UserError("a token is made of printable ASCII characters without spaces")

    @classmethod
    def read(cls, token_file: Path | None, ca_file: Path | None) -> Access:
        """Read the token from a file, without surrounding white space.

        Raises:
            UserError: the file cannot be read or holds no token.
        """
        if token_file is None:
            return cls(None, ca_file)
        try:
            return cls(read_bounded(token_file, 4096).decode("ascii").strip(), ca_file)
        except (OSError, UnicodeDecodeError, UserError) as error:
            raise UserError(
                f"holds no token: {error}", place=str(token_file), remedy="one token, nothing else"
            ) from error

    def headers(self) -> dict[str, str]:
        """Return the headers of every request."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    @cached_property
    def ssl_context(self) -> ssl.SSLContext:
        """Context that checks certificate and host name.

        Raises:
            UserError: `ca_file` cannot be read or holds no certificate.
        """
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise UserError(
                f"no certificates: {error}", place=str(self.ca_file), remedy="PEM is expected"
            ) from error


def new_session(access: Access, *, public_only: bool = False) -> aiohttp.ClientSession:
    """Return a session with this access; it uses no proxy of the environment."""
    return http_client.new_session(
        tls=access.ssl_context,
        public_only=public_only,
        headers=access.headers(),
        read_bufsize=_READ_BUFFER,
    )


def base_url(text: str) -> str:
    """Return a server's base URL without a trailing slash.

    Raises:
        UserError: not http(s)://host[:port][/prefix].
    """
    if not is_server_url(text):
        raise UserError(
            f"{text!r} is not the URL of an origin or relay",
            remedy="write for example http://127.0.0.1:8080",
        )
    if urlsplit(text).username is not None:
        raise UserError(
            "a server's URL has a user's name in it, which logs would show",
            remedy="give a token in a file instead",
        )
    return text.rstrip("/")


def refusal(answer: Answer) -> Fault:
    """Return the fault of an answer other than 200."""
    if answer.status == 404:
        return NotThere("not there (404)")
    if answer.status == 429:
        return Busy(answer.busy_s)
    why = {401: ": no token, or not one of its own", 403: ": not for this token"}
    return Fault(f"status {answer.status}{why.get(answer.status, '')}")


async def get(
    session: aiohttp.ClientSession, url: str, *, max_bytes: int, timeout_s: float
) -> bytes:
    """Return the body of a GET.

    Args:
        session: from `new_session`.
        url: the URL. Redirects are not followed, so that a relay cannot redirect us.
        max_bytes: limit of the body; a longer one is refused as soon as it is noticed.
        timeout_s: limit of the whole request, so that a server cannot send slowly for ever.

    Raises:
        NotThere: status 404.
        Busy: status 429.
        TooSlow: not complete in time.
        Fault: any other status than 200, a body that is too long, or no connection.
    """
    answer = await fetch(session, "GET", url, max_bytes=max_bytes, timeout_s=timeout_s)
    if answer.status != 200:
        raise refusal(answer)
    return answer.content


@dataclass(eq=False)
class Attempt:
    """One request under way to one server."""

    size: int
    """Bytes of a chunk; 0 for a small answer."""
    charged_s: float = 0.0
    """Seconds that the server was charged at its start (`upstreams`)."""
    received: int = 0
    """Bytes of the chunk received so far."""


async def fetch_chunk(
    session: aiohttp.ClientSession,
    url: str,
    chunk: Chunk,
    into: Path,
    offset: int,
    attempt: Attempt,
    *,
    timeout_s: float,
    is_hopeless: Callable[[float], bool] = lambda elapsed_s: False,
) -> None:
    """Fetch one chunk; when this returns or raises, no thread writes to the file any more.

    Args:
        session: from `new_session`.
        url: URL of the chunk. Redirects are not followed.
        chunk: the chunk.
        into: an existing file; after a failure its bytes there are undefined.
        offset: position of the chunk's first byte in the file.
        attempt: counts the bytes received.
        timeout_s: limit of the whole transfer, so that a server cannot send slowly for ever.
        is_hopeless: called every half second with the seconds since the start; True ends it.

    Raises:
        NotThere, Busy, Lie, TooSlow, Fault: the server gave no correct answer.
        OSError: the file cannot be written.
    """
    started = time.monotonic()
    receiving = asyncio.create_task(_receive(session, url, chunk, into, offset, attempt))
    try:
        async with asyncio.timeout(timeout_s):
            while not (await asyncio.wait([receiving], timeout=_LOOK_EVERY_S))[0]:
                if is_hopeless(time.monotonic() - started):
                    raise TooSlow(f"{attempt.received} of {chunk.size} bytes so far")
            receiving.result()
    except TimeoutError as error:
        what = f"{attempt.received} of {chunk.size} bytes within {timeout_s:.1f} s"
        raise Fault(what) from error
    finally:
        receiving.cancel()
        await ended(receiving)


async def _receive(
    session: aiohttp.ClientSession,
    url: str,
    chunk: Chunk,
    into: Path,
    offset: int,
    attempt: Attempt,
) -> None:
    hasher = blake3()
    timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_S)
    with translated_errors(f"no connection within {CONNECT_S:g} s"):
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
            descriptor = os.open(into, os.O_WRONLY)
            writing: asyncio.Future[None] | None = None
            try:
                pieces: list[bytes] = []
                size = 0
                async for piece, _ in response.content.iter_chunks():
                    pieces.append(piece)
                    size += len(piece)
                    attempt.received += len(piece)
                    if size >= _WRITE_BYTES or attempt.received >= chunk.size:
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
