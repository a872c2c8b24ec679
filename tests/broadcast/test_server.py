"""What a server answers, request by request."""

from __future__ import annotations

import logging
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from broadcast.origin import run_origin
from broadcast.store import prune, refresh_latest
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.latest import sign_latest
from tests.ended_at_once import hears_sigterm_at_once
from tests.waiting import eventually

from .conftest import Run, weights


def chunk_url(run: Run, url: str) -> str:
    largest = max(run.chunks(), key=lambda path: path.stat().st_size)
    return f"{url}/demo/chunks/{largest.name}"


@pytest.mark.parametrize("kind", ["origin", "relay"])
def test_every_path_of_the_layout(run: Run, kind: str) -> None:
    run.publish(0, weights())
    origin = run.origin()
    url = origin.url if kind == "origin" else run.relay(origin.url).url
    eventually(lambda: httpx.get(f"{url}/demo/latest.json").status_code == 200, "it is announced")

    for name in ("roles.json", "latest.json", "versions/0/manifest.json"):
        assert httpx.get(f"{url}/demo/{name}").content == (run.store / "demo" / name).read_bytes()
    part = httpx.get(chunk_url(run, url), headers={"Range": "bytes=10-19"})
    whole = httpx.get(chunk_url(run, url))
    assert (part.status_code, part.content) == (206, whole.content[10:20])
    assert len(whole.content) == 1000
    assert httpx.get(f"{url}/healthz").text == "ok\n"
    metrics = httpx.get(f"{url}/metrics").text
    assert 'broadcast_sent_bytes_total{what="chunk"} 1010.0' in metrics
    assert 'broadcast_newest_version{run="demo"} 0.0' in metrics


@pytest.mark.parametrize("kind", ["origin", "relay"])
@pytest.mark.parametrize(
    "path",
    [
        "/demo/.lock",
        "/demo/../served.json",
        "/served.json",
        "/demo/chunks/../roles.json",
        "/demo/chunks/%2e%2e%2froles.json",
        "/other/latest.json",
        "/demo/versions/9/manifest.json",
        "/demo/chunks/" + "0" * 64,
        "//etc/passwd",
    ],
)
def test_nothing_else_is_served(run: Run, kind: str, path: str) -> None:
    run.publish(0, weights())
    origin = run.origin()
    server = origin if kind == "origin" else run.relay(origin.url)
    # A raw socket, since HTTP libraries would tidy the path up.
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        connection.sendall(request.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 404")


def test_a_poll_is_held_until_there_is_news(run: Run) -> None:
    run.publish(0, weights())
    url = f"{run.origin().url}/demo/latest.json"

    assert httpx.get(url, params={"after": -1, "wait": 10}).json()["payload"]["version"] == 0
    assert httpx.get(url, params={"after": 0, "wait": 0.2}).json()["payload"]["version"] == 0
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(httpx.get, url, params={"after": 0, "wait": 20}, timeout=30)
        refresh_latest(run.store, run="demo", key=run.key)  # the same version: no news
        run.publish(1, weights(seed=1))
        assert held.result().json()["payload"]["version"] == 1
    for bad in ({"after": "x"}, {"wait": "nan"}, {"wait": "-1"}):
        assert httpx.get(url, params=bad).status_code == 400


def test_a_fresh_signature_is_served(run: Run) -> None:
    run.publish(0, weights())
    url = f"{run.origin().url}/demo/latest.json"
    before = httpx.get(url).json()["payload"]

    refresh_latest(run.store, run="demo", key=run.key)

    after = httpx.get(url).json()["payload"]
    assert after["expires"] > before["expires"]
    assert after["manifest_digest"] == before["manifest_digest"]


def test_a_damaged_latest_is_said_once_and_the_next_one_is_served(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    # given an origin that has served version 0
    run.publish(0, weights())
    url = f"{run.origin().url}/demo/latest.json"
    good = httpx.get(url).content
    # when latest.json is damaged while someone waits for a newer one
    latest = run.store / "demo" / "latest.json"
    write_atomic(latest, b"{}")
    held = httpx.get(url, params={"after": 0, "wait": 0.5})
    # then the last good one is served, and the damage is said once, not at every look
    assert held.content == good
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 1
    # and it heals
    refreshed = sign_latest("demo", 1, "0" * 64, run.key)
    write_atomic(latest, refreshed)
    assert httpx.get(url, params={"after": 0, "wait": 10}).content == refreshed


def test_an_origin_outlives_a_latest_that_it_cannot_read(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    # given an origin that has served version 0
    run.publish(0, weights())
    url = f"{run.origin().url}/demo/latest.json"
    good = httpx.get(url).content
    # when the system refuses to read latest.json while someone waits for a newer one
    latest = run.store / "demo" / "latest.json"
    latest.unlink()
    latest.mkdir()
    held = httpx.get(url, params={"after": 0, "wait": 0.5})
    # then the last good one is served, it is said once, and the next one comes
    assert held.content == good
    assert ["cannot be read" in r.getMessage() for r in caplog.records] == [True]
    latest.rmdir()
    run.publish(1, weights(seed=1))
    assert httpx.get(url, params={"after": 0, "wait": 10}).json()["payload"]["version"] == 1


def test_prune_keeps_what_kept_versions_need(run: Run) -> None:
    for version in range(4):
        run.publish(version, weights(seed=version))

    prune(run.store, run="demo", keep_versions=2)

    versions = sorted(p.name for p in (run.store / "demo" / "versions").iterdir())
    assert versions == ["2", "3"]
    assert len(run.chunks()) == 2 * 6 + 1  # config.json is shared
    client = run.client(run.origin().url)
    for version in (2, 3):
        client.fetch(version, manifest_digest=None, deadline_s=10)


def test_prune_names_a_damaged_manifest_and_removes_nothing(run: Run) -> None:
    for version in range(3):
        run.publish(version, weights(seed=version))
    before = run.chunks()
    manifest = run.store / "demo" / "versions" / "1" / "manifest.json"
    write_atomic(manifest, manifest.read_bytes()[:-1])

    with pytest.raises(UserError, match=r"versions/1/manifest\.json: damaged"):
        prune(run.store, run="demo", keep_versions=1)

    assert run.chunks() == before


def test_who_knows_its_address_may_end_it_at_once(run: Run) -> None:
    log = logging.getLogger("ended at once")
    assert hears_sigterm_at_once(
        lambda started: run_origin(run.store, host="127.0.0.1", port=0, log=log, started=started)
    )
