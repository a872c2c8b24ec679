"""The newest due version is fetched ahead; what the evaluator had no time for is named."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from broadcast.client import WeightsClient
from sampler.evaluation.arrivals import Arrivals
from tests.broadcast.conftest import Run
from tests.broadcast.fake_relay import Request, held_until
from tests.broadcast.model_versions import ModelVersions
from tests.waiting import eventually

DEADLINE_S = 20.0
EVERY = 2


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    (tmp_path / "store").mkdir()
    with ExitStack() as stack:
        yield Run(tmp_path, stack)


def even(after: int, newest: int) -> Sequence[int]:
    return [version for version in range(after + 1, newest + 1) if version % EVERY == 0]


def test_a_version_counts_as_seen_once_it_is_there(run: Run) -> None:
    # given a version that is announced, whose files are slow to come
    server, asked, go_on = run.static(), threading.Event(), threading.Event()

    def hold_back(request: Request) -> None:
        asked.set()
        held_until(go_on)(request)

    server.answer("/versions/0/", hold_back)
    ModelVersions(run).publish(0)

    def client() -> WeightsClient:
        cache = run.folder / "cache"
        return WeightsClient([server.url], run=run.name, root_public_key=run.root, cache_dir=cache)

    with ExitStack() as up:
        arrivals = Arrivals(client, even, fetch_s=DEADLINE_S, log=logging.getLogger("test"))
        up.callback(arrivals.close)
        assert asked.wait(DEADLINE_S)
        # then an evaluator that waits for the last version goes on waiting
        assert arrivals.take(0.1) is None and arrivals.newest == -1
        go_on.set()
        arrived = arrivals.take(DEADLINE_S)
        assert arrived is not None and arrived.version == 0
        eventually(lambda: arrivals.newest == 0, "it is seen")


def test_the_newest_due_version_is_taken_and_the_others_are_named(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    model, server, cache = ModelVersions(run), run.static(), run.folder / "cache"

    def client() -> WeightsClient:
        return WeightsClient([server.url], run=run.name, root_public_key=run.root, cache_dir=cache)

    # given version 0, which the evaluator works on
    model.publish(0)
    with ExitStack() as up:
        arrivals = Arrivals(client, even, fetch_s=DEADLINE_S, log=logging.getLogger("test"))
        up.callback(arrivals.close)
        first = arrivals.take(DEADLINE_S)
        assert first is not None and first.version == 0

        # when four more come out meanwhile
        for version in range(1, 5):
            model.publish(version)
            eventually(lambda v=version: arrivals.newest == v, f"version {version} is seen")

        # then the one that it had no time for is named
        eventually(lambda: "version 2 is not evaluated" in caplog.text, "it says so")
        assert "version 1 " not in caplog.text and "version 3 " not in caplog.text
        # and it goes on with the newest that is due, and the one in hand was not removed
        assert (cache / "v0").exists()
        second = arrivals.take(DEADLINE_S)
        assert second is not None and (second.version, second.path) == (4, cache / "v4")
        # and there is nothing else
        assert arrivals.take(0.0) is None
