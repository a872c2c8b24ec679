"""Who may read: bearer tokens from a file, and what limits go by without them."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broadcast.admission import RateLimit, address_of
from broadcast.credentials import MAX_TOKENS_BYTES, Tokens, read_tokens
from broadcast.server import Limits, ServerOptions
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from tests.waiting import eventually

from .conftest import CHUNK_BYTES, LOG, Run, contents, weights

A, B = "a" * 32, "B0._~+/=-" * 4


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def tokens_file(folder: Path, text: str) -> Path:
    path = folder / "tokens"
    write_atomic(path, text.encode(), mode=0o600)
    return path


def test_a_file_of_tokens(tmp_path: Path) -> None:
    path = tokens_file(tmp_path, f"# who\n\nsite-eu {A}\n  site.us\t{B}  \nsite-eu {A[:16]}\n")

    tokens = read_tokens(path, LOG)

    assert tokens.name_of(f"Bearer {A}") == "site-eu"
    assert tokens.name_of(f"bearer  {B} ") == "site.us"
    assert tokens.name_of(f"Bearer {A[:16]}") == "site-eu"  # a second one, while they change


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", f"Basic {A}", A, f"Bearer {A}x", "Bearer \udcff"]
)
def test_everything_else_names_nobody(header: str | None) -> None:
    assert Tokens({A: "site-eu"}).name_of(header) is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"name {A} more", "not `NAME TOKEN`"),
        (A, "not `NAME TOKEN`"),
        ("name short", "not `NAME TOKEN`"),
        (f"name {A}\u00e9", "not `NAME TOKEN`"),
        (f"../name {A}", "not `NAME TOKEN`"),
        (f"other {A}", "this token has another name already"),
    ],
)
def test_a_bad_line_is_named_and_its_token_not_shown(tmp_path: Path, line: str, said: str) -> None:
    path = tokens_file(tmp_path, f"first {A}\n{line}\n")

    with pytest.raises(UserError) as raised:
        read_tokens(path, LOG)

    assert f"{path}:2: {said}" in str(raised.value)
    assert A not in str(raised.value)


def test_a_file_that_is_missing_or_too_large(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokens: cannot read the tokens: .*No such file"):
        read_tokens(tmp_path / "tokens", LOG)
    path = tokens_file(tmp_path, "#" * (MAX_TOKENS_BYTES + 1))
    with pytest.raises(UserError, match="larger than"):
        read_tokens(path, LOG)


def test_secrets_that_everybody_can_read_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tokens_file(tmp_path, f"site-eu {A}\n")
    with caplog.at_level(logging.WARNING):
        read_tokens(path, LOG)
        assert caplog.messages == []
        path.chmod(0o644)
        read_tokens(path, LOG)
    assert caplog.messages == [f"{path}: every user of this machine may read it; `chmod 600` it"]


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        (("192.0.2.7", 4711), "192.0.2.7"),
        (("::ffff:192.0.2.7", 4711, 0, 0), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 4711, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 4711, 0, 2), "fe80::/64"),
        (("not an address", 1), "unknown"),
        ("/run/socket", "unknown"),
        (None, "unknown"),
    ],
)
def test_without_tokens_a_client_is_its_address(peer: object, name: str) -> None:
    assert address_of(peer) == name


@pytest.mark.parametrize("kind", ["origin", "relay"])
def test_a_server_with_tokens(run: Run, tmp_path: Path, kind: str) -> None:
    # given a server that asks for tokens
    run.publish(0, weights())
    options = ServerOptions(tokens_file=tokens_file(tmp_path, f"site-eu {A}\n"))
    if kind == "origin":
        url = run.origin(options=options).url
    else:
        url = run.relay("http://127.0.0.1:1", options=options).url
    # when somebody asks without one, then only its health is told
    for path in ("/metrics", "/demo/latest.json", "/demo/shardcast/data1.bin", "/nothing"):
        for headers in ({}, bearer(B)):
            refused = httpx.get(url + path, headers=headers)
            assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert httpx.get(f"{url}/healthz").text == "ok\n"
    # and with one everything
    metrics = httpx.get(f"{url}/metrics", headers=bearer(A))
    assert metrics.status_code == 200
    assert "runspec_broadcast_auth_failures_total 8.0" in metrics.text


def test_a_token_is_revoked_and_another_given_without_a_restart(run: Run, tmp_path: Path) -> None:
    run.publish(0, weights())
    tokens = tokens_file(tmp_path, f"site-eu {A}\n")
    url = f"{run.origin(options=ServerOptions(tokens_file=tokens)).url}/demo/latest.json"
    assert httpx.get(url, headers=bearer(A)).status_code == 200

    tokens_file(tmp_path, f"site-eu {B}\n")

    assert httpx.get(url, headers=bearer(A)).status_code == 401
    assert httpx.get(url, headers=bearer(B)).status_code == 200


def test_a_damaged_file_of_tokens_changes_nothing_and_is_said_once(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run.publish(0, weights())
    tokens = tokens_file(tmp_path, f"site-eu {A}\n")
    url = f"{run.origin(options=ServerOptions(tokens_file=tokens)).url}/demo/latest.json"

    tokens_file(tmp_path, "site-eu\n")

    for _ in range(3):
        assert httpx.get(url, headers=bearer(A)).status_code == 200
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert f"{tokens}:1: not `NAME TOKEN`" in errors[0]


def test_each_token_has_its_own_rate(run: Run, tmp_path: Path) -> None:
    # given two clients behind one address, each with a byte a second
    run.publish(0, weights())
    tokens = tokens_file(tmp_path, f"site-eu {A}\nsite-us {B}\n")
    url = run.origin(options=ServerOptions(tokens_file=tokens, rate_limit=1)).url
    full = [path for path in run.chunks() if path.stat().st_size == CHUNK_BYTES]
    chunks = [f"{url}/demo/chunks/{path.name}" for path in full]
    # when one takes more than its share
    assert httpx.get(chunks[0], headers=bearer(A)).status_code == 200
    refused = httpx.get(chunks[1], headers=bearer(A))
    # then it is told when to come back, while announcements and the other client go on
    assert refused.status_code == 429
    assert int(refused.headers["Retry-After"]) >= 1
    assert refused.headers["Cache-Control"] == "no-store"
    assert httpx.get(f"{url}/demo/latest.json", headers=bearer(A)).status_code == 200
    assert httpx.head(chunks[1], headers=bearer(A)).status_code == 200
    assert httpx.get(chunks[1], headers=bearer(B)).status_code == 200
    metrics = httpx.get(f"{url}/metrics", headers=bearer(A)).text
    assert "runspec_broadcast_rate_limited_total 1.0" in metrics


def test_our_client_waits_for_its_rate_and_blames_nobody(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    # given a server that gives half of a version a second
    run.publish(0, weights())
    url = run.origin(options=ServerOptions(rate_limit=2800)).url
    # when it is fetched
    path = run.client(url).fetch(0, manifest_digest=None, deadline_s=60)
    # then it comes, although the server said wait
    assert contents(path) == weights()
    assert "runspec_broadcast_rate_limited_total 0.0" not in httpx.get(f"{url}/metrics").text
    assert [record for record in caplog.records if record.levelname != "INFO"] == []


def test_a_client_has_so_many_answers_at_once(run: Run) -> None:
    # given a server that answers one request of a client at once, and a poll that is held
    run.publish(0, weights())
    url = run.origin(options=ServerOptions(limits=Limits(requests_per_client=1))).url
    latest = f"{url}/demo/latest.json"
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(httpx.get, latest, params={"after": 0, "wait": 30}, timeout=60)
        eventually(
            lambda: "runspec_broadcast_polls_waiting 1.0" in httpx.get(f"{url}/metrics").text,
            "it waits",
        )
        # when the client asks for more
        more = httpx.get(latest)
        # then it is told to come back
        assert (more.status_code, more.headers["Retry-After"]) == (429, "1")
        # and is answered once the poll is
        run.publish(1, weights(seed=1))
        assert held.result().json()["payload"]["version"] == 1
    assert httpx.get(latest).status_code == 200


# -- The token bucket: what a client may have over any time ----------------------------------------


def test_only_so_many_clients_are_remembered() -> None:
    limit = RateLimit(100, max_clients=3)
    for client in ("a", "b", "c"):
        limit.take(client, 1000, now=0.0)
    limit.take("a", 1, now=9.0)

    limit.take("d", 1000, now=9.0)

    assert limit.take("b", 1, now=9.0) == 0.0  # forgotten: it took something longest ago
    assert limit.take("d", 1, now=9.0) > 0


@given(
    rate=st.integers(1, 10**9),
    asked=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10**8)), max_size=50),
)
def test_never_more_than_the_rate_a_second_and_one_piece(
    rate: int, asked: list[tuple[float, int]]
) -> None:
    # given requests at any times, of any sizes
    limit, now, taken, largest = RateLimit(rate), 0.0, 0, 0
    for pause, size in asked:
        now += pause
        wait_s = limit.take("a", size, now)
        if wait_s == 0:
            taken += size
            largest = max(largest, size)
        else:
            # when one is refused, then waiting for as long as it said is enough
            now += wait_s * (1 + 1e-9) + 1e-9
            assert limit.take("a", 0, now) == 0.0
    # then the whole is bounded
    assert taken <= (now + 1) * rate * (1 + 1e-6) + largest
