"""Answers with a file, header by header; and what is answered to what nobody should send."""

from __future__ import annotations

import logging
import socket

import httpx
import pytest

from broadcast.answers import byte_range

from .conftest import CHUNK_BYTES, Run, Served, large_chunk, weights


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-9", range(10)),
        ("bytes=90-", range(90, 100)),
        ("bytes=-7", range(93, 100)),
        ("bytes=-1000", range(100)),
        ("bytes=99-99", range(99, 100)),
        ("bytes=50-1000", range(50, 100)),
        # none of these bytes exist
        ("bytes=100-", range(0)),
        ("bytes=100-200", range(0)),
        ("bytes=-0", range(0)),
        # a server may answer these with the whole
        (None, None),
        ("", None),
        ("bytes=", None),
        ("bytes=-", None),
        ("bytes=5-4", None),
        ("bytes=0-1,5-6", None),
        ("bytes=a-b", None),
        ("bytes=1", None),
        ("lines=0-9", None),
        ("bytes=0-9x", None),
        ("bytes=\u0661-\u0662", None),
        (f"bytes={'9' * 1000}-", None),
    ],
)
def test_ranges(header: str | None, expected: range | None) -> None:
    found = byte_range(header, 100)

    assert found == expected


@pytest.fixture
def origin(run: Run) -> Served:
    run.publish(0, weights())
    return run.origin()


@pytest.fixture
def chunk(run: Run, origin: Served) -> tuple[str, bytes]:
    """URL and contents of a chunk."""
    path = next(path for path in run.chunks() if path.stat().st_size == CHUNK_BYTES)
    return f"{origin.url}/demo/chunks/{path.name}", path.read_bytes()


def test_a_chunk_may_be_kept_for_ever(chunk: tuple[str, bytes]) -> None:
    url, data = chunk
    answer = httpx.get(url)

    assert (answer.status_code, answer.content) == (200, data)
    assert answer.headers["Cache-Control"] == "max-age=31536000, immutable"
    assert answer.headers["ETag"] == f'"{url.rpartition("/")[2]}"'
    assert answer.headers["Accept-Ranges"] == "bytes"
    assert answer.headers["Content-Type"] == "application/octet-stream"
    again = httpx.get(url, headers={"If-None-Match": answer.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert httpx.get(url, headers={"If-None-Match": '"other"'}).status_code == 200


def test_parts_of_a_chunk(chunk: tuple[str, bytes]) -> None:
    url, data = chunk
    part = httpx.get(url, headers={"Range": "bytes=10-19"})
    beyond = httpx.get(url, headers={"Range": f"bytes={CHUNK_BYTES}-"})

    assert (part.status_code, part.content) == (206, data[10:20])
    assert part.headers["Content-Range"] == f"bytes 10-19/{CHUNK_BYTES}"
    assert beyond.status_code == 416
    assert beyond.headers["Content-Range"] == f"bytes */{CHUNK_BYTES}"


def test_what_may_change_is_asked_for_again(run: Run, origin: Served) -> None:
    # given readers that keep what may change
    urls = [f"{origin.url}/demo/{name}" for name in ("roles.json", "latest.json")]
    kept = [httpx.get(url) for url in urls]
    known = [{"If-None-Match": answer.headers["ETag"]} for answer in kept]
    assert [answer.headers["Cache-Control"] for answer in kept] == ["no-cache"] * 2
    # when they ask again, then they hear that nothing has changed, until it has
    same = [httpx.get(url, headers=h) for url, h in zip(urls, known, strict=True)]
    assert [answer.status_code for answer in same] == [304, 304]
    run.publish(1, weights(seed=1))  # writes both anew
    changed = [httpx.get(url, headers=h) for url, h in zip(urls, known, strict=True)]
    assert [answer.status_code for answer in changed] == [200, 200]
    # and a manifest never changes
    manifest = httpx.get(f"{origin.url}/demo/versions/0/manifest.json")
    assert "immutable" in manifest.headers["Cache-Control"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_nothing_can_be_written(origin: Served, method: str) -> None:
    for path in ("/demo/latest.json", "/nothing"):
        answer = httpx.request(method, origin.url + path)
        assert (answer.status_code, answer.headers["Allow"]) == (405, "GET,HEAD")


def raw(served: Served, request: bytes) -> bytes:
    """The first bytes of the answer, and b"" where the connection just ends."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        try:
            connection.sendall(request)
            return connection.recv(12)
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /healthz?" + b"x" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 10_000 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"X: x\r\n" * 200 + b"\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 2_000_000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"\x00" * 100,
    ],
    ids=["path", "query", "header", "headers", "endless header", "tls", "no path", "zeros"],
)
def test_a_head_that_is_none_ends_the_connection(
    origin: Served, request_head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        answer = raw(origin, request_head)

    assert answer in (b"", b"HTTP/1.0 400")
    assert caplog.messages == []  # a stranger does not fill the log
    assert httpx.get(f"{origin.url}/healthz").status_code == 200


def test_the_body_of_a_request_is_not_waited_for(origin: Served) -> None:
    head = b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", origin.port), timeout=30) as connection:
        connection.sendall(head + b"x")
        received = bytearray()
        while data := connection.recv(1000):
            received += data
    assert received.startswith(b"HTTP/1.1 200")


def test_a_file_that_became_shorter_is_not_sent_as_whole(run: Run, origin: Served) -> None:
    # given a reader that has begun a chunk of several pieces
    large = large_chunk(run)
    with socket.create_connection(("127.0.0.1", origin.port), timeout=30) as connection:
        connection.sendall(f"GET /demo/chunks/{large.name} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert connection.recv(12) == b"HTTP/1.1 200"
        # when the file loses its end
        with large.open("r+b") as file:
            file.truncate(32 * 1024 * 1024)
        # then the connection ends early, which the reader sees
        received = 0
        try:
            while data := connection.recv(1024 * 1024):
                received += len(data)
        except ConnectionResetError:
            pass
    assert received < 33 * 1024 * 1024
