"""Clocks that are wrong: minutes do no harm, hours are said to be what they are."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from broadcast.store import publish
from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from runspec.core.latest import KIND, VALID_S
from runspec.core.roles import sign_roles
from runspec.core.signed import sign_document

from ..conftest import Run, contents, weights
from ..processes import Processes

MINUTES = 60.0
HOURS = 3600.0
WRONG_CLOCK = (
    "import sys, time; ahead = float(sys.argv.pop(1)); right = time.time; "
    "time.time = lambda: right() + ahead; "
    "from broadcast.__main__ import main; sys.exit(main(sys.argv[1:]))"
)
"""`python -m broadcast` on a machine whose clock is so many seconds ahead."""


def on_a_clock(ahead_s: float) -> tuple[str, ...]:
    return (sys.executable, "-c", WRONG_CLOCK, str(ahead_s))


@pytest.mark.parametrize("ahead_s", [4 * MINUTES, -4 * MINUTES])
def test_minutes_between_relay_and_client_do_no_harm(
    run: Run, processes: Processes, ahead_s: float
) -> None:
    # given a relay whose clock is off by minutes, and a client whose is off the other way
    run.publish(0, weights())
    origin = run.origin()
    relay = processes.start(
        *("relay", "--run", "demo", "--upstream", origin.url, "--store", run.folder / "relay"),
        *("--listen", "127.0.0.1:0", "--public-key", run.root),
        command=on_a_clock(ahead_s),
    )
    out = run.folder / "out"
    client = processes.start(
        *("fetch", processes.url(relay), "--run", "demo", "--out", out),
        *("--public-key", run.root, "--deadline", 20),
        command=on_a_clock(-ahead_s),
    )
    # when the client fetches through the relay, then it has the version
    assert client.wait(30) == 0, processes.said(client)
    assert contents(out / "v0") == weights()


@pytest.mark.parametrize(("ahead_s", "said"), [(2 * HOURS, "expired"), (-2 * HOURS, "future")])
def test_a_client_whose_clock_is_off_by_hours_is_told(
    run: Run, processes: Processes, ahead_s: float, said: str
) -> None:
    run.publish(0, weights())
    origin = run.origin()
    out = run.folder / "out"

    client = processes.start(
        *("fetch", origin.url, "--run", "demo", "--out", out),
        *("--public-key", run.root, "--deadline", 1),
        command=on_a_clock(ahead_s),
    )

    assert client.wait(20) == 1
    assert origin.url in processes.said(client) and said in processes.said(client)
    assert not (out / "v0").exists()


@pytest.mark.parametrize("ahead_s", [4 * MINUTES, -4 * MINUTES, 20 * MINUTES, -20 * MINUTES])
def test_a_publisher_whose_clock_is_off(run: Run, ahead_s: float) -> None:
    # given a latest.json signed by a clock that is off
    digest = run.publish(0, weights())
    issued = time.time() + ahead_s
    payload = {"run": "demo", "version": 0, "manifest_digest": digest}
    times = {"issued": issued, "expires": issued + VALID_S}
    (run.store / "demo/latest.json").write_bytes(sign_document(KIND, payload | times, run.key))
    client = run.client(run.static().url)
    # when a client asks, then minutes are allowed for, and more is called what it is
    if abs(ahead_s) < 5 * MINUTES:
        assert client.latest(None, 10) is not None
    else:
        with pytest.raises(UserError, match="in the future" if ahead_s > 0 else "expired"):
            client.latest(None, 0.7)


@pytest.mark.parametrize(
    ("issued_s", "valid_s", "said"), [(-3000, 1000, "roles: expired"), (3000, 1000, "future")]
)
def test_roles_out_of_their_time_are_refused(
    run: Run, tmp_path: Path, issued_s: float, valid_s: float, said: str
) -> None:
    # given a roles.json that has expired, or is not yet valid, and a version published under it
    keys = {"publisher": [run.key.public_hex], "coordinator": [], "validator": []}
    root = SigningKey.load(run.keys / "root.key")
    now = time.time() + issued_s
    roles = sign_roles("demo", keys, root, valid_s=valid_s, now=now)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "x").write_bytes(b"x")
    publish(run.store, tmp_path / "files", run="demo", version=0, key=run.key, roles=roles)
    server = run.static()
    # when a client that knows no others reads it, then nothing that it names is believed
    client = run.client(server.url)
    with pytest.raises(UserError, match=said):
        client.latest(None, 0.7)
    with pytest.raises(UserError, match=said):
        client.fetch(0, manifest_digest=None, deadline_s=0.7)
    # and a relay passes none of it on
    relay = run.relay(server.url)
    with pytest.raises(UserError, match=relay.url):
        run.client(relay.url, cache="through").latest(None, 0.7)


def test_a_client_outlives_the_roles_that_it_knew(run: Run) -> None:
    # given a client that knows roles that are about to be too old, by more than any skew allowed
    keys = {"publisher": [run.key.public_hex], "coordinator": [], "validator": []}
    root = SigningKey.load(run.keys / "root.key")
    now = time.time()
    old = sign_roles("demo", keys, root, valid_s=1.0, now=now - 300.0)
    (run.keys / "roles.json").write_bytes(old)
    run.publish(0, weights())
    client = run.client(run.static().url)
    assert client.latest(None, 10) is not None
    # when they are, and the root has signed new ones
    (run.keys / "roles.json").write_bytes(sign_roles("demo", keys, root, valid_s=1000.0))
    run.publish(1, weights(seed=1))
    # then the client goes on with those
    latest = client.latest(0, 10)
    assert latest is not None and latest.version == 1
