"""What a server answers, request by request."""

from __future__ import annotations

import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from broadcast.metrics import Metrics
from broadcast.origin import run_origin
from broadcast.store import refresh_latest
from runspec.core.files import write_atomic
from runspec.core.latest import sign_latest
from tests.ended_at_once import hears_sigterm_at_once
from tests.waiting import eventually

from .conftest import CHUNK_BYTES, Run, weights


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
    assert 'runspec_broadcast_sent_bytes_total{what="chunk"} 1010.0' in metrics
    assert 'runspec_broadcast_newest_version{run="demo"} 0.0' in metrics


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


def test_who_knows_its_address_may_end_it_at_once(run: Run) -> None:
    log = logging.getLogger("ended at once")
    assert hears_sigterm_at_once(lambda started: run_origin(run.store, log=log, started=started))


# -- What Prometheus reads from a server -----------------------------------------------------------


Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Values:
    """Every value by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(values: Values, name: str, **labels: str) -> float:
    return values[f"runspec_broadcast_{name}", tuple(sorted(labels.items()))]


def test_what_a_server_has_done(run: Run) -> None:
    # given some requests of each kind
    run.publish(5, weights())
    url = run.origin().url
    full = next(path for path in run.chunks() if path.stat().st_size == CHUNK_BYTES)
    with httpx.Client(base_url=url) as client:
        manifest = client.get("/demo/versions/5/manifest.json")
        client.get(f"/demo/chunks/{full.name}")
        client.get(f"/demo/chunks/{full.name}", headers={"Range": "bytes=0-9"})
        client.head(f"/demo/chunks/{full.name}")
        client.get("/demo/latest.json")
        client.get("/demo/shardcast/v5/shard_00001.bin")
        client.get("/demo/versions/6/manifest.json")
        client.get("/nothing")
        client.post("/demo/latest.json")
        # when the metrics are read
        answer = client.get("/metrics")
    # then they are in the standard format
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    values = parsed(answer.text)
    # and say what was asked for, what was sent, and how things stand
    for what, status, count in (
        ("manifest", "200", 1),
        ("manifest", "404", 1),
        ("chunk", "200", 2),
        ("chunk", "206", 1),
        ("shard", "200", 1),
        ("latest", "200", 1),
        ("other", "404", 1),
        ("other", "405", 1),
    ):
        assert value(values, "requests_total", what=what, status=status) == count
    assert value(values, "sent_bytes_total", what="chunk") == CHUNK_BYTES + 10
    assert value(values, "sent_bytes_total", what="shard") == CHUNK_BYTES
    assert value(values, "sent_bytes_total", what="manifest") == len(manifest.content)
    assert value(values, "newest_version", run="demo") == 5
    assert value(values, "connections") == 1
    assert value(values, "polls_waiting") == value(values, "transfers") == 0
    assert value(values, "rate_limited_total") == value(values, "auth_failures_total") == 0


def test_the_total_of_chunk_bytes_survives_a_restart_and_damage(tmp_path: Path) -> None:
    for _ in range(2):
        metrics = Metrics(tmp_path)
        metrics.sent("chunk", 100)
        metrics.sent("shard", 10)
        metrics.sent("manifest", 1)
        metrics.save()
    assert (tmp_path / "served.json").read_text() == '{"bytes": 220}'

    (tmp_path / "served.json").write_text('{"bytes": -1')

    Metrics(tmp_path).save()
    again = Metrics(tmp_path)
    again.sent("chunk", 5)
    again.save()
    assert (tmp_path / "served.json").read_text() == '{"bytes": 5}'
