"""What a server answers, to whom, how fast and how often: origins and relays alike."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broadcast.admission import MAX_TOKENS_BYTES, Metrics, Tokens, read_tokens
from broadcast.answers import byte_range
from broadcast.manifest import Chunk, ObjectInfo, WeightsManifest
from broadcast.relay import run_origin
from broadcast.server import Limits, ServerOptions, shardcast_distribution
from broadcast.store import refresh_latest
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.http_server import TokenBuckets
from runspec.core.roles import sign_latest
from tests.broadcast.conftest import (
    CHUNK_BYTES,
    LOG,
    PATIENCE_S,
    Run,
    Served,
    answer,
    fetched,
    large_chunk,
    metric,
    newest,
    warnings,
    weights,
)
from tests.ended_at_once import hears_sigterm_at_once
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("patient")]

A, B = "a" * 32, "B0._~+/=-" * 4
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
POLL = b"GET /demo/latest.json?after=0&wait=60 HTTP/1.1\r\nHost: x\r\n\r\n"
OK = b"HTTP/1.1 200"
both_kinds = pytest.mark.parametrize("kind", ["origin", "relay"])


@pytest.fixture
def origin(run: Run) -> Served:
    run.publish(0, weights())
    return run.origin()


def served(run: Run, kind: str, **options: object) -> str:
    """The URL of the run at a server that announces version 0."""
    run.publish(0, weights())
    server = run.server(kind, **options)
    newest(run.client(server.url, cache="warm"))
    return f"{server.url}/demo"


def full_chunk(run: Run) -> Path:
    return next(path for path in run.chunks() if path.stat().st_size == CHUNK_BYTES)


# -- Paths and headers -----------------------------------------------------------------------------


@both_kinds
def test_each_path_of_the_layout_and_nothing_else(run: Run, kind: str) -> None:
    url, chunk = served(run, kind), full_chunk(run)
    # documents, which are asked for again, and a manifest and chunks, which never change
    for name in ("roles.json", "latest.json", "versions/0/manifest.json"):
        got = answer(f"{url}/{name}")
        assert got.content == run.path(name).read_bytes()
        kept = "max-age=31536000, immutable" if "versions" in name else "no-cache"
        assert got.headers["Cache-Control"] == kept
        same = answer(f"{url}/{name}", **{"If-None-Match": got.headers["ETag"]})
        assert (same.status_code, same.content) == (304, b"")
        assert answer(f"{url}/{name}", **{"If-None-Match": '"other"'}).status_code == 200
    got = answer(f"{url}/chunks/{chunk.name}")
    assert (got.status_code, got.content) == (200, chunk.read_bytes())
    assert got.headers["ETag"] == f'"{chunk.name}"' and "immutable" in got.headers["Cache-Control"]
    assert got.headers["Content-Type"] == "application/octet-stream"
    # parts of a chunk
    for sent, status, said in (
        ({"Range": "bytes=10-19"}, 206, "bytes 10-19/1000"),
        ({"Range": "bytes=1000-"}, 416, "bytes */1000"),
        ({"Range": "bytes=10-19", "If-Range": f'"{chunk.name}"'}, 206, "bytes 10-19/1000"),
        ({"Range": "bytes=10-19", "If-Range": '"other"'}, 200, None),
    ):
        part = answer(f"{url}/chunks/{chunk.name}", **sent)
        assert (part.status_code, part.headers.get("Content-Range")) == (status, said)
        if status == 206:
            assert part.content == got.content[10:20]
    # and nothing else: by a raw socket, since HTTP libraries would tidy the path up
    port = int(url.split(":")[2].split("/")[0])
    for path in (
        *("/demo/.lock", "/demo/../served.json", "/served.json", "/demo/chunks/../roles.json"),
        *("/demo/chunks/%2e%2e%2froles.json", "/other/latest.json", "//etc/passwd", "/other/x"),
        *("/demo/versions/9/manifest.json", "/demo/chunks/" + "0" * 64, "/other/roles.json"),
    ):
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
        assert raw(port, request).startswith(b"HTTP/1.1 404"[:12]), path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"):
        got = httpx.request(method, f"{url}/latest.json", timeout=PATIENCE_S)
        assert (got.status_code, got.headers["Allow"]) == (405, "GET,HEAD")
        assert got.headers["Cache-Control"] == "no-store"


def raw(port: int, request: bytes) -> bytes:
    """The first bytes of the answer, and b"" where the connection just ends."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        try:
            connection.sendall(request)
            return connection.recv(12)
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-9", range(10)),
        ("bytes=90-", range(90, 100)),
        ("bytes=-7", range(93, 100)),
        ("bytes=-1000", range(100)),
        ("bytes=99-99", range(99, 100)),
        ("bytes=50-1000", range(50, 100)),
        # none of these bytes exist
        *((f"bytes={text}", range(0)) for text in ("100-", "100-200", "-0")),
        # a server may answer these with the whole
        *((text, None) for text in (None, "", "lines=0-9", f"bytes={'9' * 1000}-")),
        *((f"bytes={text}", None) for text in ("", "-", "5-4", "0-1,5-6", "a-b", "1", "0-9x")),
        ("bytes=\u0661-\u0662", None),
    ],
)
def test_ranges(header: str | None, expected: range | None) -> None:
    assert byte_range(header, 100) == expected


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 10_000 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"X: x\r\n" * 900 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=["path", "header", "headers", "tls"],
)
def test_a_head_that_is_none_ends_the_connection(origin, request_head, caplog):
    with caplog.at_level(logging.INFO):
        assert raw(origin.port, request_head) in (b"", b"HTTP/1.0 400")
    assert caplog.messages == []  # a stranger does not fill the log
    # and the body of a request is not waited for
    head = b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\nx"
    assert raw(origin.port, head) == OK


