"""The one HTTP client; `tests/broadcast` and `tests/verify` show what its callers make of it."""

from __future__ import annotations

import time

import pytest

from runspec.core.http_client import HttpClient, LateAnswer, LongAnswer
from tests.broadcast.scripted import Peer, Scripted


def echo_of_the_head(peer: Peer) -> None:
    while head := peer.read_request():
        peer.answer(head)


def test_an_upload_that_nobody_reads_ends_long_before_the_timeout() -> None:
    began = time.monotonic()
    body = bytes(64 * 2**20)
    with (
        Scripted(lambda peer: peer.wait(20)) as server,
        HttpClient() as client,
        pytest.raises(LateAnswer, match=r"or no byte for 0\.3 s"),
    ):
        client.fetch("POST", server.url, body=body, max_bytes=10, timeout_s=60, idle_s=0.3)
    assert time.monotonic() - began < 30


def test_redirects_are_followed_only_as_often_as_is_allowed() -> None:
    with Scripted(echo_of_the_head) as target:

        def elsewhere(peer: Peer) -> None:
            while peer.read_request():
                peer.answer(b"", "302 Found", f"Location: {target.url}/there")

        with Scripted(elsewhere) as server, HttpClient() as client:
            limits = {"max_bytes": 1000, "timeout_s": 20}
            assert client.fetch("GET", server.url, **limits).status == 302
            followed = client.fetch("GET", server.url, redirects=1, **limits)
            assert followed.content.startswith(b"GET /there HTTP/1.1")


def test_an_answer_without_a_length_is_bounded_too() -> None:
    def endless(peer: Peer) -> None:
        peer.read_request()
        peer.send(b"HTTP/1.1 200 OK\r\n\r\n")
        peer.drip(b"x")

    with (
        Scripted(endless) as server,
        HttpClient() as client,
        pytest.raises(LongAnswer, match="more than the 5 bytes"),
    ):
        client.fetch("GET", server.url, max_bytes=5, timeout_s=20)
