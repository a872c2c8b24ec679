"""Relays of volunteers: who may register, what a probe finds, whom the directory names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broadcast.store import publish
from runspec.core.canonical import canonical_json
from runspec.core.schema import Broadcast
from runspec.core.signed import BadSignature, SigningKey
from tests.broadcast import fake_relay
from tests.broadcast.fake_relay import Answer, FakeRelay, Request, head, only
from tests.verify.coordinator.deployment import Site, tiny_spec
from tests.verify.coordinator.over_http import post, request, status
from tests.waiting import eventually
from verify.coordinator.handlers import relays
from verify.formats import documents


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "PROBE_EVERY_S", 0.0)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], Site]]:
    """Serves a run with a published version 0, which takes these relays."""
    with contextlib.ExitStack() as stack:

        def made(volunteers: str) -> Site:
            site = Site(tmp_path, tiny_spec(broadcast=Broadcast(volunteers=volunteers)))
            publish_weights(site, tmp_path / "files")
            stack.enter_context(site.origin())
            stack.enter_context(site.serving())
            eventually(lambda: status(site)["newest_version"] == 0, "version 0")
            return site

        yield made


def publish_weights(site: Site, files: Path) -> None:
    """Publishes version 0 as six chunks."""
    files.mkdir()
    (files / "model.safetensors").write_bytes(bytes(range(256)) * 20)
    roles = (site.run_dir / "keys" / "roles.json").read_bytes()
    publish(
        *(site.store, files),
        run=site.run,
        version=0,
        key=site.publisher,
        roles=roles,
        chunk_bytes=1000,
    )


@pytest.fixture
def relay(make: Callable[[str], Site]) -> Iterator[tuple[Site, FakeRelay]]:
    """A run that takes any relay, and a plain server of its store."""
    site = make("any")
    fake = FakeRelay(site.store)
    yield site, fake
    fake.stop()


def register(site: Site, url: object, key: SigningKey | None = None) -> tuple[int, dict[str, Any]]:
    body = canonical_json({"url": url})
    answer = post(site, key or SigningKey.generate(), "/v1/relays", body)
    return answer.status_code, answer.json()


def listed(site: Site) -> list[str]:
    return site.client(SigningKey.generate()).site().relays


def redirect(request: Request) -> None:
    request.write(head("302 Found", 0, "Location: http://127.0.0.1:1/secret"))


class TestWhoMayRegister:
    def test_none_where_the_spec_takes_none(self, make):
        site = make("none")
        assert register(site, "http://127.0.0.1:1")[0] == 404
        assert (listed(site), status(site)["relays"]["joined"]) == ([], 0)

    @pytest.mark.parametrize(
        "url", ["http://127.0.0.1:80", "http://[::1]", "http://localhost:8000", "http://10.1.2.3"]
    )
    def test_a_private_address_is_not_connected_to_where_public_ones_are_asked_for(self, make, url):
        code, answer = register(make("public"), url)
        assert (code, answer["listed"]) == (200, False)
        assert "is no public address" in answer["reason"]

    def test_malformed_urls_and_keys_with_a_role_are_refused(self, make):
        site = make("any")
        wrong = ("ftp://a.example", "http://u:p@a.example", "http://a.example?x=1", "http://", 3)
        assert [register(site, url)[0] for url in wrong] == [400] * 5
        assert register(site, "http://127.0.0.1:1", site.validator)[0] == 403

    def test_a_server_has_one_key_and_a_key_the_server_that_it_named_last(self, relay):
        site, fake = relay
        key = SigningKey.generate()
        assert [register(site, fake.url, key)[0] for _ in range(2)] == [200, 200]
        assert register(site, fake.url + "/other")[0] == 409
        assert status(site)["relays"] == {"joined": 1, "listed": 1, "refused": 0}
        assert register(site, "http://127.0.0.1:1", key)[1]["listed"] is False
        assert listed(site) == []

    def test_a_relay_that_does_not_serve_makes_room_and_one_that_serves_does_not(
        self, relay, monkeypatch
    ):
        monkeypatch.setattr(relays, "MOST", 1)
        site, fake = relay
        assert register(site, "http://127.0.0.1:1")[1]["listed"] is False
        assert register(site, fake.url)[1]["listed"] is True
        assert register(site, "http://127.0.0.1:2")[0] == 429


class TestProbes:
    def test_an_honest_relay_is_listed_with_its_rate(self, relay):
        site, fake = relay
        code, answer = register(site, fake.url + "/")
        assert (code, answer["listed"], answer["reason"]) == (200, True, "")
        assert answer["bytes_per_s"] > 0 and listed(site) == [fake.url]

    @pytest.mark.parametrize(
        ("part", "answer"),
        [
            *(("/chunks/", fake_relay.flipped), ("/chunks/", fake_relay.truncated)),
            *(("manifest", fake_relay.flipped), ("/chunks/", redirect), ("manifest", redirect)),
        ],
    )
    def test_one_that_sends_something_wrong_is_refused_for_good(self, relay, part, answer):
        site, fake = relay
        key = SigningKey.generate()
        assert register(site, fake.url, key)[1]["listed"] is True
        fake.answer(part, only(1, answer))
        assert register(site, fake.url, key)[1]["listed"] is False
        assert register(site, fake.url, key)[0] == 403
        assert register(site, fake.url)[0] == 403, "nor under another key"
        assert register(site, "http://127.0.0.1:1", key)[0] == 403, "nor at another place"
        assert listed(site) == [] and status(site)["relays"]["refused"] == 1

    @pytest.mark.parametrize("answer", [fake_relay.server_error, fake_relay.not_there])
    def test_one_that_sleeps_is_listed_while_it_is_awake(self, relay, answer: Answer, monkeypatch):
        site, fake = relay
        key = SigningKey.generate()
        fake.answer("", only(1, answer))
        assert register(site, fake.url, key)[1]["listed"] is False
        assert register(site, fake.url, key)[1]["listed"] is True
        fake.answer("", fake_relay.server_error)
        assert register(site, fake.url, key)[1]["reason"] == "status 500 for manifest.json"
        monkeypatch.setattr(relays, "LISTED_S", 0.0)  # time passes
        assert listed(site) == []


def test_one_that_sleeps_is_probed_ever_more_rarely(relay, monkeypatch):
    site, fake = relay
    monkeypatch.setattr(relays, "PROBE_EVERY_S", 1000.0)
    monkeypatch.setattr(relays, "LONGEST_S", 1e9)
    key = SigningKey.generate()
    fake.answer("", fake_relay.server_error)
    for now_s in (0.0, 1500.0, 2500.0, 5500.0, 6500.0):  # due at 0, 2000, 6000
        clock = SimpleNamespace(monotonic=lambda now_s=now_s: 1e6 + now_s)
        monkeypatch.setattr(relays, "time", clock)
        register(site, fake.url, key)
    assert fake.asked("manifest") == 3


def test_what_lists_them_is_signed_by_the_coordinator(relay):
    site, fake = relay
    register(site, fake.url)
    data = request(site, "GET", "/v1/site").content
    coordinators = frozenset({site.coordinator.public_hex})
    assert documents.open_site(data, coordinators=coordinators, run=site.run).relays == [fake.url]
    stranger = frozenset({SigningKey.generate().public_hex})
    with pytest.raises(BadSignature):
        documents.open_site(data, coordinators=stranger, run=site.run)
