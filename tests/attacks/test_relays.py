"""Relays of strangers that lie, sleep, redirect and ask for tokens, beside one honest server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from broadcast.transport import Access
from tests.broadcast.conftest import Run, fetched, newest, weights
from tests.broadcast.fake_relay import (
    Answer,
    FakeRelay,
    Request,
    flipped,
    head,
    honest,
    not_there,
    padded,
    server_error,
    silent,
)

TOKEN = "not-for-strangers"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Version 0 is published."""
    with ExitStack() as stack:
        run = Run(tmp_path / "run", stack)
        run.publish(0, weights())
        yield run


def unauthorised(request: Request) -> None:
    request.write(head("401 Unauthorized", 0, "WWW-Authenticate: Bearer"))


def strangers(run: Run, *answers: Answer) -> list[FakeRelay]:
    """Servers of the run's store that answer so whatever they are asked."""
    made = [run.static() for _ in answers]
    for server, answer in zip(made, answers, strict=True):
        server.answer("", answer)
    return made


def urls(servers: list[FakeRelay]) -> list[str]:
    return [server.url for server in servers]


class TestStrangersRelays:
    def test_a_version_arrives_whatever_they_answer_and_no_token_reaches_them(self, run):
        secret = run.static()

        def redirect(request: Request) -> None:
            request.write(head("302 Found", 0, f"Location: {secret.url}{request.path}"))

        answers = [flipped, padded, silent, redirect, unauthorised, not_there, server_error]
        hostile, own = strangers(run, *answers), run.static()
        own.answer(
            "/chunks/", lambda r: (honest if all(s.asked() for s in hostile) else not_there)(r)
        )
        client = run.client(own.url, access=Access(TOKEN))
        client.set_volunteers(urls(hostile), public_only=False)
        assert newest(client).version == 0
        assert fetched(client) == weights()
        assert all(TOKEN.encode() in each for each in own.heads)
        for server in hostile:
            assert server.asked() == len(server.paths) > 0, "for chunks and nothing else"
            assert not any(b"authorization" in each.lower() for each in server.heads)
        assert secret.paths == []

    @pytest.mark.parametrize("lie", [flipped, padded])
    def test_one_that_lied_is_not_asked_again(self, run, lie):
        (liar,), own = strangers(run, lie), run.static()
        own.answer("/chunks/", lambda r: (honest if liar.asked() else not_there)(r))
        client = run.client(own.url)
        client.set_volunteers(urls([liar]), public_only=False)
        assert fetched(client) == weights()
        asked = liar.asked()  # requests of one moment lie together
        client.set_volunteers([], public_only=False)
        client.set_volunteers(urls([liar]), public_only=False)
        run.publish(1, weights(seed=1))
        assert fetched(client, 1) == weights(seed=1)
        assert liar.asked() == asked

    def test_their_private_addresses_are_not_connected_to(self, run):
        (near,), own = strangers(run, honest), run.static()
        client = run.client(own.url)
        port = near.url.rpartition(":")[2]
        names = ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0.0.0.0", "2130706433")
        client.set_volunteers([f"http://{n}:{port}" for n in names], public_only=True)
        assert fetched(client) == weights()
        assert near.paths == []

    def test_a_version_arrives_from_them_where_the_run_has_no_chunks_itself(self, run):
        good, own = strangers(run, honest, honest), run.static()
        own.answer("/chunks/", not_there)
        client = run.client(own.url)
        client.set_volunteers(urls(good), public_only=False)
        assert fetched(client) == weights()
        received = client.received
        assert received > 5500 and all(each.asked() for each in good)
        asked = [each.asked() for each in good]
        own.answer("/chunks/", honest)
        client.set_volunteers([], public_only=False)
        run.publish(1, weights(seed=1))
        assert fetched(client, 1) == weights(seed=1)
        assert [each.asked() for each in good] == asked, "they left the directory"
        assert client.received > received
