"""Chunks from several servers at once: what is right arrives, whoever else is among them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from broadcast.fetcher import Fetcher, for_each
from broadcast.manifest import Chunk
from broadcast.retry import Attempt, Requester
from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes

from .conftest import Run, weights
from .scripted import Peer, Serve

BODIES = [bytes([i]) * 50_000 for i in range(12)]
CHUNKS = [Chunk(digest_bytes(body), len(body)) for body in BODIES]
BY_DIGEST = {chunk.blake3: body for chunk, body in zip(CHUNKS, BODIES, strict=True)}
MakeFetcher = Callable[..., Fetcher]


@pytest.fixture
async def fetcher_of(tmp_path: Path) -> AsyncIterator[MakeFetcher]:
    made: list[Fetcher] = []

    def make(*urls: str, run: str = "demo", root_public_key: str = "0" * 64) -> Fetcher:
        made.append(
            Fetcher(urls, run=run, root_public_key=root_public_key, folder=tmp_path / "folder")
        )
        return made[-1]

    (tmp_path / "folder").mkdir()
    yield make
    for fetcher in made:
        await fetcher.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"")
    return path


async def fetch(
    fetcher: Fetcher, file: Path, numbers: range = range(1), deadline_s: float = 20.0
) -> None:
    """The chunks of these numbers, all wanted at once, one after the other in the file."""
    deadline = time.monotonic() + deadline_s
    await asyncio.gather(
        *(
            fetcher.chunk(
                CHUNKS[n], f"file {n}", deadline, into=file, offset=(n - numbers[0]) * 50_000
            )
            for n in numbers
        )
    )
    assert file.read_bytes() == b"".join(BODIES[n] for n in numbers)


def digest_asked_for(peer: Peer) -> str:
    """The digest in the next request; empty where there is none."""
    return peer.read_request().partition(b" HTTP/")[0].decode().rpartition("/")[2]


def honest(peer: Peer) -> None:
    while digest := digest_asked_for(peer):
        peer.answer(BY_DIGEST[digest])


async def test_chunks_come_from_everyone_who_has_them(
    serve: Serve, fetcher_of: MakeFetcher, file: Path
) -> None:
    servers = [serve(honest) for _ in range(3)]
    fetcher = fetcher_of(*(server.url for server in servers))

    await fetch(fetcher, file, range(12))

    assert all(server.connections for server in servers)
    assert sum(upstream.received for upstream in fetcher.upstreams.all) == 12 * 50_000


async def test_chunks_are_asked_for_in_the_order_in_which_they_were_wanted() -> None:
    """Whoever is done and wants the next does not overtake those who wait for room."""
    requester = Requester(["http://a"], most=16)
    asked: list[int] = []

    async def make(attempt: Attempt, number: int) -> None:
        asked.append(number)
        assert attempt.upstream.in_flight <= 2
        await asyncio.sleep(0)

    async def want(number: int) -> None:
        deadline = time.monotonic() + 20
        await requester.request("x", partial(make, number=number), deadline, size=10**9)

    await for_each(range(30), want, parallel=8)

    assert asked == list(range(30))


async def test_a_relay_that_lags_still_gives_chunks(
    run: Run, fetcher_of: MakeFetcher, file: Path
) -> None:
    """It names an old version as the newest: nobody believes it, and its chunks are as good."""
    run.publish(0, weights())
    old = (run.store / "demo" / "latest.json").read_bytes()
    run.publish(1, weights(seed=1))
    server = run.static()
    fetcher = fetcher_of(server.url, root_public_key=run.root)
    assert await fetcher.latest(None, 10) is not None
    (run.store / "demo" / "latest.json").write_bytes(old)
    with pytest.raises(UserError, match="offers version 0 as the newest, 1 was seen"):
        await fetcher.latest(None, 0.2)

    manifest, _ = await fetcher.manifest(1, None, time.monotonic() + 10)
    for chunk in manifest.chunks().values():
        await fetcher.chunk(chunk, "file", time.monotonic() + 10, into=file)

    (upstream,) = fetcher.upstreams.all
    assert (upstream.failures, upstream.success) == (0, 1.0)
