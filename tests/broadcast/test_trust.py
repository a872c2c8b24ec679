"""Documents that are whole and rightly signed, and still not to be believed."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from broadcast.layout import MAX_VERSION, renew_keys
from runspec.core.roles import LATEST, VALID_S, sign_latest
from runspec.core.signed import SigningKey, sign_document
from tests.broadcast.conftest import Run, answer, fetched, newest, no_latest, not_fetched, weights
from tests.broadcast.fake_relay import instead
from tests.waiting import eventually

MINUTES = 60.0


def test_the_files_of_another_run_are_refused(run: Run, tmp_path: Path) -> None:
    """Signed by the same publisher, for another run, and served under this one's path."""
    run.publish(0, weights())
    other = Run(tmp_path / "other", run._stack, name="other")
    other.key = run.key
    other.sign_roles(run.key)
    other.publish(0, weights(seed=1))
    for name in ("latest.json", "versions/0/manifest.json"):
        shutil.copy(other.path(name), run.path(name))
    client = run.client(run.static().url)
    no_latest(client, "of run 'other', not 'demo'")
    not_fetched(client, "of run 'other', not 'demo'")


def test_a_stranger_cannot_publish(run: Run, tmp_path: Path) -> None:
    """A whole store by another root, and a strange key under the right roles.json."""
    stranger = Run(tmp_path / "stranger", run._stack)
    stranger.publish(0, weights())
    client = run.client(run.static(stranger.store).url)
    no_latest(client, "roles: signed by")
    stranger.path("roles.json").write_bytes(run.roles)
    no_latest(client, "latest: signed by")
    not_fetched(client, "weights: signed by")


def test_a_revoked_key_stays_revoked(run: Run) -> None:
    """A client that saw newer roles is not talked back to the old ones."""
    run.publish(0, weights())
    old = shutil.copytree(run.store, run.folder / "old")
    run.key = SigningKey.generate()
    run.sign_roles(run.key)
    run.publish(1, weights(seed=1))
    newest(run.client(run.static().url))
    # with the old roles.json, a manifest for a version yet to come, by the key that was stolen
    not_fetched(run.client(run.static(old).url), "weights: signed by")


def test_expired_roles_give_way_to_no_older_ones(run: Run) -> None:
    """Those that revoked a key may expire before those that still name it."""
    # given a client's folder with a roles.json that revoked the publisher's key, expired since
    run.sign_roles(run.key, ago_s=2000, valid_s=10_000)
    run.publish(0, weights())
    run.sign_roles(SigningKey.generate(), ago_s=1000, valid_s=600)
    (run.folder / "cache").mkdir()
    (run.folder / "cache" / "roles.json").write_bytes(run.roles)
    client = run.client(run.static().url)
    # when a server offers the older one, which has not expired, then it is refused
    for ask in (no_latest, not_fetched):
        ask(client, "roles.json older than one seen before")


def test_a_client_outlives_the_roles_that_it_knew(run, monkeypatch):
    run.publish(0, weights())
    client = run.client(run.static().url)
    newest(client)
    # when all that it knows has expired, and the root has signed new roles
    later = time.time() + 366 * 86400.0
    monkeypatch.setattr(time, "time", lambda: later)
    run.sign_roles(run.key)
    run.publish(1, weights(seed=1))
    # then the client goes on with those
    assert newest(client, 0).version == 1


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
def test_what_a_thief_called_the_newest_is_forgotten_with_the_key(run, restarted):
    # given a relay and a client that saw the highest of all versions, by a key that was stolen
    run.publish(MAX_VERSION - 1, weights())
    server = run.static()
    relay = run.relay(server.url)
    client = run.client(relay.url)
    newest(client, MAX_VERSION - 2)
    # when the key is revoked and the new one publishes
    if restarted:
        relay.stop()
    shutil.rmtree(run.path())
    run.key = SigningKey.generate()
    run.sign_roles(run.key)
    digest = run.publish(1, weights(seed=1))
    if restarted:
        relay = run.relay(server.url)
        client = run.client(relay.url)
    # then that is what the relay announces and the client goes on with
    announced = f"{relay.url}/demo/latest.json"
    eventually(lambda: b'"version":1}' in answer(announced).content, "version 1 announced")
    assert newest(client).version == 1
    assert fetched(client, 1, digest) == weights(seed=1)
    # and nothing of the thief's is left at the relay
    assert [p.name for p in (run.folder / "relay/demo/versions").iterdir()] == ["1"]


