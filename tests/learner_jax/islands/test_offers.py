"""An offer and the question for its record are under way at once; a refusal is not lost."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest

from bridge.codecs import codec
from learner_jax.islands.connection import Connection
from learner_jax.islands.exchange import Exchange
from learner_jax.islands.joining import Joining
from learner_jax.islands.outer import OuterState
from runspec.core.spec.schema import Islands
from verify.formats.islands import ShareOffered
from verify.island_client import IslandRefused, Waiting

WAIT_S = 10.0
OUTER = OuterState.initial(np.zeros(1, np.float32))


class FakeCoordinator:
    """Answers an offer once it was asked for the record, with a refusal if it has one."""

    def __init__(self, refusal: IslandRefused | None = None) -> None:
        self.asked, self.heard = threading.Event(), list[int]()
        self._refusal = refusal

    def offer(self, offer: ShareOffered) -> bool:
        assert self.asked.wait(WAIT_S), "nobody asks for the record"
        if self._refusal is not None:
            raise self._refusal
        self.heard.append(offer.step)
        return True

    def record(self, step: int, wait_s: float) -> Waiting:
        self.asked.set()
        return Waiting({}, [])


class FakeStore:
    def put_share(self, step: int, data: bytes) -> str:
        return "ab" * 32


class FakeFetcher:
    def cancel(self) -> None: ...
    def close(self) -> None: ...


def exchange_with(coordinator: FakeCoordinator) -> Exchange:
    fakes: tuple[Any, ...] = coordinator, FakeStore(), FakeFetcher()
    connection = Connection(
        *("a", "http://127.0.0.1:1", 1, *fakes),
        *(threading.Event(), logging.getLogger("test")),
    )
    outer = Islands.model_validate({"members": [{"name": "a"}, {"name": "b"}]}).outer
    joining = Joining(connection, 1)
    return Exchange(connection, joining, "run", "", codec("float32"), None, 5.0, outer)


def test_the_record_is_asked_for_while_the_offer_is_under_way() -> None:
    # given a coordinator that answers an offer only after a question for the record
    coordinator = FakeCoordinator()
    with exchange_with(coordinator) as exchange:
        # when a share is offered, then `offered` ends, and the coordinator has heard of it
        exchange.offer(3, OUTER, b"1234", 1.0, 2.0)
        exchange.offered()
        assert coordinator.heard == [3]


def test_a_refused_offer_ends_the_wait_for_its_record() -> None:
    coordinator = FakeCoordinator(IslandRefused("other documents", remedy="compare them"))
    with exchange_with(coordinator) as exchange:
        exchange.offer(3, OUTER, b"1234", 1.0, 2.0)
        with pytest.raises(IslandRefused, match="other documents"):
            exchange.offered()
        with pytest.raises(IslandRefused, match="other documents"):
            exchange.settled(3, OUTER)
