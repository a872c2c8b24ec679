"""Commits asked of a server that speaks as the Hub does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from threading import Event

import pytest

from runspec.core.errors import UserError
from runspec.lock.cache import Repository
from runspec.lock.hub import MAX_BYTES, ask_commit
from tests.runspec.lock.repository import COMMIT, HubServer, hub

MODEL = Repository("model", "some/model")
DATA = Repository("dataset", "some/data")


@pytest.fixture
def server() -> Iterator[HubServer]:
    with hub() as running:
        yield running


def answer(sha: object) -> list[bytes]:
    return [json.dumps({"id": "some/model", "sha": sha}).encode()]


def test_a_branch_of_a_model_and_of_a_data_set(server: HubServer) -> None:
    server.answers = {
        "/api/models/some/model/revision/main": answer(COMMIT),
        "/api/datasets/some/data/revision/refs%2Fconvert": answer(COMMIT[::-1]),
    }
    env = {"HF_ENDPOINT": f"{server.url}/"}
    assert ask_commit(MODEL, None, env) == COMMIT
    assert ask_commit(DATA, "refs/convert", env) == COMMIT[::-1]


def test_a_token_does_not_travel_in_the_clear(server: HubServer) -> None:
    server.answers = {"/api/models/some/model/revision/main": answer(COMMIT)}
    ask_commit(MODEL, None, {"HF_ENDPOINT": server.url, "HF_TOKEN": "hunter2"})
    assert server.asked == [("/api/models/some/model/revision/main?expand=sha", None)]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (answer("main"), "the answer names no commit"),
        (answer(7), "the answer names no commit"),
        ([b"[]"], "a JSON object was expected"),
        ([b"<html>"], "Expecting value"),
        ([b" " * 2**16] * (MAX_BYTES // 2**16 + 1), f"more than the {MAX_BYTES} bytes"),
        (None, "404"),
    ],
)
def test_an_answer_that_is_none(server: HubServer, said: list[bytes] | None, why: str) -> None:
    if said is not None:
        server.answers = {"/api/models/some/model/revision/main": said}
    with pytest.raises(UserError, match="the commit of some/model is not known") as raised:
        ask_commit(MODEL, None, {"HF_ENDPOINT": server.url})
    assert why in str(raised.value) and server.url in raised.value.place


def test_a_server_that_goes_on_for_ever_is_left(server: HubServer) -> None:
    # given an answer that never ends, a byte now and then
    left = Event()

    def drops() -> Iterator[bytes]:
        while not left.wait(0.01):
            yield b" "

    server.answers = {"/api/models/some/model/revision/main": drops()}
    with pytest.raises(UserError, match=r"no whole answer within 0\.2 s"):
        ask_commit(MODEL, None, {"HF_ENDPOINT": server.url}, deadline_s=0.2)
    left.set()


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "nonsense", "http://[bad"])
def test_nobody_there(endpoint: str) -> None:
    with pytest.raises(UserError, match="is not known"):
        ask_commit(MODEL, None, {"HF_ENDPOINT": endpoint})


def test_offline_means_that_nothing_is_asked(server: HubServer) -> None:
    env = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "1"}
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        ask_commit(MODEL, None, env)
    assert server.asked == []
