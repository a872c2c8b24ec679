"""Shares and outer states travel between the servers of islands: whole, refused, resumed."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from broadcast import store as store_module
from broadcast.layout import stored_versions
from broadcast.relay import run_origin
from broadcast.store import AlreadyPublished
from learner_jax.islands import BadObject, ShareFetcher, ShareStore, Silent
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.roles import sign_roles
from runspec.core.signed import SigningKey
from tests.broadcast.conftest import Served
from tests.broadcast.fake_relay import FakeRelay, endless_drip, held_until
from tests.waiting import eventually
from verify.formats.batch import Contribution, StoredOuter

LOG = logging.getLogger("test")
RUN = "demo"
N = 3000
SIZE = 10_000
WAIT_S = 600.0
"""A deadline that is not reached."""
FAILS_S = 2.0
"""A deadline that is reached: mostly long enough for one try."""


def share_of(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(SIZE)


class Islands:
    """Some islands with keys and stores; their servers are started one by one."""

    def __init__(self, folder: Path, stack: ExitStack, names: tuple[str, ...] = ("a", "b")) -> None:
        self.folder, self._stack = folder, stack
        self.root = SigningKey.generate()
        self.keys = {name: SigningKey.generate() for name in names}
        self.roles = self.sign_roles(self.keys)

    def sign_roles(self, keys: dict[str, SigningKey]) -> bytes:
        others: dict[str, list[str]] = {"publisher": [], "coordinator": [], "validator": []}
        islands = {name: key.public_hex for name, key in keys.items()}
        return sign_roles(RUN, others, self.root, valid_s=1000.0, islands=islands)

    def store(self, name: str) -> ShareStore:
        return ShareStore(self.folder / name, run=RUN, key=self.keys[name], roles=self.roles)

    def serve(self, name: str) -> str:
        """A real origin of an island's store."""
        served = Served(lambda started: run_origin(self.folder / name, log=LOG, started=started))
        self._stack.callback(served.stop)
        return served.url

    def fake(self, name: str) -> FakeRelay:
        """A server of an island's store that may lie."""
        server = FakeRelay(self.folder / name)
        self._stack.callback(server.stop)
        return server

    def fetcher(self, name: str = "fetched") -> ShareFetcher:
        fetcher = ShareFetcher(
            run=RUN, root_public_key=self.root.public_hex, folder=self.folder / name
        )
        self._stack.callback(fetcher.close)
        return fetcher

    def offered(self, name: str, url: str, step: int = 4, seed: int = 0) -> Contribution:
        """Publishes a share and says of it what a record would."""
        data = share_of(seed)
        manifest = self.store(name).put_share(step, data)
        return Contribution(name, url, manifest, digest_bytes(data), SIZE, 1.0, 1.0)


@pytest.fixture
def islands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Islands]:
    monkeypatch.setitem(store_module.publish_objects.__kwdefaults__, "chunk_bytes", 1000)
    with ExitStack() as stack:
        yield Islands(tmp_path, stack)


def test_all_shares_of_a_step_arrive_in_the_order_of_the_record(islands, caplog):
    # given the shares of two islands on real servers
    shares = [islands.offered(n, islands.serve(n), seed=s) for s, n in enumerate(("a", "b"))]
    fetcher = islands.fetcher()
    # when they are fetched
    with caplog.at_level(logging.INFO):
        arrays = fetcher.fetch_shares(4, shares[::-1], WAIT_S)
    # then each is what was put, in that order, and every byte is counted and reported
    assert [array.tobytes() for array in arrays] == [share_of(1), share_of(0)]
    assert arrays[0].dtype == np.uint8 and not arrays[0].flags.writeable
    assert fetcher.received_from("a") == fetcher.received_from("b") == SIZE
    assert "the share of step 4 of island b is here" in caplog.text
    # and once more they come from the disk, until they are dropped, when they are still readable
    fetcher.fetch_shares(4, shares, WAIT_S)
    assert fetcher.received_from("a") == fetcher.received_from("b") == SIZE
    fetcher.keep_only(5)
    assert list(islands.folder.glob("fetched/*/v*")) == []
    assert arrays[0].tobytes() == share_of(1)


def test_an_outer_state_comes_back_bit_for_bit(islands):
    theta, momentum = np.random.default_rng(0).normal(size=(2, N)).astype(np.float32)
    islands.store("a").put_outer(10, theta, momentum)
    digest = digest_bytes(theta.tobytes() + momentum.tobytes())
    url = islands.serve("a")

    stored = StoredOuter("a", url, 10, digest)
    found = islands.fetcher().fetch_outer(stored, N, WAIT_S)

    np.testing.assert_array_equal(found[0], theta)
    np.testing.assert_array_equal(found[1], momentum)
    assert found[0].dtype == np.float32
    # and one that is not the recorded one, or of another size, is refused by name
    for wrong, size, match in (
        ("ab" * 32, N, "outer state of version 10 of island a has digest"),
        (digest, N - 1, f"theta.bin of {4 * (N - 1)} bytes"),
    ):
        fetcher = islands.fetcher("another")
        with pytest.raises(BadObject, match=match) as caught:
            fetcher.fetch_outer(replace(stored, digest=wrong), size, WAIT_S)
        assert caught.value.place == url
        fetcher.keep_only(0)  # else it holds the version that it refused