def test_a_poll_is_held_until_there_is_news(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    url, latest = f"{served(run, 'origin')}/latest.json", run.path("latest.json")

    def poll(**query: object) -> int:
        got = httpx.get(url, params=query, timeout=PATIENCE_S)
        return got.json()["payload"]["version"] if got.status_code == 200 else got.status_code

    assert poll(after=-1, wait=60) == poll(after=0, wait=0.1) == poll() == 0
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(poll, after=0, wait=60)
        refresh_latest(run.store, run="demo", key=run.key)  # the same version: no news
        run.publish(1, weights(seed=1))
        assert held.result() == 1
    assert {poll(after="x"), poll(wait="nan"), poll(wait="-1")} == {400}
    # a damaged file is said once, the last good one served meanwhile, and the next one after it
    write_atomic(latest, b"{}")
    assert poll(after=1, wait=0.2) == 1
    assert len(warnings(caplog)) == 1 and f"{latest}: damaged" in warnings(caplog)[0]
    write_atomic(latest, sign_latest("demo", 2, "0" * 64, run.key))
    assert poll(after=1, wait=60) == 2


def test_an_announcement_reaches_a_waiting_client_through_a_relay(run: Run) -> None:
    relay = run.relay(served(run, "origin").removesuffix("/demo"))
    client = run.client(relay.url)
    newest(client)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(newest, client, 0)
        run.publish(1, weights(seed=1))
        assert fetched(client, 1, waiting.result().manifest_digest) == weights(seed=1)
    assert client.latest(1, 0.05) is None  # no news is no error


def test_whoever_knows_its_address_may_end_it_at_once(run: Run) -> None:
    log = logging.getLogger("ended at once")
    assert hears_sigterm_at_once(lambda started: run_origin(run.store, log=log, started=started))


# -- What is measured ------------------------------------------------------------------------------


def test_what_a_server_has_done_is_counted(run: Run) -> None:
    run.publish(5, weights())
    url, full = run.origin().url, full_chunk(run)
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        manifest = client.get("/demo/versions/5/manifest.json")
        client.get(f"/demo/chunks/{full.name}")
        client.get(f"/demo/chunks/{full.name}", headers={"Range": "bytes=0-9"})
        client.head(f"/demo/chunks/{full.name}")
        for path in ("latest.json", "shardcast/v5/shard_00001.bin", "versions/6/manifest.json"):
            client.get(f"/demo/{path}")
        client.get("/nothing")
        client.post("/demo/latest.json")
        answer = client.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    lines = answer.text.splitlines()
    for what, status, count in (
        *(("manifest", 200, 1), ("manifest", 404, 1), ("chunk", 200, 2), ("chunk", 206, 1)),
        *(("shard", 200, 1), ("latest", 200, 1), ("other", 404, 1), ("other", 405, 1)),
    ):
        name = f'requests_total{{status="{status}",what="{what}"}} {count}.0'
        assert f"runspec_broadcast_{name}" in lines
    for name, value in {
        'sent_bytes_total{what="chunk"}': CHUNK_BYTES + 10,
        'sent_bytes_total{what="shard"}': CHUNK_BYTES,
        'sent_bytes_total{what="manifest"}': len(manifest.content),
        'newest_version{run="demo"}': 5,
        "connections": 1,
    }.items():
        assert f"runspec_broadcast_{name} {value}.0" in lines


def test_the_total_of_chunk_bytes_survives_a_restart_and_damage(tmp_path: Path) -> None:
    for _ in range(2):
        metrics = Metrics(tmp_path)
        for what, size in (("chunk", 100), ("shard", 10), ("manifest", 1)):
            metrics.sent(what, size)
        metrics.save()
    total = tmp_path / "served.json"
    assert total.read_text() == '{"bytes": 220}'
    for damaged in ('{"bytes": -1', '{"bytes": -1}'):
        total.write_text(damaged)
        again = Metrics(tmp_path)
        again.sent("chunk", 5)
        again.save()
        assert total.read_text() == '{"bytes": 5}'


# -- Who may read ----------------------------------------------------------------------------------


def tokens_file(folder: Path, text: str) -> Path:
    write_atomic(folder / "tokens", text.encode(), mode=0o600)
    return folder / "tokens"


def test_a_file_of_tokens_names_their_owners(tmp_path, caplog):
    path = tokens_file(tmp_path, f"# who\n\nsite-eu {A}\n  site.us\t{B}  \nsite-eu {A[:16]}\n")
    tokens = read_tokens(path, LOG)
    assert tokens.name_of(f"Bearer {A}") == "site-eu"
    assert tokens.name_of(f"bearer  {B} ") == "site.us"
    assert tokens.name_of(f"Bearer {A[:16]}") == "site-eu"  # a second one, while they change
    assert caplog.messages == []
    path.chmod(0o644)
    read_tokens(path, LOG)
    assert caplog.messages == [f"{path}: every user of this machine may read it; `chmod 600` it"]
    for header in (None, "", "Bearer", "Bearer ", f"Basic {A}", A, f"Bearer {A}x", "Bearer \udcff"):
        assert Tokens({A: "site-eu"}).name_of(header) is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        *((line, "not `NAME TOKEN`") for line in (f"name {A} x", A, "name short", f"name {A}é")),
        (f"../name {A}", "not `NAME TOKEN`"),
        (f"other {A}", "this token has another name already"),
    ],
)
def test_a_bad_line_is_named_and_its_token_not_shown(tmp_path: Path, line: str, said: str) -> None:
    path = tokens_file(tmp_path, f"first {A}\n{line}\n")
    with pytest.raises(UserError) as raised:
        read_tokens(path, LOG)
    assert f"{path}:2: {said}" in str(raised.value) and A not in str(raised.value)
    for data, words in ((b"#" * (MAX_TOKENS_BYTES + 1), "larger than"), (b"\xff", "cannot read")):
        path.write_bytes(data)
        with pytest.raises(UserError, match=words):
            read_tokens(path, LOG)


