"""The newest due version is fetched ahead; what the evaluator had no time for is named."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from broadcast.client import WeightsClient
from sampler.evaluation.arrivals import Arrivals
from tests.broadcast.conftest import Run
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
