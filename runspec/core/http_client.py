"""HTTP requests with deadlines and bounded answers.

aiohttp is the only HTTP library: servers use it, and so do all clients. `fetch` is for callers in
an event loop. `fetch_now` is for the others: each call runs a loop and makes a connection of its
own, so that threads share nothing and nothing has to be closed.

Host names are looked up in daemon threads. A resolver may block a thread for half a minute, and an
event loop or a process that ends waits for the threads of an executor, but not for these.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import re
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler

from runspec.core.address import is_public

_Found = Sequence[tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]]

CONNECT_S = 5.0
_UPLOAD_PIECE_BYTES = 64 * 1024
_INTERIM_ANSWERS = 8
"""Most interim answers before the real one; servers send one or none."""
_SECONDS = re.compile(r"[0-9]{1,9}")
AS_IT_IS = {"Accept-Encoding": "identity"}
"""Answers are read as they came over the wire: nothing is decompressed."""


async def look_up(host: str, port: int, family: socket.AddressFamily = socket.AF_UNSPEC) -> _Found:
    """Resolve a host as `socket.getaddrinfo` does for streams.

    Raises:
        OSError, UnicodeError: the name does not exist, or no resolver answers.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[_Found] = loop.create_future()

    def settle(found: _Found, error: Exception | None) -> None:
        if answer.done():  # the caller was cancelled
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(found)

    def work() -> None:
        found: _Found = []
        failure = None
        try:
            found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            failure = error
        with suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(settle, found, failure)

    threading.Thread(target=work, name="look-up", daemon=True).start()
    return await answer


class Resolver(AbstractResolver):
    """Resolver of aiohttp that uses `look_up`."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=address[0],
                port=address[1],
                family=found,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for found, _, protocol, _, address in await look_up(host, port, family)
        ]

    async def close(self) -> None:
        """Do nothing: no state is held."""


class NoAnswer(Exception):
    """The server cannot be reached, breaks off, or does not speak HTTP."""


class LateAnswer(NoAnswer):
    """The answer was not complete in time."""


class LongAnswer(NoAnswer):
    """The answer has more bytes than the caller allows."""


@dataclass(frozen=True)
class Answer:
    """A complete answer."""

    status: int
    retry_after: str
    """Value of the header of that name; empty if there is none."""
    content: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def busy_s(self) -> float | None:
        """Seconds that `Retry-After` names, unchecked; None if it names none, as with a date."""
        return float(self.retry_after) if _SECONDS.fullmatch(self.retry_after) else None


def pause_s(failures: int, first_s: float, longest_s: float) -> float:
    """Return the pause after consecutive failures: each doubles the last, up to the longest."""
    return min(longest_s, first_s * 2 ** min(failures, 10))


class Retry:
    """Pauses between the attempts of one request until a deadline; any thread may use its own.

    Args:
        server: name of the server, for the log.
        deadline: of the monotonic clock; the caller may move it.
        log: receives a warning before the first pause, and a line once the server answers.
    """

    FIRST_S, LONGEST_S = 0.05, 2.0

    def __init__(self, server: str, deadline: float, log: logging.Logger) -> None:
        self._server, self.deadline, self._log = server, deadline, log
        self._failures, self._waiting = 0, False

    def pause(self, trouble: str, busy_s: float = 0.0) -> bool:
        """Sleep before the next attempt; return False at once if the deadline comes before it.

        Args:
            trouble: why the last attempt failed.
            busy_s: seconds that an overloaded server asks for; 0.0 if it is not.
        """
        seconds = max(pause_s(self._failures, self.FIRST_S, self.LONGEST_S), busy_s)
        if time.monotonic() + seconds > self.deadline:
            return False
        if not self._waiting:
            self._log.warning("waiting for %s: %s", self._server, trouble)
            self._waiting = True
        time.sleep(seconds)
        self._failures = 0 if busy_s else self._failures + 1
        return True

    def answered(self) -> None:
        """Log that the server answers again, if it was waited for."""
        if self._waiting:
            self._log.info("%s answers again", self._server)


async def fetch(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    max_bytes: int,
    timeout_s: float,
    idle_s: float | None = None,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    redirects: int = 0,
) -> Answer:
    """Sends one request and returns the complete answer, whatever its status.

    Args:
        session: the connections to use.
        method, url, body, headers: the request.
        max_bytes: a longer answer is refused before it is read.
        timeout_s: for the whole request, so that an endless drip ends too.
        idle_s: for each part of the request in which no byte moves; None: only `timeout_s` counts.
        redirects: how many to follow; with 0, a redirect is returned as the answer.

    Raises:
        LateAnswer: `timeout_s` or `idle_s` has passed.
        LongAnswer: the answer is longer than `max_bytes`.
        NoAnswer: any other failure of the connection, or a URL that cannot be used.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    late = [f"no whole answer within {timeout_s:.1f} s"] if timeout_s < math.inf else []
    late += [] if idle_s is None else [f"no byte for {idle_s:g} s"]
    with translated_errors(", or ".join(late)):
        async with asyncio.timeout_at(end) as limit:

            def moved() -> None:
                if idle_s is not None:
                    limit.reschedule(min(end, loop.time() + idle_s))

            async def upload() -> AsyncIterator[bytes]:
                for start in range(0, len(body), _UPLOAD_PIECE_BYTES):
                    moved()
                    yield body[start : start + _UPLOAD_PIECE_BYTES]
                moved()

            moved()
            length = {"Content-Length": str(len(body))} if body else {}
            async with session.request(
                method,
                url,
                data=upload() if body else None,
                headers=AS_IT_IS | length | dict(headers or {}),
                timeout=aiohttp.ClientTimeout(sock_connect=min(CONNECT_S, timeout_s)),
                allow_redirects=redirects > 0,
                max_redirects=redirects + 1,  # aiohttp gives up at this one
            ) as response:
                if (response.content_length or 0) > max_bytes:
                    raise LongAnswer(
                        f"{response.content_length} bytes, at most {max_bytes} expected"
                    )
                content = bytearray()
                async for piece in response.content.iter_any():
                    moved()
                    if len(content) + len(piece) > max_bytes:
                        raise LongAnswer(f"more than the {max_bytes} bytes expected")
                    content.extend(piece)
                retry_after = response.headers.get("Retry-After", "")
                return Answer(response.status, retry_after, bytes(content))


