"""What an island offers, follows and joins, and what it does while it waits."""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from learner_jax.islands import Silent
from learner_jax.islands import exchange as exchange_module
from learner_jax.islands.exchange import Exchange
from learner_jax.islands.state import KEPT_PERIODS, Behind, OuterState, outer_update
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.schema import Islands
from tests.waiting import eventually
from verify.formats.batch import (
    CommitRecord,
    Contribution,
    Dropped,
    OuterStates,
    ShareOffered,
    StoredOuter,
)
from verify.island_client import Committed, IslandRefused, Waiting

EVERY, N = 4, 8
OUTER = OuterState.initial(np.arange(N, dtype=np.float32))


def share_of(step: int) -> bytes:
    return bytes([step] * 4 * N)


@dataclass
class FakeOthers:
    """Stands for the coordinator, the own store and the servers of the others."""

    committed: int = 0
    """Steps; `b` contributed its share to the even ones, `a` to all."""
    announced: dict[str, int] = field(default_factory=dict)
    down: set[str] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    """Steps whose own share is not in the store."""
    droppable: bool = True
    """Whether the coordinator drops shares that cannot be fetched."""
    unreachable: list[tuple[int, str]] = field(default_factory=list)
    """Shares that it was told cannot be fetched."""
    late: list[str] = field(default_factory=list)
    """Islands whose share another island cannot fetch, while this one reports."""
    reported: list[tuple[int, str]] = field(default_factory=list)
    """Steps, and digests of their records; the second report is the last that is needed."""
    said: list[tuple[str, int]] = field(default_factory=list)
    put: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    waits: int = 0

    def record(self, step: int, wait_s: float) -> Committed | Waiting:
        if step >= self.committed:
            if wait_s:
                self.waits += 1
                self.committed += self.waits == 3
            return Waiting({"c": "no share offered"}, [])
        zero, base = "0" * 64, OUTER.digest
        names = ["a", "b"] if step % 2 == 0 else ["a"]
        if replaced := self.droppable and (step, "a") in self.unreachable:
            names = ["b"]
        digest = digest_bytes(share_of(step))
        contributors = [Contribution(n, "http://x:1", zero, digest, 4 * N, 1.0, 1.0) for n in names]
        dropped = [Dropped("b", "late")] if step % 2 else []
        record = CommitRecord("run", step, base, "float32", contributors, dropped, None, 1, zero)
        return Committed(record, "1" * 64 if replaced else zero)

    def lost(self, step: int, island: str) -> bool:
        self.unreachable.append((step, island))
        return self.droppable

    def outer_states(self) -> OuterStates:
        stored = [
            StoredOuter(name, f"http://{name}:1", version, OUTER.digest)
            for name, version in self.announced.items()
        ]
        return OuterStates(stored, self.committed, 0)

    def result(self, step: int, record: str, digest: str, wait_s: float) -> bool | None:
        self.reported.append((step, record))
        if self.late:
            self.unreachable.append((step, self.late.pop()))
        found = self.record(step, 0.0)
        if not isinstance(found, Committed) or found.digest != record:
            return None
        return len(self.reported) > 1

    def offer(self, offer: Any) -> bool:
        return True

    def put_share(self, step: int, data: bytes) -> str:
        return "0" * 64

    def announce(self, url: str, version: int, digest: str) -> None:
        self.said.append((url, version))

    def share(self, step: int) -> bytes | None:
        return None if step in self.gone else share_of(step)

    def put_outer(self, version: int, theta: np.ndarray, momentum: np.ndarray) -> str:
        self.put.append(version)
        return ""

    def keep(self, since: int) -> None:
        self.kept.append(since)

    def fetch_outer(self, stored: StoredOuter, size: int, deadline_s: float) -> Any:
        self.asked.append(stored.island)
        if stored.island in self.down:
            raise UserError("did not arrive")
        return OUTER.theta, OUTER.momentum

    def fetch_shares(
        self, step: int, shares: Any, deadline_s: float, silence_s: float
    ) -> list[np.ndarray]:
        for each in shares:
            if each.island in self.down:
                raise UserError("did not arrive") if silence_s == math.inf else Silent(each, 5.0)
        return [np.frombuffer(share_of(step), np.uint8) for _ in shares]

    def keep_only(self, step: int) -> None: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


ISLANDS = Islands.model_validate(
    {
        "count": 2,
        "grace": "5s",
        "codec": {"kind": "float32"},
        "outer": {"lr": 0.5, "momentum": 0.0, "nesterov": False},
    }
)


def exchange_of(fake: FakeOthers) -> Exchange:
    any_fake = cast(Any, fake)
    return Exchange(
        *("run", "b", "http://b:1", N, ISLANDS, EVERY, "", any_fake, any_fake, any_fake),
        *(threading.Event(), logging.getLogger("test")),
    )


