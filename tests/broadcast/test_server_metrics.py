"""What Prometheus reads from a server."""

from __future__ import annotations

from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from broadcast.metrics import Metrics
from tests.waiting import eventually

from .conftest import CHUNK_BYTES, Run, weights

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Values:
    """Every value by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(values: Values, name: str, **labels: str) -> float:
    return values[f"broadcast_{name}", tuple(sorted(labels.items()))]


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


def test_how_far_a_relay_is(run: Run) -> None:
    run.publish(0, weights())
    url = run.relay(run.origin().url).url

    def whole() -> bool:
        values = parsed(httpx.get(f"{url}/metrics").text)
        key = ("broadcast_version_complete_ratio", (("run", "demo"), ("version", "0")))
        return values.get(key) == 1.0

    eventually(whole, "the relay says that it has version 0")
    values = parsed(httpx.get(f"{url}/metrics").text)
    assert value(values, "newest_version", run="demo") == 0
    assert value(values, "behind_seconds", run="demo") == 0


def test_versions_and_delay(tmp_path: Path) -> None:
    now = 1000.0
    metrics = Metrics(tmp_path, clock=lambda: now)

    shares = {1: 0.25, 2: 1.0}
    metrics.report_versions("demo", lambda: shares)
    metrics.text()
    del shares[2]
    metrics.behind_since("demo", 970.0)
    values = parsed(metrics.text().decode())

    assert value(values, "version_complete_ratio", run="demo", version="1") == 0.25
    assert ("broadcast_version_complete_ratio", (("run", "demo"), ("version", "2"))) not in values
    assert value(values, "behind_seconds", run="demo") == 30.0
    metrics.behind_since("demo", None)
    assert value(parsed(metrics.text().decode()), "behind_seconds", run="demo") == 0.0


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


def test_a_total_that_cannot_be_written_is_written_later(tmp_path: Path) -> None:
    # given a server whose disk takes nothing
    in_the_way = tmp_path / "served.json"
    metrics = Metrics(tmp_path)
    in_the_way.mkdir()
    # when it counts, then it goes on
    metrics.sent("chunk", 100)
    metrics.save()
    # and writes it down once it can
    in_the_way.rmdir()
    metrics.save()
    assert in_the_way.read_text() == '{"bytes": 100}'
