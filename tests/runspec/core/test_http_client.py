"""The one HTTP client; `tests/broadcast` and `tests/verify` show what its callers make of it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from runspec.core.http_client import LateAnswer, LongAnswer, NoAnswer, fetch, fetch_now, new_session
from tests.broadcast.scripted import Peer, Scripted


def echo_of_the_head(peer: Peer) -> None:
    while head := peer.read_request():
        peer.answer(head)


async def test_an_upload_that_nobody_reads_ends_long_before_the_timeout() -> None:
    gave_up = threading.Event()

    def deaf(peer: Peer) -> None:
        gave_up.wait(20)
        peer.wait_for_the_end()

    body, began = bytes(64 * 2**20), time.monotonic()
    with Scripted(deaf) as server:
        async with new_session() as session:
            with pytest.raises(LateAnswer, match=r"or no byte for 0\.3 s"):
                await fetch(
                    *(session, "POST", server.url),
                    body=body,
                    max_bytes=10,
                    timeout_s=60,
                    idle_s=0.3,
                )
            gave_up.set()
        while not server.ended:
            await asyncio.sleep(0.01)
    assert time.monotonic() - began < 30


def test_redirects_are_followed_only_as_often_as_is_allowed() -> None:
    with Scripted(echo_of_the_head) as target:

        def elsewhere(peer: Peer) -> None:
            while peer.read_request():
                peer.answer(b"", "302 Found", f"Location: {target.url}/there")

        with Scripted(elsewhere) as server:
            limits = {"max_bytes": 1000, "timeout_s": 20}
            assert fetch_now("GET", server.url, **limits).status == 302
            followed = fetch_now("GET", server.url, redirects=1, **limits)
            assert followed.content.startswith(b"GET /there HTTP/1.1")


def test_an_answer_without_a_length_is_bounded_too() -> None:
    def endless(peer: Peer) -> None:
        peer.read_request()
        peer.send(b"HTTP/1.1 200 OK\r\n\r\n")
        peer.drip(b"x")

    with (
        Scripted(endless) as server,
        pytest.raises(LongAnswer, match="more than the 5 bytes"),
    ):
        fetch_now("GET", server.url, max_bytes=5, timeout_s=20)


def test_interim_answers_without_end_end_the_request_at_once() -> None:
    def endless(peer: Peer) -> None:
        peer.read_request()
        peer.send(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)
        peer.wait_for_the_end()

    with Scripted(endless) as server, pytest.raises(NoAnswer, match="without end"):
        fetch_now("GET", server.url, max_bytes=5, timeout_s=600)


def test_a_few_interim_answers_are_skipped() -> None:
    def hesitant(peer: Peer) -> None:
        peer.read_request()
        peer.send(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 3)
        peer.answer(b"there")

    with Scripted(hesitant) as server:
        assert fetch_now("GET", server.url, max_bytes=5, timeout_s=20).content == b"there"
