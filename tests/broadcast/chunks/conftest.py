"""A pool of connections, and a file that chunks go into."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broadcast.chunk_pool import ChunkPool
from broadcast.transport import Access


@pytest.fixture
async def pool() -> AsyncIterator[ChunkPool]:
    made = ChunkPool(Access())
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"")
    return path