@both_kinds
def test_a_server_with_tokens_tells_others_its_health_alone(run, tmp_path, kind, caplog):
    run.publish(0, weights())
    tokens = tokens_file(tmp_path, f"site-eu {A}\n")
    options = ServerOptions(tokens_file=tokens)
    server = run.origin(options) if kind == "origin" else run.relay("http://x", options=options)
    for path in ("/metrics", "/demo/latest.json", "/demo/shardcast/data1.bin", "/nothing"):
        for token in (None, B):
            refused = answer(server.url + path, token)
            assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert answer(f"{server.url}/healthz").text == "ok\n"
    url = f"{server.url}/metrics"
    assert "runspec_broadcast_auth_failures_total 8.0" in answer(url, A).text
    # a token is revoked and another one given without a restart
    tokens_file(tmp_path, f"site-eu {B}\n")
    assert [answer(url, token).status_code for token in (A, B)] == [401, 200]
    # and a damaged file changes nothing and is said once
    caplog.clear()
    tokens_file(tmp_path, "site-eu\n")
    assert {answer(url, B).status_code for _ in range(3)} == {200}
    (said,) = [line for line in warnings(caplog) if "tokens" in line]
    assert f"{tokens}:1: not `NAME TOKEN`" in said


# -- How much, how often ---------------------------------------------------------------------------