def test_a_relay_hears_of_a_revocation_without_a_new_version(run: Run) -> None:
    # given a relay that was up before the revocation, of which the origin tells
    run.publish(0, weights())
    relay = run.relay(run.origin().url)
    newest(run.client(relay.url))
    renew_keys(run.keys, ["publisher"])
    run.path("roles.json").write_bytes(run.roles)
    # when it starts again (or a minute has passed)
    relay.stop()
    run.relay(run.origin().url)
    # then it has the new roles, although all that it sees is by the old key
    path = run.folder / "relay" / "demo" / "roles.json"
    eventually(lambda: path.read_bytes() == run.roles, "the relay has the new roles")


def test_an_older_version_does_not_pass_for_the_newest(run: Run) -> None:
    run.publish(0, weights())
    old = shutil.copytree(run.store, run.folder / "old")
    run.publish(1, weights(seed=1))
    assert newest(run.client(run.origin().url)).version == 1
    # a restarted client of the same folder has not forgotten
    stale = run.static(old)
    client = run.client(stale.url)
    no_latest(client, "offers version 0 as the newest, 1 was seen")
    # the server is believed about all else, and beside an honest one it hides nothing
    upstream = client._fetcher.upstreams.all[0]
    assert (upstream.failures, upstream.distrusted_until) == (0, 0.0)
    assert fetched(client) == weights()
    assert newest(run.client(stale.url, run.static().url, cache="both"), 0).version == 1


def test_a_version_number_has_one_meaning(run: Run) -> None:
    # given a server that shows version 0's manifest, rightly signed, where version 1's should be
    old = run.publish(0, weights())
    digest = run.publish(1, weights(seed=1))
    liar = run.static()
    truth = run.path("versions/0/manifest.json").read_bytes()
    liar.answer("versions/1/manifest.json", instead(truth))
    client = run.client(liar.url)
    # when version 1 is asked for, by its number or as latest.json names it, then that is refused
    not_fetched(client, "is of version 0", version=1)
    assert newest(client).manifest_digest == digest
    not_fetched(client, f"its digest is {old[:16]}, not {digest[:16]}", version=1)
    # and so is a latest.json that names another manifest of it
    run.path("latest.json").write_bytes(sign_latest("demo", 1, "1" * 64, run.key))
    no_latest(client, "names another manifest for version 1")


# -- Clocks that are wrong: minutes do no harm, hours are said to be what they are -----------------


@pytest.mark.parametrize("ahead_s", [m * MINUTES for m in (4, -4, 20, -20)])
def test_a_publishers_clock_may_be_off_by_minutes(run: Run, ahead_s: float) -> None:
    # given a latest.json signed by a clock that is off
    payload = {"run": "demo", "version": 0, "manifest_digest": run.publish(0, weights())}
    issued = time.time() + ahead_s
    payload |= {"issued": issued, "expires": issued + VALID_S}
    run.path("latest.json").write_bytes(sign_document(LATEST, payload, run.key))
    server = run.static()
    relay = run.relay(server.url)
    client, through = run.client(server.url), run.client(relay.url, cache="through")
    # when it is asked for, then minutes are allowed for, and more is called what it is
    if abs(ahead_s) < 5 * MINUTES:
        assert newest(client) == newest(through)
    else:
        no_latest(client, server.url, "in the future" if ahead_s > 0 else "expired")
        no_latest(through, relay.url)  # the relay passes nothing on


@pytest.mark.parametrize(
    ("ago_s", "valid_s", "said"), [(3000, 1000, "roles: expired"), (-3000, 1000, "in the future")]
)
def test_roles_out_of_their_time_are_refused(run, ago_s, valid_s, said):
    # given a roles.json that has expired, or is not yet valid, and a version published under it
    run.sign_roles(run.key, ago_s=ago_s, valid_s=valid_s)
    run.publish(0, weights())
    server = run.static()
    # when a client that knows no others reads it, then nothing that it names is believed
    client = run.client(server.url)
    for ask in (no_latest, not_fetched):
        ask(client, said)
    # and a relay passes none of it on
    relay = run.relay(server.url)
    no_latest(run.client(relay.url, cache="through"), relay.url)
