"""Requests to a coordinator: tried again while it is away, bounded, and refused in its words."""

from __future__ import annotations

import http.server
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from runspec.core.errors import UserError
from runspec.core.http_client import NoAnswer
from runspec.core.keys import SigningKey
from verify.coordinator_http import CoordinatorHttp, RunFinished, SubmissionRefused
from verify.request_auth import ENVELOPE


@contextmanager
def server(
    *answers: tuple[int, bytes], deadline_s: float = 5.0
) -> Iterator[tuple[CoordinatorHttp, list[dict[str, str]]]]:
    """Gives some answers one after the other; a client of it, and the headers of what it asked."""
    left, asked = list(answers), []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(dict(self.headers.items()))
            status, body = left.pop(0)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if status == 429:
                self.send_header("Retry-After", body.decode())
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{serving.server_port}/"
        client = CoordinatorHttp(url, SigningKey.generate(), run="demo", deadline_s=deadline_s)
        yield client, asked
        serving.shutdown()
        thread.join()


def test_a_request_is_signed_anew_until_it_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    # Given a coordinator that starts up
    starting = (503, b'{"error": "starting"}')
    with (
        server(starting, starting, (200, b"here")) as (client, asked),
        caplog.at_level(logging.INFO),
    ):
        # When it is asked
        answer = client.call("GET", "/v1/roles", envelope=b"signed")
    # Then the last answer counts, no signature came twice, and the log tells of it once
    assert answer.content == b"here"
    assert len({headers["Runspec-Nonce"] for headers in asked}) == 3
    assert {headers[ENVELOPE] for headers in asked} == {"c2lnbmVk"}
    told = [record.getMessage() for record in caplog.records if "coordinator" in record.message]
    assert [told[0].rpartition(": ")[2], told[1].rpartition(" ")[2]] == ["starting", "again"]
    assert len(told) == 2


@pytest.mark.parametrize(
    ("status", "error"), [(410, RunFinished), (409, SubmissionRefused), (403, UserError)]
)
def test_a_refusal_is_in_the_words_of_the_coordinator(status: int, error: type[Exception]) -> None:
    with (
        server((status, b'{"error": "not you"}')) as (client, _),
        pytest.raises(error, match="not you") as raised,
    ):
        client.call("GET", "/v1/roles")
    assert type(raised.value) is error


@pytest.mark.parametrize(
    "answer", [b"\x1b[2J" + b"x" * 9000, b'{"error": "\\u001b[2J' + b"x" * 9000 + b'"}']
)
def test_words_that_are_none_of_a_coordinators_are_short_and_plain(answer: bytes) -> None:
    """They go into a log, or onto somebody's terminal."""
    with server((403, answer)) as (client, _), pytest.raises(UserError) as out:
        client.call("GET", "/v1/roles")
    assert "403, ?[2Jxxx" in str(out.value) and len(str(out.value)) < 1100


def test_more_bytes_than_were_asked_for_are_not_believed() -> None:
    with server((200, b"x" * 11), (200, b"x" * 10)) as (client, _):
        with pytest.raises(UserError, match="11 bytes, at most 10 expected"):
            client.call("GET", "/v1/roles", max_bytes=10)
        assert client.call("GET", "/v1/roles", max_bytes=10).content == b"x" * 10


def test_what_is_long_comes_in_pieces_and_what_is_not_there_is_named() -> None:
    got: list[bytes] = []

    def take(pieces: Iterable[bytes]) -> None:
        got.append(b"".join(pieces))

    with server((500, b"soon"), (200, b"x" * 100_000), (404, b"")) as (client, _):
        client.stream("/v1/data/one", take)
        with pytest.raises(UserError, match="/v1/data/two: answers 404"):
            client.stream("/v1/data/two", take)
    assert got == [b"x" * 100_000]


def breaking(client: CoordinatorHttp, *sent: int) -> list[int]:
    """Streams from a server each of whose answers takes 0.2 s and breaks off after so many bytes,
    the last one excepted; what came at each attempt."""
    got: list[int] = []

    def take(pieces: Iterable[bytes]) -> None:
        time.sleep(0.2)
        got.append(len(b"".join(pieces)))
        if len(got) < len(sent):
            raise NoAnswer("the connection broke")

    client.stream("/v1/data/one", take)
    return got


def test_what_is_long_and_breaks_off_late_is_asked_for_again_while_more_comes_each_time() -> None:
    """A slow line takes longer for a file than a coordinator may be away."""
    sent = (10, 20, 30, 40, 50)
    with server(*((200, b"x" * n) for n in sent), deadline_s=0.5) as (client, _):
        assert breaking(client, *sent) == list(sent)
    with (
        server(*((200, b"x" * 10) for _ in range(9)), deadline_s=0.5) as (client, asked),
        pytest.raises(UserError, match="the connection broke"),
    ):
        breaking(client, *[10] * 9)
    assert 2 <= len(asked) <= 4


@pytest.mark.parametrize(
    ("said", "pause"), [("1", 1.0), ("3600", 60.0), ("0", 0.05), ("-1", 2.0), ("soon", 2.0)]
)
def test_a_coordinator_with_too_much_to_do_is_asked_when_it_says(
    monkeypatch: pytest.MonkeyPatch, said: str, pause: float
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with server((429, said.encode()), (200, b"here"), deadline_s=100.0) as (client, _):
        assert client.call("GET", "/v1/roles").content == b"here"
    assert pauses == [pause]


def test_a_coordinator_that_has_too_much_to_do_beyond_the_deadline_is_named() -> None:
    with (
        server((429, b"30")) as (client, _),
        pytest.raises(UserError, match=r"answers 429: 30 \(tried GET /v1/roles for 5 s\)"),
    ):
        client.call("GET", "/v1/roles")


@pytest.mark.parametrize(
    ("status", "body", "remedy"),
    [
        (503, b'{"error": "the coordinator waits for its disk or its database"}', "its log says"),
        (507, b'{"error": "cannot store the file: No space left on device"}', "its log says"),
        (429, b"30", "overloaded"),
    ],
)
def test_whoever_waited_in_vain_is_told_for_what(status: int, body: bytes, remedy: str) -> None:
    with (
        server(*[(status, body)] * 400, deadline_s=2.0) as (client, _),
        pytest.raises(UserError, match=f"answers {status}: .*tried POST /v1/leases for 2 s") as out,
    ):
        client.call("POST", "/v1/leases")
    assert remedy in (out.value.remedy or "")
    assert (out.value.place or "").startswith("coordinator http://127.0.0.1:")


def test_a_coordinator_that_is_not_there_is_named() -> None:
    client = CoordinatorHttp(
        "http://127.0.0.1:9", SigningKey.generate(), run="demo", deadline_s=0.1
    )
    with pytest.raises(UserError, match="cannot be reached") as out:
        client.call("GET", "/v1/roles")
    assert out.value.place == "coordinator http://127.0.0.1:9"
    assert out.value.remedy == "check that the coordinator runs and that its address is right"