def test_each_token_has_its_own_rate(run: Run, tmp_path: Path) -> None:
    # given two clients behind one address, each with a byte a second
    run.publish(0, weights())
    tokens = tokens_file(tmp_path, f"site-eu {A}\nsite-us {B}\n")
    url = run.origin(ServerOptions(tokens_file=tokens, rate_limit=1)).url
    first, second, *_ = (f"{url}/demo/chunks/{chunk.blake3}" for chunk in run.weights_chunks())
    # when one takes more than its share, then it is told when to come back
    assert answer(first, A).status_code == 200
    refused = answer(second, A)
    assert (refused.status_code, refused.headers["Cache-Control"]) == (429, "no-store")
    assert 900 < int(refused.headers["Retry-After"]) <= 1000
    # while announcements and the other client go on
    assert answer(f"{url}/demo/latest.json", A).status_code == 200
    head = httpx.head(second, headers={"Authorization": f"Bearer {A}"}, timeout=PATIENCE_S)
    assert head.status_code == 200
    assert answer(second, B).status_code == 200
    assert "runspec_broadcast_rate_limited_total 1.0" in answer(f"{url}/metrics", A).text


def test_our_client_waits_for_its_rate_and_blames_nobody(run, monkeypatch, caplog):
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr("broadcast.admission.time", clock)
    url = served(run, "origin", rate_limit=4000).removesuffix("/demo")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fetched, run.client(url))
        eventually(lambda: metric(url, "rate_limited_total") > 0, "it is told to wait")
        clock.monotonic = lambda: 60.0
        assert waiting.result() == weights()
    assert warnings(caplog) == []


def test_a_client_has_so_many_answers_at_once(run: Run) -> None:
    # given a server that answers one request of a client at once, and a poll that is held
    url = served(run, "origin", limits=Limits(requests_per_client=1))
    latest, root = f"{url}/latest.json", url.removesuffix("/demo")
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(httpx.get, latest, params={"after": 0, "wait": 60}, timeout=PATIENCE_S)
        eventually(lambda: metric(root, "polls_waiting") == 1, "it waits")
        # when the client asks for more, then it is told to come back, and is answered after that
        more = answer(latest)
        assert (more.status_code, more.headers["Retry-After"]) == (429, "1")
        run.publish(1, weights(seed=1))
        assert held.result().json()["payload"]["version"] == 1
    assert answer(latest).status_code == 200


@settings(derandomize=True, deadline=None)
@given(
    rate=st.integers(1, 10**9),
    asked=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10**8)), max_size=50),
)
def test_never_more_than_the_rate_a_second_and_one_piece(rate, asked):
    # given requests at any times, of any sizes
    limit, now, taken, largest = TokenBuckets(), 0.0, 0, 0
    for pause, size in asked:
        now += pause
        wait_s = limit.wait_s("a", 1.0, now)
        if wait_s == 0:
            limit.take("a", size / rate, now)
            taken += size
            largest = max(largest, size)
        else:
            # when one is refused, then waiting for as long as it said is enough
            assert limit.wait_s("a", 1.0, now + wait_s * (1 - 1e-6) - 1e-6) > 0
            now += wait_s * (1 + 1e-9) + 1e-8
            assert limit.wait_s("a", 1.0, now) == 0.0
    # then the whole is bounded
    assert taken <= (now + 1) * rate * (1 + 1e-6) + largest


def test_only_so_many_clients_are_remembered() -> None:
    limit = TokenBuckets(max_names=3)
    for client, cost_s in (("a", 10.0), ("b", 5.0), ("c", 20.0)):
        limit.take(client, cost_s, now=0.0)
    # another one waits until a bucket is full, and those that are remembered do not
    assert limit.wait_s("d", 30.0, now=2.0) == 3.0
    assert limit.wait_s("c", 30.0, now=2.0) == 0.0
    assert limit.wait_s("d", 30.0, now=5.0) == 0.0


