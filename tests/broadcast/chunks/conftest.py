"""A session for chunks, and a file that they go into."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from broadcast.transport import Access, new_session


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with new_session(Access()) as made:
        yield made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"")
    return path
