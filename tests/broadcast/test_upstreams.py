"""One choice of a server: what each answer and each fault of theirs does to the next."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from broadcast.transport import Busy, Fault, Lie, NotThere, TooSlow
from broadcast.upstreams import (
    BUSY_S,
    DISTRUST_S,
    PATIENCE_S,
    RETRY_S,
    Choice,
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
    only.failed(now, Fault("refused"), "chunk", LOG)
    assert upstreams.choose(now, Wanted()).pause_s == pytest.approx(0.1)


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


def test_a_success_does_not_shorten_the_patience_asked_for() -> None:
    upstreams = Upstreams(["busy"], most=16)
    (busy,) = upstreams.all
    busy.failed(0.0, Busy(5.0), "chunk", LOG)

    busy.succeeded()  # another request that was under way

    assert ready(upstreams, 4.9) is None


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
    assert hopeless(0, PATIENCE_S)
    assert hopeless(5, PATIENCE_S)
    assert not hopeless(0, PATIENCE_S - 0.1)
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


def test_a_refusal_says_nothing_of_the_rate() -> None:
    (upstream,) = Upstreams(["a"], most=16).all
    measured(upstream, 100 * MB)

    upstream.ended(100.01, upstream.started(100.0, CHUNK), 0)

    assert upstream.rate == pytest.approx(100 * MB)


def test_faults_are_told_by_server() -> None:
    upstreams = Upstreams(["a", "b", "a"], most=16)
    upstreams.all[0].failed(0.0, Fault("refused"), "chunk 7", LOG)

    assert upstreams.faults() == "a: chunk 7: refused; b: not asked yet"


def test_the_same_fault_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    (upstream,) = Upstreams(["a"], most=16).all

    for _ in range(5):
        upstream.noted(0.0, Fault("refused"), "latest.json", LOG)

    assert caplog.messages == ["a: latest.json: refused"]
