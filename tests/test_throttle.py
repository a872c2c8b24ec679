"""The throttled links that transfers are measured over carry what they say, unchanged."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from tests.throttle import Bucket, Link

RATE = 25e6
"""Bytes a second: a link of 200 Mb/s."""


@pytest.mark.parametrize("sizes", [[1460], [65536], [131072], [1, 131072, 700]])
def test_a_full_link_carries_its_rate(sizes: list[int]) -> None:
    # given a link with more to carry than it can, and a loop that wakes up late by up to 5 ms
    late = random.Random(0)
    bucket, clock, passed = Bucket(RATE, RATE * 0.02, now=100.0), 100.0, 0
    # when it carries for ten seconds
    for size in itertools.cycle(sizes):
        if (wait_s := bucket.wait(size, clock)) > 0:
            clock += wait_s + late.uniform(0, 0.005)
        if clock > 110:
            break
        passed += size
    # then the bytes are the rate's, to a few per mille: lost time is made up for, not lost
    assert passed / 10 == pytest.approx(RATE, rel=0.005)


def test_no_window_carries_more_than_the_burst_and_the_rate() -> None:
    # given bytes that come in gusts, with pauses between
    draw = random.Random(1)
    burst = RATE * 0.02
    bucket, clock, passed = Bucket(RATE, burst, now=0.0), 0.0, [(0.0, 0)]
    for _ in range(3000):
        size = draw.randrange(1, 131072)
        clock += bucket.wait(size, clock)
        passed.append((clock, passed[-1][1] + size))
        if draw.random() < 0.02:
            clock += draw.uniform(0, 0.5)
    # when any stretch of time is looked at, then no more passed in it than the bucket's promise
    for first, last in itertools.combinations(passed[::50], 2):
        assert last[1] - first[1] <= burst + RATE * (last[0] - first[0]) + 131072


def test_an_idle_time_is_not_saved_up() -> None:
    bucket = Bucket(1000, 50, now=0.0)
    bucket.wait(50, 0.0)
    # given an hour without traffic, when 1,050 bytes come at once
    wait_s = bucket.wait(1050, 3600.0)
    # then only the burst is free
    assert wait_s == pytest.approx(1.0)


async def test_a_link_passes_every_byte_both_ways_and_the_end() -> None:
    # given a server that answers with what it was sent, twice, once that has ended
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = await reader.read()
        writer.write(said * 2)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    link = Link(host, port, bits_per_s=400e6)
    carrying = asyncio.create_task(link.run())
    sent = random.Random(2).randbytes(1_000_000)

    # when two connections share the link
    async def talk() -> bytes:
        reader, writer = await asyncio.open_connection(host, int(link.url.rpartition(":")[2]))
        writer.write(sent)
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer

    async with asyncio.timeout(30):
        answers = await asyncio.gather(talk(), talk())

    # then each hears its own answer, whole
    assert answers == [sent * 2] * 2
    carrying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await carrying
    server.close()


async def test_a_link_to_a_dead_server_closes_at_once() -> None:
    # given a link whose server has gone
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    server.close()
    await server.wait_closed()
    link = Link(host, port, bits_per_s=1e6)
    carrying = asyncio.create_task(link.run())
    # when someone connects, then there is an end and no wait
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(host, int(link.url.rpartition(":")[2]))
        assert await reader.read() == b""
    writer.close()
    # and the link is still there for the next
    assert not carrying.done()
    carrying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await carrying