def test_an_island_that_has_moved_may_offer_another_share_of_the_step(islands):
    fetcher = islands.fetcher()
    for seed in range(2):
        shutil.rmtree(islands.folder / "a", ignore_errors=True)  # its new machine has no store yet
        share = islands.offered("a", islands.serve("a"), seed=seed)
        (found,) = fetcher.fetch_shares(4, [share], WAIT_S)
        assert bytes(found) == share_of(seed)


def test_an_object_of_another_size_is_refused_before_it_is_fetched(islands):
    # given an island whose record names fewer bytes than its object has
    server = islands.fake("a")
    share = replace(islands.offered("a", server.url, step=5), bytes=SIZE - 1)
    # when its share is fetched
    with pytest.raises(BadObject, match=r"share of step 5 of island a: .* of 9999 bytes") as caught:
        islands.fetcher().fetch_shares(5, [share], WAIT_S)
    # then no chunk was asked for, and the error names the island
    assert server.asked("/chunks/") == 0
    assert "mend or remove that island" in caught.value.remedy


def test_what_no_island_signed_is_not_believed(islands):
    # given a store whose roles name a key that the root's roles do not
    good, stranger = islands.roles, SigningKey.generate()
    islands.keys["a"] = stranger
    islands.roles = islands.sign_roles(islands.keys)
    url = islands.serve("a")
    share = islands.offered("a", url)
    served = islands.folder / "a" / RUN / "roles.json"
    # when its roles are the run's, or of a root that nobody pinned, then nothing is fetched
    served.write_bytes(good)
    fetcher = islands.fetcher()

    def refused() -> str:
        with pytest.raises(UserError, match="did not arrive") as caught:
            fetcher.fetch_shares(4, [share], FAILS_S)
        return str(caught.value)

    eventually(lambda: "which may not sign it" in refused(), "a try that ends in time")
    assert fetcher.received_from("a") == 0
    islands.root = SigningKey.generate()
    served.write_bytes(islands.sign_roles(islands.keys))
    refused()


def test_an_island_of_which_nothing_arrives_is_named(islands, monkeypatch):
    # given a share that comes drop by drop, and one whose server does not answer
    server, silent, fetcher = islands.fake("a"), islands.fake("b"), islands.fetcher()
    shares = [islands.offered("a", server.url), islands.offered("b", silent.url)]
    server.answer("/chunks/", endless_drip)
    silent.answer("/chunks/", held_until(threading.Event()))
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)

    def look(fetching: Any, *_: Any, **__: Any) -> Any:
        """Bytes of `a` arrive before the first look, and 4 s pass before each."""
        clock.now += 4.0
        eventually(lambda: fetcher.received_from("a"), "bytes")
        return wait(fetching, 0)

    monkeypatch.setattr("learner_jax.islands.time", clock)
    monkeypatch.setattr("learner_jax.islands.wait", look)
    # then the first is waited for, and the second is told apart
    with pytest.raises(Silent, match="island b") as caught:
        fetcher.fetch_shares(4, shares, WAIT_S, 5.0)
    assert caught.value.island == "b"


def test_waits_are_reported_and_can_be_cancelled(islands, caplog, monkeypatch):
    monkeypatch.setattr("learner_jax.islands.REPORT_EVERY_S", 0.02)
    server = islands.fake("b")
    share = islands.offered("b", server.url)
    server.answer("/chunks/", held_until(threading.Event()))
    fetcher = islands.fetcher()
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(1) as thread:
        fetching = thread.submit(fetcher.fetch_shares, 4, [share], WAIT_S)
        eventually(lambda: f"for the shares of b ({server.url})" in caplog.text, "a report")
        eventually(server.asked, "a request")  # there is nothing to cancel before
        fetcher.cancel()
        with pytest.raises(CancelledError):
            fetching.result()


def test_a_put_may_be_repeated_and_a_differing_replay_is_told_apart(islands):
    store = islands.store("a")
    digest = store.put_share(4, share_of(0))
    assert store.put_share(4, np.frombuffer(share_of(0), np.uint8)) == digest
    assert islands.store("a").put_share(4, share_of(0)) == digest
    with pytest.raises(AlreadyPublished) as caught:
        store.put_share(4, share_of(1))
    assert caught.value.manifest_digest == digest


def test_the_newest_outer_states_and_all_shares_since_are_kept(islands):
    # given an outer state every second step; the next share may come before the outer state
    store, theta = islands.store("a"), np.zeros(4, np.float32)
    for step in range(5):
        store.put_share(step, bytes([step]))
        if step % 2 == 0:
            store.put_outer(step, theta + step, theta)
        store.keep(step - 2)
    # then what is older than the outer state of version 2 is gone
    assert stored_versions(islands.folder / "a", RUN) == [4, 5, 7, 8, 9]
    islands.store("b").keep(1)  # of an empty store


def test_what_an_older_key_signed_is_removed(islands, caplog):
    islands.store("a").put_share(4, share_of(0))
    islands.keys["a"] = SigningKey.generate()
    islands.roles = islands.sign_roles(islands.keys)
    store = islands.store("a")
    assert "removed" in caplog.text
    assert stored_versions(islands.folder / "a", RUN) == []
    store.put_share(4, share_of(1))
