"""Heads of answers: read strictly, whoever wrote them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broadcast.http1 import Address, Head, parse_head, request
from broadcast.transport import Fault


def lines(*text: str) -> bytes:
    return "\r\n".join(text).encode("latin-1")


@pytest.mark.parametrize(
    ("data", "head"),
    [
        (lines("HTTP/1.1 200 OK", "Content-Length: 7"), Head(200, 7, True, "")),
        (lines("HTTP/1.1 200", "content-length:7  ", "Server: x"), Head(200, 7, True, "")),
        (lines("HTTP/1.1 200 ", "Content-Length: 7"), Head(200, 7, True, "")),
        (lines("HTTP/1.0 200 OK", "Content-Length: 7"), Head(200, 7, False, "")),
        (lines("HTTP/1.1 200 OK", "Connection: Close"), Head(200, None, False, "")),
        (lines("HTTP/1.1 429 Later", "Retry-After: 30"), Head(429, None, True, "30")),
        (lines("HTTP/1.1 429 Later", "Retry-After: Fri, 1"), Head(429, None, True, "Fri, 1")),
        (lines("HTTP/1.1 200 \xe9", "Server: \xe9"), Head(200, None, True, "")),
        (lines("HTTP/1.1 200 OK", *["Content-Length: 7"] * 2), Head(200, 7, True, "")),
        (lines("HTTP/1.1 200 OK", "Content-Encoding: identity"), Head(200, None, True, "")),
    ],
)
def test_what_a_head_says(data: bytes, head: Head) -> None:
    assert parse_head(data) == head


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "does not speak"),
        (lines("HTTP/2 200"), "does not speak"),
        (lines("HTTP/1.1 20"), "does not speak"),
        (lines("HTTP/1.1 600 No"), "does not speak"),
        (lines("HTTP/1.1 200 OK", ""), "malformed header"),
        (lines("HTTP/1.1 200 OK", "no colon"), "malformed header"),
        (lines("HTTP/1.1 200 OK", "A : b"), "malformed header"),
        (lines("HTTP/1.1 200 OK", "A: b", " folded"), "malformed header"),
        (lines("HTTP/1.1 200 OK", "A: b\nContent-Length: 7"), "malformed header"),
        (lines("HTTP/1.1 200 OK", "A: b\0"), "malformed header"),
        (lines("HTTP/1.1 200 OK", "Content-Length: -7"), "malformed content-length"),
        (lines("HTTP/1.1 200 OK", "Content-Length: 7, 7"), "malformed content-length"),
        (lines("HTTP/1.1 200 OK", "Content-Length: " + "9" * 5000), "malformed content-length"),
        (lines("HTTP/1.1 200 OK", "Content-Length: 7", "Content-Length: 8"), "two different"),
        (lines("HTTP/1.1 200 OK", "Transfer-Encoding: chunked"), "transfer-encoding"),
        (lines("HTTP/1.1 200 OK", "Content-Encoding: br"), "content-encoding"),
    ],
)
def test_what_no_head_may_say(data: bytes, said: str) -> None:
    with pytest.raises(Fault, match=said) as raised:
        parse_head(data)

    assert len(str(raised.value)) < 300  # it goes into messages


_PIECES = [b"HTTP/1.1 200 OK", b"\r\n", b"\n", b":", b"Content-Length: ", b"1", b"close", b"\xff"]


@given(st.binary(max_size=200) | st.lists(st.sampled_from(_PIECES)).map(b"".join))
def test_any_bytes_are_a_head_or_a_fault(data: bytes) -> None:
    try:
        head = parse_head(data)
    except Fault:
        return
    assert 100 <= head.status < 600
    assert head.length is None or head.length >= 0


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("http://a.example", Address(False, "a.example", 80, "a.example", "")),
        ("https://a.example/x/y", Address(True, "a.example", 443, "a.example", "/x/y")),
        ("http://[::1]:81", Address(False, "::1", 81, "[::1]:81", "")),
    ],
)
def test_where_a_url_points(url: str, server: Address) -> None:
    assert Address.of(url) == server


def test_a_request_as_it_goes_out() -> None:
    asked = request(Address.of("http://[::1]:81/p"), "a/b", {"X": "y"})

    assert asked == b"GET /p/a/b HTTP/1.1\r\nHost: [::1]:81\r\nX: y\r\n\r\n"
