"""The work that each server gets in time, played through with a clock of the test's own."""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass

import pytest

from broadcast.transport import Fault
from broadcast.upstreams import AHEAD, RETRY_S, Ticket, Upstream, Upstreams, Wanted

LOG = logging.getLogger("test")
MB = 10**6
CHUNK = 16 * MB


@dataclass
class Server:
    """What a server of the simulation does."""

    rate: float
    """Bytes a second, for all requests together."""
    dead: tuple[float, float] = (math.inf, math.inf)
    """From when to when it refuses everything."""


@dataclass
class Request:
    upstream: Upstream
    ticket: Ticket
    left: float


class Simulation:
    """Many chunks are wanted, so many at a time; each server divides its rate among requests."""

    def __init__(self, servers: list[Server], *, parallel: int = 8, size: int = CHUNK) -> None:
        self.now = 1000.0
        self.served: Counter[str] = Counter()
        self.attempts: Counter[str] = Counter()
        self.most_in_flight: Counter[str] = Counter()
        self.upstreams = Upstreams([str(i) for i in range(len(servers))], most=16)
        self.servers = servers
        self._servers = dict(zip(self.upstreams.all, servers, strict=True))
        self._parallel = parallel
        self._size = size
        self._flying: list[Request] = []

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self._ask()
            step_s = min(end - self.now, self._until_next())
            for request in self._flying:
                request.left -= step_s * self._share(request)
            self.now += step_s
            for request in [r for r in self._flying if r.left < 1]:
                self._flying.remove(request)
                request.upstream.ended(self.now, request.ticket, self._size)
                request.upstream.succeeded()
                self.served[request.upstream.url] += 1

    def _ask(self) -> None:
        while len(self._flying) < self._parallel:
            wanted = Wanted(self._size)
            upstream = self.upstreams.choose(self.now, wanted).upstream
            if upstream is None:
                return
            self.attempts[upstream.url] += 1
            ticket = upstream.started(self.now, self._size)
            first, last = self._servers[upstream].dead
            if first <= self.now < last:
                upstream.failed(self.now, Fault("refused"), "chunk", LOG)
                upstream.ended(self.now, ticket, 0)
            else:
                self._flying.append(Request(upstream, ticket, self._size))
                most = max(self.most_in_flight[upstream.url], upstream.in_flight)
                self.most_in_flight[upstream.url] = most

    def _share(self, request: Request) -> float:
        return self._servers[request.upstream].rate / request.upstream.in_flight

    def _until_next(self) -> float:
        """Seconds to the next completion, or to where a look may show something new."""
        return min([0.05, *(max(r.left / self._share(r), 1e-6) for r in self._flying)])


def test_each_server_gets_a_share_in_proportion_to_its_rate() -> None:
    played = Simulation([Server(400 * MB), Server(200 * MB), Server(100 * MB)])

    played.run(60)

    share = {url: n / played.served.total() for url, n in played.served.items()}
    assert share["0"] == pytest.approx(4 / 7, abs=0.06)
    assert share["1"] == pytest.approx(2 / 7, abs=0.06)
    assert share["2"] == pytest.approx(1 / 7, abs=0.06)


def test_all_that_the_servers_have_is_used() -> None:
    played = Simulation([Server(400 * MB), Server(200 * MB), Server(100 * MB)])

    played.run(60)

    assert played.served.total() * CHUNK > 0.9 * 60 * 700 * MB


@pytest.mark.parametrize("rate", [1, 25, 100, 1000])
def test_a_rate_is_known_however_many_chunks_come_at_a_time(rate: float) -> None:
    for parallel in (1, 2, 8):
        played = Simulation([Server(rate * MB)], parallel=parallel)
        played.run(100)
        assert played.upstreams.all[0].rate == pytest.approx(rate * MB, rel=0.02)


@pytest.mark.parametrize(("rate", "in_flight"), [(1, 2), (25, 2), (150, 4), (1000, 8), (5000, 8)])
def test_a_thin_link_holds_two_chunks_and_a_thick_one_is_filled(
    rate: float, in_flight: int
) -> None:
    played = Simulation([Server(rate * MB)])

    played.run(30)

    assert played.most_in_flight["0"] == in_flight


def test_a_link_of_small_chunks_is_filled_too() -> None:
    played = Simulation([Server(25 * MB)], size=MB)

    played.run(10)

    assert played.most_in_flight["0"] == AHEAD[1]


def test_a_server_that_dies_and_comes_back_is_used_again() -> None:
    played = Simulation([Server(100 * MB), Server(100 * MB, dead=(1010, 1100))])

    played.run(10)
    assert played.served["1"] > 20
    played.run(90)
    before = played.served["1"]
    tried = played.attempts["1"] - before
    assert 3 < tried < 60  # again and again, and not for every chunk
    played.run(60)

    assert played.served["1"] - before > 0.4 * 60 * 100 * MB / CHUNK


def test_a_server_that_turns_slow_and_fast_again_is_used_again() -> None:
    played = Simulation([Server(100 * MB), Server(100 * MB)])
    played.run(10)
    played.servers[1].rate = 0.5 * MB
    played.run(100)
    slow = played.served["1"]
    played.servers[1].rate = 100 * MB

    played.run(60)

    assert played.served["1"] - slow > 0.3 * 60 * 100 * MB / CHUNK


def test_one_bad_server_holds_nobody_up() -> None:
    played = Simulation([Server(100 * MB, dead=(0, math.inf)), Server(100 * MB)])

    played.run(60)

    assert played.served["1"] > 0.95 * 60 * 100 * MB / CHUNK


def test_all_dead_and_then_one_back() -> None:
    played = Simulation([Server(100 * MB, dead=(0, 1030)), Server(100 * MB, dead=(0, math.inf))])
    played.run(30)
    assert not played.served

    played.run(RETRY_S[1] + 1)

    assert played.served["0"] > 0
