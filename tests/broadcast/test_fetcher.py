"""Several servers, some of which lie, damage or are silent: what is right arrives, who was wrong is
named. Documents that are rightly signed, and still not to be believed: `test_trust.py`.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from broadcast.fetcher import Fetcher, for_each
from broadcast.transport import Attempt
from broadcast.upstreams import Requester, Upstream, Wanted
from tests.broadcast import fake_relay as lies
from tests.broadcast.conftest import (
    PATIENCE_S,
    Run,
    fetch,
    fetched,
    flip_a_bit,
    intact,
    newest,
    no_latest,
    not_fetched,
    weights,
)
from tests.broadcast.conftest import warnings as warned
from tests.broadcast.fake_relay import Answer, instead, only

QUICK = [
    *(lies.flipped, lies.truncated, lies.padded, lies.cut_off, lies.overflowing),
    *(lies.server_error, lies.huge_head, lies.garbage, lies.endless_body, lies.endless_chunks),
    *(lies.zipped, lies.odd_chunks, lies.endless_continue, instead(b""), instead(b"x" * 1000)),
    *(lies.with_length(text) for text in ("-1", "9" * 30, "1e3", "")),
]
"""Lies that show at once, and those that only time shows."""
LASTING = [lies.silent, lies.endless_head, lies.endless_drip]
ABOUT_ANY = [lies.flipped, lies.huge_head, lies.zipped, lies.silent, lies.endless_drip]
ABOUT_LATEST = [
    *(lies.truncated, lies.server_error, lies.garbage, lies.endless_body, lies.endless_head),
    instead(b"[" * 3000),
]
CASES = [
    *(("/chunks/", lie) for lie in (*QUICK, *LASTING)),
    *((name, lie) for name in ("manifest.json", "roles.json") for lie in ABOUT_ANY),
    *(("latest.json", lie) for lie in (*ABOUT_ANY, *ABOUT_LATEST)),
]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, lie: Answer) -> None:
    """A lasting lie is left soon, and only because another server is faster; else none is slow."""
    slow_after_s = 0.3 if lie in LASTING else PATIENCE_S
    monkeypatch.setattr("broadcast.fetcher.SLOW_AFTER_S", slow_after_s)  # a manifest's
    monkeypatch.setattr("broadcast.upstreams.SLOW_AFTER_S", slow_after_s)
    monkeypatch.setattr("broadcast.transport._LOOK_EVERY_S", 0.02)
    monkeypatch.setattr("broadcast.fetcher._SMALL_TIMEOUT_S", PATIENCE_S)
    # An attempt at the liar ends before the fetch does, even where the honest server seems slow.
    monkeypatch.setattr("broadcast.fetcher.chunk_timeout_s", lambda size: PATIENCE_S / 10)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("what", "lie"), CASES, ids=lambda value: getattr(value, "__name__", str(value)).strip("<>/")
)
def test_a_liar_is_named_and_an_honest_server_makes_good(run, what, lie, caplog):
    # given a server that lies about chunks or a document, and an honest one
    digest = run.publish(0, weights())
    liar, server = run.static(), run.static()
    liar.answer(what, lie)
    if lie is lies.overflowing:  # the truth comes first: that there is more does no harm, once
        liar.answer(what, only(1, lie, then=lies.flipped))
    # when only the liar is asked, then the failure comes in time and names it and what it spoilt
    alone = run.client(liar.url, cache="alone")
    if what == "/chunks/":
        said = not_fetched(alone, liar.url, "chunk ")
        assert "model.safetensors at byte" in said or "config.json at byte" in said
    elif what == "manifest.json":
        not_fetched(alone, liar.url, "manifest of version 0")
    else:
        no_latest(alone, liar.url, "latest.json: ")
    assert not (run.folder / "alone" / "v0").exists()
    # when an honest one is beside it, then it hides nothing, and only the liar is blamed
    caplog.clear()
    both = run.client(liar.url, server.url, cache="both")
    assert newest(both).manifest_digest == digest
    assert fetched(both, digest=digest) == weights()
    blamed = [line for line in warned(caplog) if "http://" in line]
    # (beside a lasting lie, an honest server on a busy machine may count as slow too)
    wrong = f"{server.url} sent something wrong" if lie in LASTING else server.url
    assert not any(line.startswith(wrong) for line in blamed)
    if what == "/chunks/":
        about = [line for line in blamed if line.startswith(liar.url) and ", chunk " in line]
        assert about and any(" so far" in line for line in about) == (lie in LASTING)
        assert lie in LASTING or server.asked() <= len(run.chunks())
    # and once it is honest, whoever knew only the liar goes on
    liar.answer(what, lies.honest)
    assert fetched(alone) == weights()


def test_all_servers_die_and_come_back_while_a_client_waits(run: Run) -> None:
    """The same, and the connections of a server that is gone, are named (`test_trust.py`)."""
    run.publish(0, weights())
    servers = [run.static(), run.static()]
    back = [False]

    def dead(request: lies.Request) -> None:
        return lies.honest(request) if back[0] else request.hang_up()

    for server in servers:
        server.answer("/chunks/", only(2, lies.honest, then=dead))
    client = run.client(*(server.url for server in servers))
    not_fetched(client, *(server.url for server in servers))
    back[0] = True
    assert fetched(client) == weights()
    for server in servers:
        server.stop()
    not_fetched(run.client(servers[0].url, cache="new"), servers[0].url, "manifest of version 0")


DAMAGES: list[Callable[[Path], object]] = [
    flip_a_bit,
    lambda path: path.write_bytes(path.read_bytes()[:-1]),
    lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    lambda path: path.write_bytes(b""),
]


def damage(paths: list[Path]) -> None:
    for number, path in enumerate(paths):
        DAMAGES[number % len(DAMAGES)](path)


def test_an_origin_serves_nothing_damaged_and_is_mended_by_publishing_again(run, caplog):
    # given an origin on whose disk every chunk is damaged, and a good server
    digest = run.publish(0, weights())
    good = shutil.copytree(run.store, run.folder / "good")
    origin = run.origin()
    damage(run.chunks())
    # when clients fetch, then with the good server beside it one has the truth
    both = run.client(origin.url, run.static(good).url, cache="both")
    assert fetched(both, digest=digest) == weights()
    # and without, the failure names the origin and the chunk, and the origin's log its file
    alone = run.client(origin.url)
    not_fetched(alone, origin.url, ", chunk ", digest=digest)
    assert any("damaged, not served" in line for line in warned(caplog))
    # and published again it is mended, for the origin that runs on as well
    assert run.publish(0, weights()) == digest
    assert fetched(alone, digest=digest) == weights()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
def test_a_relay_mends_what_is_damaged_on_its_disk(run: Run, restarted: bool) -> None:
    # given a relay that has served a version, and whose chunks get damaged on its disk
    run.publish(0, weights())
    upstream = run.static()
    relay = run.relay(upstream.url)
    fetch(run.client(relay.url, cache="before"))
    if restarted:
        relay.stop()
    damage(run.chunks("relay"))
    if restarted:
        relay = run.relay(upstream.url)
    # when a client comes that knows no other server
    upstream.paths.clear()
    assert fetched(run.client(relay.url)) == weights()
    # then it has the truth, which the relay got anew, each chunk once
    assert upstream.asked() == len(run.chunks())
    assert bodies(run, "relay") == bodies(run)


def bodies(run: Run, folder: str = "store") -> dict[str, bytes]:
    """What is stored under the name of each chunk."""
    return {path.name: path.read_bytes() for path in run.chunks(folder)}


def test_a_relay_never_passes_on_what_its_upstream_damaged(run, caplog):
    # given a relay behind a server on whose disk every chunk is damaged, and a good one
    run.publish(0, weights())
    good, truth = shutil.copytree(run.store, run.folder / "good"), bodies(run)
    damage(run.chunks())
    bad_server, good_server = run.static(), run.static(good)
    relay = run.relay(bad_server.url)
    # when a client asks for them, then it gets none and nothing wrong lies in the relay's store
    not_fetched(run.client(relay.url), relay.url, "404")
    assert bodies(run, "relay").items() <= truth.items()
    # and a relay that knows the good one too fetches there, and names the other
    relay = run.relay(bad_server.url, good_server.url, name="both")
    assert fetched(run.client(relay.url, cache="both")) == weights()
    assert any(line.startswith(bad_server.url) for line in warned(caplog))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("lie", [lies.flipped, lies.cut_off, lies.not_there])
def test_only_what_is_missing_or_damaged_is_fetched_again(run: Run, lie: Answer) -> None:
    # given the only server there is, which sends one chunk wrong, once
    run.publish(0, weights())
    server, chunks = run.static(), run.weights_chunks()
    bad, damaged = chunks[4].blake3, chunks[2].blake3
    server.answer(bad, only(1, lie))
    # when a client fetches, then that chunk was asked for twice and every other one once
    assert fetched(run.client(server.url)) == weights()
    twice = {p.name: 1 + (p.name == bad) for p in run.chunks()}
    assert {name: server.asked(name) for name in twice} == twice
    # given a download that was broken off with all but that chunk on disk, where a bit flips
    server.answer(bad, lie)
    place = f"model.safetensors at byte 4000, chunk {bad[:16]}"
    partial_file = run.folder / "broken" / ".partial-v0" / "model.safetensors"
    while len(intact(run, partial_file)) < len(chunks) - 1:
        not_fetched(run.client(server.url, cache="broken"), server.url, place)
    flip_a_bit(partial_file, 2500)
    # when the client starts again, then exactly the missing and the damaged chunk are fetched
    again = run.static()  # a request that was cancelled may still come to the other server
    assert fetched(run.client(again.url, cache="broken")) == weights()
    asked = [path.rpartition("/")[2] for path in again.paths if "/chunks/" in path]
    assert sorted(asked) == sorted([bad, damaged])


# -- Order and room --------------------------------------------------------------------------------


async def test_chunks_come_from_each_server_that_has_them(run: Run, tmp_path: Path) -> None:
    run.publish(0, weights(12_000))
    servers, into = [run.static() for _ in range(3)], tmp_path / "into"
    into.touch()
    folder, urls = run.folder / "f", [server.url for server in servers]
    folder.mkdir()
    fetcher = Fetcher(urls, run="demo", root_public_key=run.root, folder=folder)
    deadline = time.monotonic() + PATIENCE_S
    wanted = list(run.manifest(0).chunks().values())
    bring = (
        fetcher.chunk(chunk, "x", deadline, into=into, offset=1000 * n)
        for n, chunk in enumerate(wanted)
    )
    await asyncio.gather(*bring)
    assert all(server.asked() for server in servers)
    size = sum(chunk.size for chunk in wanted)
    assert fetcher.received == sum(u.received for u in fetcher.upstreams.all) == size
    await fetcher.close()


async def test_chunks_are_asked_for_in_the_order_in_which_they_were_wanted() -> None:
    """Whoever is done and wants the next does not overtake those who wait for room."""
    requester, asked = Requester(["http://a"], most=16), list[int]()

    async def make(upstream: Upstream, wanted: Wanted, attempt: Attempt, number: int) -> None:
        asked.append(number)
        assert upstream.in_flight <= 2
        await asyncio.sleep(0)

    async def want(number: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        await requester.request("x", partial(make, number=number), deadline, size=10**9)

    await for_each(range(30), want, parallel=8)
    assert asked == list(range(30))
