"""The choice of a server: what each answer and each fault does to the next choice."""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from broadcast.transport import Attempt, Busy, Fault, Lie, NotThere, TooSlow
from broadcast.upstreams import (
    AHEAD,
    BUSY_S,
    DISTRUST_S,
    MOST_STRANGERS,
    RECENT_S,
    SLOW_AFTER_S,
    Choice,
    Upstream,
    Upstreams,
    Wanted,
)

LOG = logging.getLogger("test")
MB = 10**6
CHUNK = 16 * MB
MOST = 5
FAULTS = [
    *(Fault("refused"), Lie("wrong"), NotThere("not there"), TooSlow("slow")),
    *(Busy(None), Busy(0.0), Busy(7.0), Busy(1e9)),
]


@dataclass
class Expected:
    """What must be known of a server, by the rules alone."""

    failures: int = 0
    retry_at: float = 0.0
    distrusted_until: float = 0.0
    success: float = 1.0
    received: int = 0
    fault: str = "not asked yet"
    fault_at: float = -math.inf
    not_before: float = 0.0
    """Of the thing wanted, which it did not have."""
    missing: int = 0

    def failed(self, now: float, fault: Fault, what: str) -> None:
        late = isinstance(fault, TooSlow) and self.fault.startswith(f"{what}: ")
        if not (late and now < self.fault_at + RECENT_S):
            self.fault, self.fault_at = f"{what}: {fault}", now
        if isinstance(fault, NotThere):
            self.not_before, self.missing = now + paused(self.missing), self.missing + 1
        elif isinstance(fault, Busy):
            said = BUSY_S[0] if fault.retry_after_s is None else fault.retry_after_s
            self.retry_at = max(self.retry_at, now + min(max(said, 0.1), BUSY_S[1]))
        else:
            pausing = now < self.retry_at  # requests under way together fail together: once
            if not pausing and not isinstance(fault, TooSlow):
                self.retry_at = now + paused(self.failures)
            self.failures += not pausing
            self.success = max(self.success / 2, 1 / 64)
            if isinstance(fault, Lie):
                self.distrusted_until = now + DISTRUST_S


def paused(before: int) -> float:
    return min(0.1 * 2**before, 2.0)


