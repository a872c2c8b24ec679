"""One choice of a server: what each answer and each fault of theirs does to the next."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from broadcast.transport import Busy, Fault, Lie, NotThere, TooSlow
from broadcast.upstreams import (
    AHEAD,
    BUSY_S,
    DISTRUST_S,
    RECENT_S,
    RETRY_S,
    SLOW_AFTER_S,
    Choice,
    Ticket,
    Upstream,
    Upstreams,
    Wanted,
)

LOG = logging.getLogger("test")
MB = 10**6
CHUNK = 16 * MB


def test_no_more_than_the_limit_are_under_way() -> None:
    upstreams = Upstreams([str(i) for i in range(10)], most=16)

    for _ in range(16):
        chosen = upstreams.choose(0.0, Wanted(CHUNK)).upstream
        assert chosen is not None
        chosen.started(0.0, CHUNK)

    assert upstreams.choose(0.0, Wanted(CHUNK)) == Choice(None)
    assert upstreams.choose(0.0, Wanted()).upstream is not None  # small answers need no room


def test_who_is_new_is_tried_by_one_request() -> None:
    """The one that was asked is at work; then each of the others is tried in turn."""
    upstreams = Upstreams(["known", "b", "c"], most=16)
    known, b, c = upstreams.all
    ticket = known.started(0.0, CHUNK)
    known.ended(0.1, ticket, CHUNK)

    chosen = []
    for _ in range(5):
        best = upstreams.choose(0.1, Wanted(CHUNK)).upstream
        assert best is not None
        best.started(0.1, CHUNK)
        chosen.append(best)

    assert chosen == [b, c, known, known, known]


def measured(upstream: Upstream, rate: float) -> None:
    """As if it had brought one chunk at this rate, just now."""
    ticket = upstream.started(100.0 - CHUNK / rate, CHUNK)
    upstream.ended(100.0, ticket, CHUNK)
    upstream.succeeded()


def ready(upstreams: Upstreams, now: float, wanted: Wanted | None = None) -> Upstream | None:
    return upstreams.choose(now, wanted or Wanted()).upstream


def test_after_a_failure_a_server_is_left_alone_for_longer_and_longer() -> None:
    upstreams = Upstreams(["only"], most=16)
    (only,) = upstreams.all
    now, pauses = 0.0, []
    for _ in range(7):
        only.failed(now, Fault("refused"), "chunk", LOG)
        choice = upstreams.choose(now, Wanted())
        assert choice.upstream is None
        pauses.append(choice.pause_s)
        now += choice.pause_s
        assert ready(upstreams, now) is only

    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])
    only.succeeded()
    for pause_s in (0.1, 0.2):
        for _ in range(8):  # requests that were under way together
            only.failed(now, Fault("refused"), "chunk", LOG)
        assert upstreams.choose(now, Wanted()).pause_s == pytest.approx(pause_s)
        now += pause_s


@pytest.mark.parametrize(
    ("said", "pause_s"),
    [(None, BUSY_S[0]), (7.0, 7.0), (0.0, RETRY_S[0]), (10.0**9, BUSY_S[1])],
)
def test_who_asks_for_patience_gets_it_within_reason_and_no_blame(
    said: float | None, pause_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    upstreams = Upstreams(["busy", "other"], most=16)
    busy, other = upstreams.all

    busy.failed(0.0, Busy(said), "chunk", LOG)

    assert ready(upstreams, pause_s - 0.01) is other
    other.failed(0.0, Busy(None), "chunk", LOG)
    assert upstreams.choose(0.0, Wanted()).pause_s == pytest.approx(min(pause_s, BUSY_S[0]))
    assert (busy.success, busy.failures) == (1.0, 0)
    assert ready(upstreams, 100.0) is not None
    assert not caplog.records


def test_what_is_not_there_is_asked_for_elsewhere_and_nobody_is_blamed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    upstreams = Upstreams(["a", "b"], most=16)
    a, b = upstreams.all
    wanted = Wanted()

    a.failed(0.0, NotThere("not there"), "chunk", LOG)
    wanted.failed(0.0, a, NotThere("not there"))

    assert ready(upstreams, 0.0, wanted) is b
    assert ready(upstreams, 0.0, Wanted()) is a  # for other things it is as good as before
    assert (a.success, a.failures, a.retry_at) == (1.0, 0, 0.0)
    assert not caplog.records
    b.failed(0.0, NotThere("not there"), "chunk", LOG)
    wanted.failed(0.0, b, NotThere("not there"))
    assert upstreams.choose(0.0, wanted).pause_s == pytest.approx(RETRY_S[0])


def test_a_liar_is_named_and_asked_only_where_no_other_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    upstreams = Upstreams(["liar", "slow"], most=16)
    liar, slow = upstreams.all
    measured(liar, 1000 * MB)
    measured(slow, MB)

    liar.failed(100.0, Lie("wrong bytes"), "chunk 7", LOG)

    assert caplog.messages == ["liar sent something wrong: chunk 7: wrong bytes; avoiding it"]
    assert ready(upstreams, 101.0, Wanted(CHUNK)) is slow
    slow.failed(101.0, Fault("refused"), "chunk", LOG)
    assert ready(upstreams, 101.0, Wanted(CHUNK)) is liar
    assert ready(upstreams, 100.0 + DISTRUST_S, Wanted(CHUNK)) is liar


def test_who_lied_about_a_chunk_is_asked_last_for_that_chunk() -> None:
    upstreams = Upstreams(["a", "b"], most=16)
    a, b = upstreams.all
    wanted = Wanted(CHUNK)
    for upstream in (a, b):
        upstream.failed(0.0, Lie("wrong"), "chunk", LOG)
    wanted.failed(0.0, a, Lie("wrong"))

    assert ready(upstreams, 1.0, wanted) is b


def test_a_drip_is_hopeless_where_another_is_known_to_be_better() -> None:
    upstreams = Upstreams(["drip", "good"], most=16)
    drip, good = upstreams.all
    wanted = Wanted(CHUNK)

    def hopeless(received: int, elapsed_s: float) -> bool:
        return upstreams.is_hopeless(100.0, wanted, drip, received, elapsed_s)

    assert not hopeless(0, 60.0)  # nothing is known of the other
    measured(good, 25 * MB)
    assert hopeless(0, SLOW_AFTER_S)
    assert hopeless(5, SLOW_AFTER_S)
    assert not hopeless(0, SLOW_AFTER_S - 0.1)
    assert not hopeless(12 * MB, 10.0)  # 3 s more here, 0.7 s there: not worth a change
    assert hopeless(12 * MB, 30.0)  # 10 s more
    for _ in range(8):
        good.started(100.0, CHUNK)
    assert not hopeless(12 * MB, 30.0)  # the other has six seconds of work already


@pytest.mark.parametrize(
    "spoil",
    [
        lambda other, wanted: other.failed(100.0, Fault("refused"), "chunk", LOG),
        lambda other, wanted: other.failed(100.0, Busy(5.0), "chunk", LOG),
        lambda other, wanted: other.failed(100.0, Lie("wrong"), "chunk", LOG),
        lambda other, wanted: wanted.failed(100.0, other, TooSlow("slow")),
        lambda other, wanted: wanted.failed(100.0, other, NotThere("no")),
    ],
)
def test_nothing_is_hopeless_where_the_other_is_no_way_out(
    spoil: Callable[[Upstream, Wanted], None],
) -> None:
    upstreams = Upstreams(["drip", "other"], most=16)
    drip, other = upstreams.all
    wanted = Wanted(CHUNK)
    measured(other, 100 * MB)
    assert upstreams.is_hopeless(100.0, wanted, drip, 0, 10.0)

    spoil(other, wanted)

    assert not upstreams.is_hopeless(100.0, wanted, drip, 0, 10.0)


def test_who_was_too_slow_is_asked_less_and_needs_no_pause() -> None:
    upstreams = Upstreams(["a", "b"], most=16)
    a, b = upstreams.all
    for upstream in (a, b):
        measured(upstream, 100 * MB)
    ticket = a.started(100.0, CHUNK)
    a.failed(103.0, TooSlow("slow"), "chunk", LOG)
    a.ended(103.0, ticket, 10)

    assert a.retry_at == 0.0
    assert a.expected_s(103.0, CHUNK) > 2 * b.expected_s(100.0, CHUNK)
    assert ready(upstreams, 103.0, Wanted(CHUNK)) is b


def test_a_late_answer_does_not_hide_the_fault_just_before_it() -> None:
    (only,) = Upstreams(["only"], most=16).all
    only.failed(100.0, Lie("signed by nobody"), "manifest", LOG)
    only.failed(101.0, TooSlow("late"), "manifest", LOG)
    assert only.last_fault == "manifest: signed by nobody"
    only.failed(101.0 + RECENT_S, TooSlow("late"), "manifest", LOG)
    assert only.last_fault == "manifest: late"


# -- The work that each server gets in time, played through with a clock of the test's own ---------


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
