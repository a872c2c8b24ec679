"""The prefetch of a large version holds up neither the current one nor its sampling."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from sampler.worker.versions import Versions
from tests.broadcast.conftest import Run
from tests.broadcast.fake_relay import FakeRelay, Request, held_until
from tests.broadcast.model_versions import ModelVersions
from tests.waiting import eventually

DEADLINE_S = 20.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    (tmp_path / "store").mkdir()
    with ExitStack() as stack:
        yield Run(tmp_path, stack)


@pytest.fixture
def server(run: Run) -> FakeRelay:
    return run.static()


@pytest.fixture
def versions(run: Run, server: FakeRelay) -> Iterator[Versions]:
    made = Versions(
        [server.url],
        run=run.name,
        root_public_key=run.root,
        cache_dir=run.folder / "cache",
        fetch_s=DEADLINE_S,
        log=logging.getLogger("test"),
    )
    with closing(made):
        yield made


def test_old_versions_go_but_never_while_another_is_fetched(
    run: Run, server: FakeRelay, versions: Versions
) -> None:
    model, cache = ModelVersions(run), run.folder / "cache"
    asked, go_on = threading.Event(), threading.Event()

    def hold_back(request: Request) -> None:
        asked.set()
        held_until(go_on)(request)

    def cached() -> set[str]:
        return {path.name for path in cache.iterdir() if path.name.startswith("v")}

    # Given versions 0 and 1, the second fetched ahead
    model.publish(0)
    assert versions.first() == (0, cache / "v0")
    digest = model.publish(1)
    eventually(lambda: cached() == {"v0", "v1"}, "version 1 is prefetched")

    # When the worker switches to 1 while version 2 is on its way
    server.answer("/versions/2/", hold_back)
    model.publish(2)
    assert asked.wait(DEADLINE_S)
    began = time.monotonic()
    assert versions.get(1, digest) == cache / "v1"
    versions.keep(1)

    # Then it does not wait for it, and the old version goes with a later switch
    assert time.monotonic() - began < DEADLINE_S / 4
    assert cached() == {"v0", "v1"}
    go_on.set()
    eventually(lambda: "v2" in cached(), "version 2 is fetched")
    eventually(lambda: versions.keep(2) is None and cached() == {"v2"}, "old versions are removed")


def test_what_the_next_delta_starts_from_is_never_removed(
    run: Run, versions: Versions, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = ModelVersions(run)
    # Given a worker that samples with version 0 and has 1 already
    model.publish(0)
    versions.first()
    model.publish(1, base=0)
    eventually(lambda: "version 1 fetched" in caplog.text, "version 1 is prefetched")

    # When it tidies up, and versions go on coming, as deltas alone
    for number in (2, 3):
        versions.keep(0)
        model.publish(number, base=number - 1)
        eventually(lambda n=number: f"version {n} fetched" in caplog.text, f"version {number}")

    # Then each is made of the one before, and has the numbers that were published
    assert "version 3 fetched from held version 2 and deltas 3" in caplog.text
    made = (run.folder / "cache" / "v3" / "model.safetensors").read_bytes()
    assert made == model.files(3)["model.safetensors"]
