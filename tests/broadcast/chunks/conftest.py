"""A pool of connections, scripted servers, and a file that chunks go into."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from broadcast.chunk_pool import ChunkPool
from broadcast.transport import Access
from tests.broadcast.chunks.fetching import Serve
from tests.broadcast.scripted import Peer, Scripted


@pytest.fixture
async def pool() -> AsyncIterator[ChunkPool]:
    made = ChunkPool(Access())
    yield made
    made.close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    started: list[Scripted] = []

    def start(script: Callable[[Peer], None]) -> Scripted:
        started.append(Scripted(script))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"")
    return path
