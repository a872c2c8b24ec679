"""A relay that nobody has to trust answers with anything: the coordinator waits, and goes on."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from runspec.common.keys import SigningKey
from runspec.common.latest import Latest, sign_latest
from runspec.common.roles import Roles
from tests.verify.coordinator.deployment import DEADLINE_S, RUN
from tests.verify.coordinator.filled import digest
from verify.coordinator import watch

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


@pytest.mark.parametrize("answer", ANSWERS)
async def test_what_it_says_ends_nothing(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_LEAST_PERIOD_S", 0.01)
    publisher = SigningKey.generate()
    nobody = frozenset[str]()
    roles = Roles(RUN, 0.0, 1e12, frozenset({publisher.public_hex}), nobody, nobody)
    document = sign_latest(RUN, 0, digest("manifest"), publisher)
    good = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(document) + document
    answers = [answer.encode("latin-1"), good]
    found: asyncio.Future[Latest] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answers.pop(0) if len(answers) > 1 else answers[0])
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        watching = asyncio.create_task(
            watch.watch_latest(
                f"http://127.0.0.1:{port}",
                run=RUN,
                roles=roles,
                newest=lambda: found.result().version if found.done() else None,
                published=found.set_result,
            )
        )
        either = {watching, found}
        await asyncio.wait(either, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        assert not watching.done(), watching.exception()
        assert found.result().version == 0
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
