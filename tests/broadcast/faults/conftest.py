"""What the tests of faults share: fake relays, processes, and the patience of a waiting reader."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from broadcast.store import publish

from ..conftest import Run
from ..processes import Processes
from .fake_relay import FakeRelay

SLACK_S = 4.0
"""What a busy machine may add to a deadline. (A wait that forgets its deadline lasts longer.)"""


def publish_in_chunks_of(chunk_bytes: int, run: Run, version: int, files: dict[str, bytes]) -> str:
    """Publishes as `Run.publish` does, in chunks of another size."""
    directory = run.folder / f"files-{version}"
    directory.mkdir()
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return publish(
        run.store,
        directory,
        run=run.name,
        version=version,
        key=run.key,
        roles=run.roles,
        chunk_bytes=chunk_bytes,
    )


@pytest.fixture
def fake(run: Run) -> Iterator[Callable[..., FakeRelay]]:
    """Starts fake relays over the run's store, or another folder."""
    started: list[FakeRelay] = []

    def start(folder: Path | None = None) -> FakeRelay:
        started.append(FakeRelay(folder or run.store))
        return started[-1]

    yield start
    for relay in started:
        relay.stop()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.end()


@pytest.fixture
def within() -> Callable[[float], AbstractContextManager[None]]:
    """`with within(deadline_s):` the block does not outlast its deadline."""

    @contextmanager
    def check(deadline_s: float) -> Iterator[None]:
        began = time.monotonic()
        yield
        took = time.monotonic() - began
        assert took < deadline_s + SLACK_S, f"{took:.1f} s where {deadline_s:g} s were allowed"

    return check
