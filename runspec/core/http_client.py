"""HTTP requests with deadlines and bounded answers.

aiohttp is the only HTTP library: servers use it, and so do all clients. `fetch` is for callers in
an event loop. `HttpClient` is for the others; it runs the same `fetch` in a loop of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

T = TypeVar("T")
CONNECT_S = 5.0
_UPLOAD_PIECE_BYTES = 64 * 1024
AS_IT_IS = {"Accept-Encoding": "identity"}
"""Answers are read as they came over the wire: nothing is decompressed."""


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
    idle = "" if idle_s is None else f", or no byte for {idle_s:g} s"
    with translated_errors(f"no whole answer within {timeout_s:.1f} s{idle}"):
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
                    content += piece
                    if len(content) > max_bytes:
                        raise LongAnswer(f"more than the {max_bytes} bytes expected")
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
        raise NoAnswer(f"{type(error).__name__}: {str(error)[:200]}") from error


class LoopThread:
    """An event loop in a daemon thread, for synchronous callers in any thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns what `work` returns; if the caller is interrupted, `work` is cancelled.

        Raises:
            NoAnswer: the loop was closed, by another thread too.
        """
        try:
            future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:
            work.close()
            raise NoAnswer("the client is closed") from error
        try:
            return future.result()
        except CancelledError as error:
            raise NoAnswer("the client was closed") from error
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Ends the loop. What other threads still run in it is cancelled."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        # Connections that are closing, and calls that came with the stop, are still in the queue.
        self._loop.run_until_complete(_settled())
        self._loop.close()


async def _settled() -> None:
    await asyncio.sleep(0)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for transport in list(getattr(asyncio.get_running_loop(), "_transports", {}).values()):
        transport.abort()
    for _ in range(3):  # a transport tells its protocol, then closes its socket
        await asyncio.sleep(0)


class HttpClient:
    """Synchronous client; threads may share it. It uses no proxy and keeps no cookies."""

    def __init__(self) -> None:
        self._loop = LoopThread("http-client")
        self._session = self._loop.run(_new_session())

    def close(self) -> None:
        """Closes the connections; no other thread may be using them."""
        self._loop.run(self._session.close())
        self._loop.close()

    def __enter__(self) -> HttpClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def fetch(self, method: str, url: str, **options: Any) -> Answer:
        """Does what the function `fetch` does, with the same options and errors."""
        return self._loop.run(fetch(self._session, method, url, **options))

    def stream(self, url: str, *, idle_s: float, take: Callable[[Iterator[bytes]], None]) -> Answer:
        """Gets something long piece by piece.

        Args:
            url: what to get; redirects are not followed.
            idle_s: time for each piece, and for the head of the answer.
            take: receives the pieces if the status is one of success; runs in the caller's thread.

        Returns:
            The status, without content.

        Raises:
            NoAnswer: the server cannot be reached or breaks off, also while `take` reads.
        """
        late = f"no byte within {idle_s:g} s"
        with translated_errors(late):
            response = self._loop.run(_opened(self._session, url, idle_s))
        try:
            retry_after = response.headers.get("Retry-After", "")
            answer = Answer(response.status, retry_after, b"")
            if answer.is_success:
                take(self._pieces(response, late))
            return answer
        finally:
            self._loop.run(_closed(response))

    def _pieces(self, response: aiohttp.ClientResponse, late: str) -> Iterator[bytes]:
        while True:
            with translated_errors(late):
                piece = self._loop.run(response.content.readany())
            if not piece:
                return
            yield piece


async def _new_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False)


async def _opened(
    session: aiohttp.ClientSession, url: str, idle_s: float
) -> aiohttp.ClientResponse:
    timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_S, sock_read=idle_s)
    return await session.get(url, headers=AS_IT_IS, timeout=timeout, allow_redirects=False)


async def _closed(response: aiohttp.ClientResponse) -> None:
    response.close()