class Servers(RuleBasedStateMachine):
    """Requests for one thing, wanted again and again, of three servers in any order of events."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.upstreams = 1000.0, Upstreams(["a", "b", "a", "c"], MOST)
        assert [u.url for u in self.upstreams.all] == ["a", "b", "c"]
        self.wanted = Wanted(CHUNK)
        self.known = {upstream: Expected() for upstream in self.upstreams.all}
        self.shunned: set[Upstream] = set()
        self.flying: list[tuple[Upstream, Attempt]] = []

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0, 3.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(small=st.booleans())
    def ask(self, small: bool) -> None:
        self.wanted.size = 0 if small else CHUNK
        choice = self.upstreams.choose(self.now, self.wanted)
        ready_at = {u: max(k.retry_at, k.not_before) for u, k in self.known.items()}
        ready = [u for u, at in ready_at.items() if at <= self.now]
        if not ready:
            assert choice == Choice(None, min(ready_at.values()) - self.now)
            return
        best = min(map(self.disfavour, ready))
        if choice.upstream is None:  # then there is no room
            assert choice.pause_s == 0 and not small and self.flying
            return
        assert self.disfavour(choice.upstream) == best and choice.upstream in ready
        attempt = choice.upstream.started(self.now, self.wanted.size)
        self.flying.append((choice.upstream, attempt))
        if not small:
            assert sum(1 for _, t in self.flying) <= MOST
            assert choice.upstream.in_flight <= AHEAD[1]

    def disfavour(self, upstream: Upstream) -> tuple[bool, bool]:
        return upstream in self.shunned, self.known[upstream].distrusted_until > self.now

    @rule(data=st.data(), share=st.sampled_from([0.0, 0.5, 1.0]))
    def end(self, data: st.DataObject, share: float) -> None:
        if not self.flying:
            return
        number = data.draw(st.integers(0, len(self.flying) - 1))
        fault = data.draw(st.none() | st.sampled_from(FAULTS))
        what = data.draw(st.sampled_from(["chunk", "manifest"]))
        upstream, attempt = self.flying.pop(number)
        known, received = self.known[upstream], int(attempt.size * share)
        if fault is None:
            upstream.succeeded()
            known.failures, known.success = 0, (1 + known.success) / 2
        else:
            upstream.failed(self.now, fault, what, LOG)
            self.wanted.failed(self.now, upstream, fault)
            known.failed(self.now, fault, what)
            if isinstance(fault, Lie | TooSlow):
                self.shunned.add(upstream)
        attempt.received = received
        upstream.ended(self.now, attempt)
        known.received += received

    @invariant()
    def all_is_known(self) -> None:
        for upstream, known in self.known.items():
            attempts = [attempt for one, attempt in self.flying if one is upstream]
            assert upstream.in_flight == len(attempts)
            assert upstream.in_flight_bytes == sum(attempt.size for attempt in attempts)
            found = (upstream.failures, upstream.received, upstream.last_fault, upstream.success)
            assert found == (known.failures, known.received, known.fault, known.success)
            times = (upstream.retry_at, upstream.distrusted_until)
            assert times == pytest.approx((known.retry_at, known.distrusted_until))
            assert self.wanted.missing.get(upstream, 0) == known.missing
            assert upstream.rate is None or upstream.rate >= 0
        assert self.wanted.shunned == self.shunned


TestServers = Servers.TestCase
TestServers.settings = settings(
    max_examples=60, stateful_step_count=40, derandomize=True, deadline=None
)


def measured(upstream: Upstream, rate: float) -> None:
    """As if it had brought one chunk at this rate, just now."""
    attempt = upstream.started(100.0 - CHUNK / rate, CHUNK)
    attempt.received = CHUNK
    upstream.ended(100.0, attempt)
    upstream.succeeded()


def ready(upstreams: Upstreams, now: float, size: int = CHUNK) -> Upstream | None:
    return upstreams.choose(now, Wanted(size)).upstream


def test_a_new_server_is_tried_by_one_request() -> None:
    """One server was asked before and is at work; then each of the others is tried in turn."""
    upstreams = Upstreams(["known", "b", "c"], most=6)
    known, b, c = upstreams.all
    known.started(0.0, CHUNK).received = CHUNK
    known.ended(0.1, known.under_way[0])
    chosen = []
    for _ in range(6):
        best = ready(upstreams, 0.1)
        assert best is not None
        best.started(0.1, CHUNK)
        chosen.append(best)
    assert chosen == [b, c, known, known, known, known]
    assert upstreams.choose(0.1, Wanted(CHUNK)) == Choice(None)  # as many as may be
    assert ready(upstreams, 0.1, size=0) is known  # small answers need no room


def test_lies_and_new_faults_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    (only,) = Upstreams(["only"], most=16).all
    for fault in (NotThere("no"), Busy(None), Fault("refused"), Fault("refused"), *[Lie("x")] * 2):
        only.failed(0.0, fault, "chunk 7", LOG)
    lie = "only sent something wrong: chunk 7: x; avoiding it"
    assert caplog.messages == ["only: chunk 7: refused", lie, lie]


def test_a_drip_is_hopeless_where_another_is_known_to_be_better() -> None:
    upstreams = Upstreams(["drip", "good"], most=16)
    drip, good = upstreams.all

    def hopeless(received: int, elapsed_s: float) -> bool:
        return upstreams.is_hopeless(100.0, Wanted(CHUNK), drip, received, elapsed_s)

    assert not hopeless(0, 60.0)  # nothing is known of the other
    measured(good, 25 * MB)
    assert hopeless(0, SLOW_AFTER_S) and hopeless(5, SLOW_AFTER_S)
    assert not hopeless(0, SLOW_AFTER_S - 0.1)
    assert not hopeless(12 * MB, 10.0)  # 3.3 s more here, 0.64 s there: not worth a change
    assert not hopeless(12 * MB, 11.7) and hopeless(12 * MB, 11.9)  # 2 s + 3 * 0.64 s
    for _ in range(8):
        good.started(100.0, CHUNK)
    assert not hopeless(12 * MB, 30.0)  # the other has six seconds of work already


@pytest.mark.parametrize(
    "spoil",
    [
        lambda other, wanted: other.failed(100.0, Fault("refused"), "chunk", LOG),
        lambda other, wanted: other.failed(100.0, Lie("wrong"), "chunk", LOG),
        lambda other, wanted: wanted.failed(100.0, other, TooSlow("slow")),
        lambda other, wanted: wanted.failed(100.0, other, NotThere("no")),
    ],
)
def test_nothing_is_hopeless_where_the_other_is_no_way_out(spoil):
    upstreams, wanted = Upstreams(["drip", "other"], most=16), Wanted(CHUNK)
    drip, other = upstreams.all
    measured(other, 100 * MB)
    assert upstreams.is_hopeless(100.0, wanted, drip, 0, 10.0)
    spoil(other, wanted)
    if other.distrusted_until:
        other.retry_at = 0.0  # then it is the lie alone
    assert not upstreams.is_hopeless(100.0, wanted, drip, 0, 10.0)


# -- The work that each server gets in time, played through with a clock of the test's own ---------


@dataclass
class Simulation:
    """Many chunks are wanted, so many at a time; each server divides its rate among requests."""

    rates: list[float]
    """Bytes a second of each server, for all requests together."""
    dead: str = ""
    """The server that refuses everything."""
    parallel: int = 8
    size: int = CHUNK
    now: float = 1000.0
    served: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)
    most_in_flight: int = 0

    def __post_init__(self) -> None:
        self.upstreams = Upstreams([str(i) for i in range(len(self.rates))], most=16)
        self._flying: list[tuple[Upstream, Attempt, list[float]]] = []

    def run(self, seconds: float) -> Simulation:
        end = self.now + seconds
        while self.now < end:
            self._ask()
            # to the next completion, or to where a look may show something new
            soonest = [max(left[0] / self._share(u), 1e-6) for u, _, left in self._flying]
            step_s = min([end - self.now, 0.05, *soonest])
            for upstream, _, left in self._flying:
                left[0] -= step_s * self._share(upstream)
            self.now += step_s
            for request in [r for r in self._flying if r[2][0] < 1]:
                upstream, attempt, _ = request
                self._flying.remove(request)
                attempt.received = self.size
                upstream.ended(self.now, attempt)
                upstream.succeeded()
                self.served[upstream.url] += 1
        return self

    def _ask(self) -> None:
        while len(self._flying) < self.parallel:
            upstream = ready(self.upstreams, self.now, self.size)
            if upstream is None:
                return
            self.attempts[upstream.url] += 1
            attempt = upstream.started(self.now, self.size)
            if upstream.url == self.dead:
                upstream.failed(self.now, Fault("refused"), "chunk", LOG)
                upstream.ended(self.now, attempt)
            else:
                self._flying.append((upstream, attempt, [float(self.size)]))
                self.most_in_flight = max(self.most_in_flight, upstream.in_flight)

    def _share(self, upstream: Upstream) -> float:
        return self.rates[int(upstream.url)] / upstream.in_flight


def test_each_server_gets_a_share_in_proportion_to_its_rate() -> None:
    played = Simulation([400 * MB, 200 * MB, 100 * MB]).run(60)
    total = played.served.total()
    shares = [played.served[n] / total for n in "012"]
    assert shares == pytest.approx([4 / 7, 2 / 7, 1 / 7], abs=0.06)
    assert total * CHUNK > 0.9 * 60 * 700 * MB


@pytest.mark.parametrize("rate", [1, 25, 1000])
def test_a_rate_is_known_however_many_chunks_come_at_a_time(rate: float) -> None:
    for parallel in (1, 2, 8):
        played = Simulation([rate * MB], parallel=parallel).run(100)
        assert played.upstreams.all[0].rate == pytest.approx(rate * MB, rel=0.02)


@pytest.mark.parametrize(
    ("rate", "size", "in_flight"),
    [(1, CHUNK, 2), (25, CHUNK, 2), (150, CHUNK, 4), (1000, CHUNK, 8), (25, MB, 8)],
)
def test_a_thin_link_holds_two_chunks_and_a_thick_one_is_filled(rate, size, in_flight):
    assert Simulation([rate * MB], size=size).run(30).most_in_flight == in_flight


def test_a_server_is_used_again_when_it_is_back() -> None:
    played = Simulation([100 * MB, 100 * MB]).run(10)
    assert played.served["1"] > 20
    # given one that is dead for a while: it is tried again and again, and not for every chunk
    played.dead, before = "1", played.attempts["1"]
    played.run(90)
    assert 3 < played.attempts["1"] - before < 60
    # when it is back, then it has its share, and so has one that was slow for a while
    played.dead, before = "", played.served["1"]
    assert played.run(60).served["1"] - before > 0.4 * 60 * 100 * MB / CHUNK
    played.rates[1] = MB / 2
    before = played.run(100).served["1"]
    played.rates[1] = 100 * MB
    assert played.run(60).served["1"] - before > 0.3 * 60 * 100 * MB / CHUNK


class TestStrangers:
    def test_each_client_draws_some_by_lot_and_keeps_them(self) -> None:
        urls, drawn = {"own", *(f"relay-{n}" for n in range(20))}, set[str]()
        for _ in range(100):
            upstreams = Upstreams(["own"], MOST)
            upstreams.set_strangers(urls)
            used = {each.url for each in upstreams.all if each.stranger}
            assert len(used) == MOST_STRANGERS and "own" not in used
            upstreams.set_strangers(urls)
            assert {each.url for each in upstreams.all if each.stranger} == used
            drawn |= used
        assert drawn == urls - {"own"}

    def test_they_are_asked_for_chunks_only_and_removed_once_idle(self) -> None:
        upstreams = Upstreams(["own"], MOST)
        upstreams.set_strangers(["stranger"])
        own, stranger = upstreams.all
        own.started(0.0, 0)
        assert upstreams.choose(0.0, Wanted()).upstream is own
        assert upstreams.choose(0.0, Wanted(CHUNK)).upstream is stranger
        attempt = stranger.started(0.0, CHUNK)
        attempt.received = 5
        upstreams.set_strangers([])
        assert upstreams.all == [own, stranger]
        stranger.ended(1.0, attempt)
        upstreams.set_strangers([])
        assert (upstreams.all, upstreams.removed_bytes) == ([own], 5)
