"""A chunk of some megabytes, how a test fetches it, and servers that a test writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import aiohttp

from broadcast.chunk_transfer import Transfer, fetch_chunk
from broadcast.manifest import Chunk
from runspec.core.hashing import digest_bytes
from tests.broadcast.scripted import Peer

BODY = bytes(range(256)) * 12_000
"""Three megabytes: several buffers full, and more than a socket holds."""
CHUNK = Chunk(digest_bytes(BODY), len(BODY))


async def fetch(
    session: aiohttp.ClientSession,
    url: str,
    file: Path,
    *,
    offset: int = 0,
    timeout_s: float = 20.0,
    is_hopeless: Callable[[float], bool] = lambda elapsed_s: False,
) -> None:
    transfer = Transfer(CHUNK, file, offset)
    await fetch_chunk(
        session, f"{url}/demo/chunks/x", transfer, timeout_s=timeout_s, is_hopeless=is_hopeless
    )
    assert transfer.received == len(BODY)


def honest(peer: Peer) -> None:
    while peer.read_request():
        peer.answer(BODY)


def silent(peer: Peer) -> None:
    peer.wait_for_the_end()