@contextmanager
def translated_errors(late: str) -> Iterator[None]:
    """Raises `LateAnswer(late)` and `NoAnswer` instead of what aiohttp and asyncio raise.

    Errors of the disk pass: an `OSError` that aiohttp raises is always a `ClientError` too.
    """
    try:
        yield
    except TimeoutError as error:
        raise LateAnswer(late) from error
    except (aiohttp.ClientError, ValueError) as error:
        words = str(error).replace(" ssl:default", "")[:200]  # aiohttp's, of plain HTTP too
        raise NoAnswer(f"{type(error).__name__}: {words}") from error


class _Protocol(ResponseHandler):
    """Ends a connection whose server sends interim answers (100 to 199) without end.

    aiohttp skips any number of them. They take the event loop, and with it the time of honest
    servers, long before the deadline of the request.
    """

    _interim = 0

    def feed_data(self, data: Any, size: int = 0) -> None:
        self._interim = self._interim + 1 if 100 <= data[0].code < 200 else 0
        if self._interim <= _INTERIM_ANSWERS:
            super().feed_data(data, size)
        elif self.exception() is None and self.transport is not None:
            self.set_exception(aiohttp.ClientPayloadError("interim answers without end"))
            self.transport.abort()


def _public_socket(where: tuple[Any, ...]) -> socket.socket:
    """Return a socket for an address of `getaddrinfo`; what it connects to is what is checked."""
    family, kind, protocol, _, address = where
    if not is_public(address[0]):
        raise OSError(errno.EACCES, f"{address[0]} is no public address")
    return socket.socket(family, kind, protocol)


def new_session(
    *, tls: ssl.SSLContext | bool = True, public_only: bool = False, **options: Any
) -> aiohttp.ClientSession:
    """Returns connections that keep no cookies and decompress nothing.

    Args:
        tls: how https servers are checked; True: by the system's trust.
        public_only: connect to public addresses only, whatever name or number a URL has.
        options: other arguments of `aiohttp.ClientSession`.
    """
    factory = _public_socket if public_only else None
    connector = aiohttp.TCPConnector(limit=64, ssl=tls, resolver=Resolver(), socket_factory=factory)
    protocol: Any = partial(_Protocol, loop=asyncio.get_running_loop())
    connector._factory = protocol  # noqa: SLF001 - no public way to name the protocol
    return aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, **options
    )


def fetch_now(method: str, url: str, **options: Any) -> Answer:
    """Does what `fetch` does, with the same options and errors, where no event loop runs."""

    async def once() -> Answer:
        async with new_session() as session:
            return await fetch(session, method, url, **options)

    return asyncio.run(once())