def test_an_island_can_follow_where_all_shares_are_left():
    fake = FakeOthers(committed=13, announced={"a": 12})
    kept = 12 - KEPT_PERIODS * EVERY
    exchange = exchange_of(fake)
    assert exchange.can_follow(kept) and exchange.can_follow(13)
    # not where others have removed theirs, nor where its own are lost
    assert not exchange.can_follow(kept - 1)
    fake.gone = {6}
    assert not exchange.can_follow(6) and exchange.can_follow(7)
    # a share that it did not contribute is not missed
    fake.gone = {7}
    assert exchange.can_follow(kept)


def test_an_island_joins_where_it_can_and_from_whoever_answers():
    # given a newest state whose island is down, one behind the island's own lost share, one more
    fake = FakeOthers(committed=9, announced={"a": 8, "c": 8, "d": 4}, down={"a"}, gone={6})
    version, outer = exchange_of(fake).fetch_outer()
    assert version == 8 and fake.asked == ["a", "c"]
    np.testing.assert_array_equal(outer.theta, OUTER.theta)


def test_a_long_wait_stores_the_newest_outer_state_and_says_so_again(monkeypatch):
    monkeypatch.setattr(exchange_module, "REPORT_EVERY_S", 0.0)
    fake = FakeOthers(committed=10)
    exchange = exchange_of(fake)
    exchange.hold(10, OUTER, store=False)
    assert fake.put == fake.said == []
    # when the record of the next step is late
    with exchange:
        settled = exchange.settled(10, OUTER)
    # then it is stored once, and announced at each report
    assert settled.record.step == 10 and settled.received == 4 * N
    assert fake.put == [10] and set(fake.said) == {("http://b:1", 10)} and len(fake.said) > 1
    assert set(fake.kept) == {(10 // EVERY - KEPT_PERIODS) * EVERY}


def test_a_share_that_was_removed_is_not_waited_for():
    fake = FakeOthers(committed=30, announced={"a": 28}, down={"a"})
    exchange = exchange_of(fake)
    with exchange, pytest.raises(Behind, match="no byte of the share of island a arrived"):
        exchange.settled(3, OUTER)


def test_a_share_that_cannot_be_fetched_is_left_out_by_a_new_record():
    # given a step whose record names the share of an island that cannot be reached
    fake = FakeOthers(committed=5, announced={"a": 4}, down={"a"})
    with exchange_of(fake) as exchange:
        # then the coordinator is told so, and the next record is followed
        settled = exchange.settled(4, OUTER)
        assert fake.unreachable == [(4, "a")]
        assert [*settled.weights] == ["b"]


def test_a_share_that_must_stay_is_fetched_until_its_server_is_back(caplog):
    fake = FakeOthers(committed=5, announced={"a": 4}, down={"a"}, droppable=False)
    with caplog.at_level(logging.WARNING), exchange_of(fake) as exchange:
        exchange.offer(4, OUTER, share_of(4), 1.0, 1.0)
        eventually(lambda: "trying again: did not arrive" in caplog.text, "patience")
        fake.down.clear()
        assert [*exchange.settled(4, OUTER).weights] == ["a", "b"]
    # asked once, for the answer does not change
    assert fake.unreachable == [(4, "a")]


def test_a_record_that_was_replaced_is_settled_again():
    # given an island that has all shares, while another one lacks one
    fake = FakeOthers(committed=5, announced={"a": 4}, late=["a"])
    with exchange_of(fake) as exchange:
        settled = exchange.settled(4, OUTER)
    # then it does not go on from the first record, and goes on once one is final
    assert fake.reported == [(4, "0" * 64), (4, "1" * 64)]
    assert [*settled.weights] == ["b"]
    expected = outer_update(OUTER, settled.mean, ISLANDS.outer)
    assert settled.outer.digest == expected.digest


def test_a_record_of_another_outer_state_is_refused():
    other = OuterState.initial(np.ones(N, dtype=np.float32))
    exchange = exchange_of(FakeOthers(committed=5, announced={"a": 4}))
    with exchange, pytest.raises(UserError, match="was trained from the outer state"):
        exchange.settled(4, other)


@pytest.mark.parametrize("refusal", [None, IslandRefused("other documents", remedy="compare them")])
def test_the_record_is_asked_for_while_the_offer_is_under_way(refusal):
    # given a coordinator that answers an offer only after a question for the record
    asked, heard, fake = threading.Event(), list[int](), FakeOthers(committed=3)

    def record(step: int, wait_s: float) -> Waiting:
        asked.set()
        return Waiting({}, [])

    def offer(offer: ShareOffered) -> bool:
        assert asked.wait(600.0), "nobody asks for the record"
        if refusal is not None:
            raise refusal
        heard.append(offer.step)
        return True

    fake.record, fake.offer = record, offer  # type: ignore[method-assign]
    # when a share is offered, then `offered` ends, and the coordinator has heard of it
    with exchange_of(fake) as exchange:
        exchange.offer(3, OUTER, b"1234", 1.0, 2.0)
        if refusal is None:
            exchange.offered()
            assert heard == [3]
            return
        # or has refused it, which ends the wait for its record
        for wait in (exchange.offered, partial(exchange.settled, 3, OUTER)):
            with pytest.raises(IslandRefused, match="other documents"):
                wait()