# -- Many connections, slow ones, and ones that say nothing: none keeps another from being served --

Connect = Callable[..., socket.socket]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Opens connections to a port, closed with the test."""
    with ExitStack() as stack:

        def connect(port: int, say: bytes = b"", address: str = "127.0.0.1") -> socket.socket:
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.bind((address, 0))
            connection.settimeout(PATIENCE_S)
            connection.connect(("127.0.0.1", port))
            connection.sendall(say)
            return connection

        yield connect


def rest(connection: socket.socket, enough: int = sys.maxsize) -> int:
    """Bytes that still come until the server ends a connection, or until there are enough."""
    received = 0
    with suppress(ConnectionResetError):
        while received < enough and (data := connection.recv(1024 * 1024)):
            received += len(data)
    return received


def asking_for(chunk: Path) -> bytes:
    return f"GET /demo/chunks/{chunk.name} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def limited(run: Run, max_connections: int = 4096, **limits: float) -> Served:
    run.publish(0, weights())
    return run.origin(ServerOptions(max_connections=max_connections), **limits)


def test_a_client_has_half_of_the_places_at_most(run: Run, connect: Connect) -> None:
    served = limited(run, max_connections=6)
    first, *_ = [connect(served.port, POLL) for _ in range(3)]
    eventually(lambda: metric(served.url, "polls_waiting") == 3, "they wait")
    assert connect(served.port, POLL).recv(12) == b"HTTP/1.1 429"
    connect(served.port, POLL, "127.0.0.2")
    eventually(lambda: metric(served.url, "polls_waiting") == 4, "another's does too")
    # and a poll ends with its client
    first.close()
    eventually(lambda: metric(served.url, "polls_waiting") == 3, "one waits less")
    gone = 'requests_total{status="499",what="latest"}'
    eventually(lambda: metric(served.url, gone) == 1, "it is counted")


def test_idle_connections_keep_nobody_waiting(run: Run, connect: Connect) -> None:
    # given a server of few places, and many that say nothing, or half a request
    served = limited(run, max_connections=24)
    for said in (b"", b"GET /demo/latest.json HTTP/1.1\r\nHost: x\r\nX: "):
        for _ in range(40):
            connect(served.port, said)
    # then a client that comes after them has its version all the same
    assert fetched(run.client(served.url)) == weights()
    assert metric(served.url, 'connections_dropped_total{why="room"}') > 50


def test_a_reader_below_the_floor_is_disconnected(run: Run, connect: Connect) -> None:
    # given a server that wants 4 MiB to be taken in a third of a second, and one who takes nothing
    served = limited(run, floor_bytes_per_s=12 * 1024 * 1024)
    large = large_chunk(run, 32 * 1024 * 1024)
    stalled = connect(served.port, asking_for(large))
    assert stalled.recv(12) == OK
    slow = 'connections_dropped_total{why="slow reader"}'
    eventually(lambda: metric(served.url, slow) == 1, "it is disconnected")
    assert metric(served.url, "transfers") == 0
    assert rest(stalled) < large.stat().st_size


def test_a_server_stops_under_load_and_sends_no_cut_file_as_whole(run, connect):
    served, large = limited(run), large_chunk(run)
    cut, stalled = (connect(served.port, asking_for(large)) for _ in range(2))
    assert cut.recv(12) == stalled.recv(12) == OK
    # when the file loses its end, then the connection ends early, which the reader sees
    with large.open("r+b") as file:
        file.truncate(32 * 1024 * 1024)
    assert rest(cut) < 33 * 1024 * 1024
    # when the server stops, then all end: a stalled reader, a poll, an idle one, half a head
    others = [connect(served.port, said) for said in (POLL, HEALTH, b"", b"GET /")]
    eventually(lambda: metric(served.url, "polls_waiting") == 1, "it waits")
    served.stop()
    assert all(rest(each) < 64 * 1024 * 1024 for each in (stalled, *others))


# -- Clients of the published `shardcast` package --------------------------------------------------

PACKAGE = Path(__file__).parents[2] / ".venv" / "shardcast"


def _why_not() -> str:
    if not (PACKAGE / "shardcast").is_dir():
        return "`make shardcast` was not run"
    # The client looks for wget without a PATH, and would have a system's package manager bring it.
    found = subprocess.run(["which", "wget"], env={}, capture_output=True, check=False)
    return "" if found.returncode == 0 else "wget is not installed"


@pytest.mark.skipif(_why_not() != "", reason=_why_not())
@both_kinds
def test_the_published_client_downloads_a_version(run: Run, tmp_path: Path, kind: str) -> None:
    # given a server that asks for a token, and the client of the published package, which has it
    # from wget's settings; it writes beside its own source, so it has a copy
    run.publish(0, weights())
    tokens = tokens_file(tmp_path, f"eu {A}\n")
    options, plain = ServerOptions(tokens_file=tokens), run.static()
    server = run.origin(options) if kind == "origin" else run.relay(plain.url, options=options)
    listed = f"{server.url}/demo/shardcast/distribution.txt"
    eventually(lambda: answer(listed, A).text != "", "it is listed")
    copy = shutil.copytree(PACKAGE / "shardcast", tmp_path / "client" / "shardcast").parent
    (tmp_path / "wgetrc").write_text(f"header = Authorization: Bearer {A}\n")
    wanted = ["--servers", f"{server.url}/demo/shardcast", "--version", "v0"]

    def download(**variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(map(str, (copy, PACKAGE))),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-S", "-m", "shardcast.client_node", *wanted]
        command += ["--output-file", str(tmp_path / "got.bin")]
        given = {"env": environment | variables, "capture_output": True, "text": True}
        return subprocess.run(command, cwd=tmp_path, timeout=PATIENCE_S, check=False, **given)

    # when it downloads the version, then it has the weights, and found its own checksum right
    assert download().returncode != 0
    done = download(WGETRC=str(tmp_path / "wgetrc"))
    assert done.returncode == 0 and "Checksum verification passed" in done.stderr, done.stderr
    assert (tmp_path / "got.bin").read_bytes() == weights()["model.safetensors"]


@both_kinds
def test_shards_are_the_chunks_in_order(run: Run, kind: str) -> None:
    # given a server before a version is out, which the client measures and asks
    run.path().mkdir(parents=True)
    run.path("roles.json").write_bytes(run.roles)
    folder = f"{run.server(kind).url}/demo/shardcast"
    assert len(answer(f"{folder}/data1.bin").content) == 65536
    assert answer(f"{folder}/distribution.txt").text == ""
    assert answer(f"{folder}/v0/shard_00001.bin").status_code == 404
    # when a version is out, then its shards are there
    run.publish(3, weights())
    listed = f"v3: {digest_bytes(weights()['model.safetensors'])}|6\n"
    eventually(lambda: answer(f"{folder}/distribution.txt").text == listed, "it is listed")
    shards = [answer(f"{folder}/v3/shard_{number:05d}.bin").content for number in range(1, 7)]
    assert b"".join(shards) == weights()["model.safetensors"]
    for wrong in ("v3/shard_00007.bin", "v3/shard_00000.bin", "v3/shard_1.bin", "v3"):
        assert answer(f"{folder}/{wrong}").status_code == 404


def test_only_versions_of_one_weights_file_are_listed() -> None:
    def manifest(version: int, objects: dict[str, int], *files: str) -> WeightsManifest:
        chunks = {n: tuple(Chunk(f"{i:064x}", 1) for i in range(objects[n])) for n in objects}
        infos = {n: ObjectInfo(len(chunks[n]), n[0] * 64, chunks[n]) for n in objects}
        return WeightsManifest("demo", version, None, None, {}, files, infos, {})

    one_file = {"model.safetensors": 3, "config.json": 1}
    held = {
        12: manifest(12, one_file, "model.safetensors"),
        2: manifest(2, one_file),
        3: manifest(3, {"config.json": 1}, "model.safetensors"),  # a delta version
        4: manifest(4, {"a.safetensors": 1, "b.safetensors": 1}, "a.safetensors"),
        5: manifest(5, {"config.json": 1}),
    }
    assert shardcast_distribution(held) == f"v2: {'m' * 64}|3\nv12: {'m' * 64}|3\n"
