"""A relay that nobody has to trust answers with anything: the coordinator waits, and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from runspec.core.keys import SigningKey
from runspec.core.latest import Latest, sign_latest
from runspec.core.roles import Roles
from tests.verify.coordinator.deployment import DEADLINE_S, RUN
from tests.verify.coordinator.filled import digest
from verify.coordinator.services import closing

PLACES = ["http://a..b/", "http://[fe80::1%25eth\x91]/", "/\x18", "http://127.0.0.1:1/", "//", ""]
ANSWERS = [
    *(f"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: {place}\r\n\r\n" for place in PLACES),
    "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "HTTP/1.1 204 No Content\r\n\r\n",
    "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n",
    "nothing that is HTTP\r\n\r\n",
    "",
]


class Relay:
    """Serves answers in turn, the last for ever, to a coordinator that watches it."""

    def __init__(self) -> None:
        self.publisher, nobody = SigningKey.generate(), frozenset[str]()
        key = frozenset({self.publisher.public_hex})
        self.roles = Roles(RUN, 0.0, 1e12, key, nobody, nobody)
        self.asked = 0

    def latest(self, version: int) -> bytes:
        document = sign_latest(RUN, version, digest("manifest"), self.publisher)
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(document) + document

    @asynccontextmanager
    async def watched(
        self, *answers: bytes, newest: Callable[[], int | None], published: Callable[[Latest], None]
    ) -> AsyncIterator[asyncio.Task[None]]:
        serving = set[asyncio.Task[None] | None]()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            serving.add(asyncio.current_task())
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(answers[min(self.asked, len(answers) - 1)])
                self.asked += 1
                await writer.drain()
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

        async with await asyncio.start_server(serve, "127.0.0.1") as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            watching = asyncio.create_task(
                closing.watch_latest(
                    url, run=RUN, roles=self.roles, newest=newest, published=published
                )
            )
            yield watching
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await asyncio.gather(*(task for task in serving if task))


@pytest.mark.parametrize("answer", ANSWERS)
async def test_what_it_says_ends_nothing(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "_LEAST_PERIOD_S", 0.01)
    relay, found = Relay(), asyncio.get_running_loop().create_future()
    async with relay.watched(
        answer.encode("latin-1"),
        relay.latest(0),
        newest=lambda: 0 if found.done() else None,
        published=found.set_result,
    ) as watching:
        either = {watching, found}
        await asyncio.wait(either, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        assert not watching.done(), watching.exception()
        assert found.result().version == 0


async def test_one_that_shows_an_older_version_is_not_asked_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(closing, "_LEAST_PERIOD_S", 0.1)
    relay, seen = Relay(), list[Latest]()
    async with relay.watched(relay.latest(3), newest=lambda: 5, published=seen.append):
        await asyncio.sleep(0.35)
    assert 1 <= relay.asked <= 4
