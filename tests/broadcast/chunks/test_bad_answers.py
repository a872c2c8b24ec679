"""Answers that are refused, or break off: each is a fault with a name, and whose it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from broadcast.transport import Busy, Fault, Lie, NotThere
from tests.broadcast.chunks.fetching import BODY, fetch, honest
from tests.broadcast.scripted import Peer, Serve
from tests.waiting import eventually


def saying(head: str, body: bytes = b"") -> Callable[[Peer], None]:
    def answer(peer: Peer) -> None:
        peer.read_request()
        peer.send(head.replace("\n", "\r\n").encode() + body)
        peer.wait_for_the_end()

    return answer


OK = f"HTTP/1.1 200 OK\nContent-Length: {len(BODY)}\n"


@pytest.mark.parametrize(
    ("script", "kind", "said"),
    [
        (saying(f"{OK}\n", BODY[:-1] + b"?"), Lie, "not the chunk's"),
        (saying("HTTP/1.1 200 OK\nContent-Length: 9\n\n"), Lie, "9 bytes that are not"),
        (saying(f"HTTP/1.1 200 OK\nContent-Length: {10**14}\n\n"), Lie, "bytes that are not"),
        (saying("HTTP/1.1 200 OK\n\n", BODY), Fault, "does not tell the length"),
        (saying("HTTP/1.1 404 Not Found\nContent-Length: 0\n\n"), NotThere, "404"),
        (saying("HTTP/1.1 500 Oh\nContent-Length: 0\n\n"), Fault, "status 500"),
        (saying("HTTP/1.1 302 Found\nLocation: http://127.0.0.1/\n\n"), Fault, "status 302"),
        (saying("HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n"), Fault, "does not tell"),
        (saying(f"{OK}Transfer-Encoding: chunked\n\n"), Fault, "Transfer-Encoding can't be"),
        (saying(f"{OK}X: {'y' * 20_000}\n\n"), Fault, "more than 8190 bytes"),
        (saying(OK + "".join(f"X-{i}: y\n" for i in range(5000)) + "\n"), Fault, "many headers"),
        (saying("SSH-2.0-OpenSSH_9.9\n\n"), Fault, "Bad status line"),
    ],
)
async def test_a_bad_answer_is_refused(
    session: aiohttp.ClientSession,
    serve: Serve,
    file: Path,
    script: Callable[[Peer], None],
    kind: type[Fault],
    said: str,
) -> None:
    server = serve(script)

    with pytest.raises(Fault, match=said) as raised:
        await fetch(session, server.url, file)

    assert type(raised.value) is kind
    await session.close()
    eventually(lambda: server.ended == 1, "the connection ends")


@pytest.mark.parametrize("length", [len(BODY) - 1, len(BODY) + 1])
async def test_a_body_of_the_wrong_length_is_not_even_read(
    session: aiohttp.ClientSession, serve: Serve, file: Path, length: int
) -> None:
    server = serve(saying(f"HTTP/1.1 200 OK\nContent-Length: {length}\n\n", BODY))

    with pytest.raises(Lie):
        await fetch(session, server.url, file)

    assert file.read_bytes() == b""


async def test_a_server_may_ask_for_patience(
    session: aiohttp.ClientSession, serve: Serve, file: Path
) -> None:
    server = serve(saying("HTTP/1.1 429 Slow down\nRetry-After: 7\n\n"))

    with pytest.raises(Busy) as raised:
        await fetch(session, server.url, file)

    assert raised.value.retry_after_s == 7


def reset_in_the_body(peer: Peer) -> None:
    peer.read_request()
    peer.send(f"HTTP/1.1 200 OK\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY[:1000])
    peer.reset()


def closed_in_the_head(peer: Peer) -> None:
    peer.read_request()
    peer.send(b"HTTP/1.1 200 OK\r\nContent-")


def closed_in_the_body(peer: Peer) -> None:
    peer.read_request()
    peer.send(f"HTTP/1.1 200 OK\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY[:1000])


def closed_at_once(peer: Peer) -> None:
    return


def reset_at_once(peer: Peer) -> None:
    peer.read_request()
    peer.reset()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (reset_in_the_body, r"not completed|reset by peer"),
        (closed_in_the_body, f"received 1000 of {len(BODY)} bytes"),
        (closed_in_the_head, "ServerDisconnected"),
        (closed_at_once, r"disconnected|reset by peer|Broken pipe"),
        (reset_at_once, "reset by peer"),
    ],
)
async def test_an_answer_that_breaks_off_is_a_fault(
    session: aiohttp.ClientSession,
    serve: Serve,
    file: Path,
    script: Callable[[Peer], None],
    said: str,
) -> None:
    server = serve(script)

    with pytest.raises(Fault, match=said):
        await fetch(session, server.url, file)

    assert server.connections <= 2  # aiohttp tries once more where nothing was answered


async def test_nobody_there_is_a_fault(
    session: aiohttp.ClientSession, serve: Serve, file: Path
) -> None:
    server = serve(honest)
    server.stop()

    with pytest.raises(Fault, match="Cannot connect to host"):
        await fetch(session, server.url, file)


async def test_a_name_that_is_nobodys_is_a_fault(
    session: aiohttp.ClientSession, file: Path
) -> None:
    with pytest.raises(Fault, match=r"DNSError|UnicodeError"):
        await fetch(session, f"http://{'a' * 70}.invalid", file)
