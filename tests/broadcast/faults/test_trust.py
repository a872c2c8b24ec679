"""Documents that are whole and rightly signed, and still not to be believed."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import httpx
import pytest

from broadcast.layout import MAX_VERSION
from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from runspec.core.roles import sign_roles
from tests.waiting import eventually

from ..conftest import Run, contents, weights


def sign_new_roles(
    run: Run, *publishers: SigningKey, valid_s: float = 1000, ago_s: float = 0
) -> None:
    """A newer roles.json of the run's root, beside its keys."""
    keys = {"publisher": [k.public_hex for k in publishers], "coordinator": [], "validator": []}
    root = SigningKey.load(run.keys / "root.key")
    roles = sign_roles(run.name, keys, root, valid_s=valid_s, now=time.time() - ago_s)
    (run.keys / "roles.json").write_bytes(roles)


def test_another_runs_files_are_refused(run: Run, other_run: Run) -> None:
    """Signed by the same publisher, for another run, and served under this one's path."""
    run.publish(0, weights())
    other_run.key = run.key
    sign_new_roles(other_run, run.key)
    other_run.publish(0, weights(seed=1))
    (run.store / "demo" / "latest.json").unlink()
    for name in ("latest.json", "versions/0/manifest.json"):
        shutil.copy(other_run.store / "other" / name, run.store / "demo" / name)
    client = run.client(run.static().url)

    with pytest.raises(UserError, match="of run 'other', not 'demo'"):
        client.latest(None, 0.7)
    with pytest.raises(UserError, match="of run 'other', not 'demo'"):
        client.fetch(0, manifest_digest=None, deadline_s=0.7)


def test_a_stranger_cannot_publish(run: Run, tmp_path: Path) -> None:
    """A whole store by another root, and a strange key under the right roles.json."""
    stranger = Run(tmp_path / "stranger", run._stack)
    stranger.publish(0, weights())
    served = run.static(stranger.store)
    with pytest.raises(UserError, match="roles: signed by"):
        run.client(served.url).latest(None, 0.7)

    (stranger.store / "demo" / "roles.json").write_bytes(run.roles)
    with pytest.raises(UserError, match="latest: signed by"):
        run.client(served.url).latest(None, 0.7)
    with pytest.raises(UserError, match="weights: signed by"):
        run.client(served.url).fetch(0, manifest_digest=None, deadline_s=0.7)


def test_a_revoked_key_stays_revoked(run: Run) -> None:
    """A client that saw newer roles is not talked back to the old ones."""
    run.publish(0, weights())
    old = run.folder / "old"
    shutil.copytree(run.store, old)
    run.key = SigningKey.generate()
    sign_new_roles(run, run.key)
    run.publish(1, weights(seed=1))
    assert run.client(run.static().url).latest(None, 10) is not None

    # With the old roles.json, a manifest for a version yet to come, by the key that was stolen.
    with pytest.raises(UserError, match="weights: signed by"):
        run.client(run.static(old).url).fetch(0, manifest_digest=None, deadline_s=0.7)


def test_expired_roles_give_way_to_no_older_ones(run: Run) -> None:
    """Those that revoked a key may expire before those that still name it."""
    # given a client's folder with a roles.json that revoked the publisher's key, expired since
    sign_new_roles(run, run.key, ago_s=2000, valid_s=10_000)
    run.publish(0, weights())
    sign_new_roles(run, SigningKey.generate(), ago_s=1000, valid_s=600)
    (run.folder / "cache").mkdir()
    (run.folder / "cache" / "roles.json").write_bytes(run.roles)
    client = run.client(run.static().url)
    # when a server offers the older one, which has not expired, then it is refused
    with pytest.raises(UserError, match=r"roles\.json older than one seen before"):
        client.latest(None, 0.7)
    with pytest.raises(UserError, match=r"roles\.json older than one seen before"):
        client.fetch(0, manifest_digest=None, deadline_s=0.7)


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
def test_what_a_thief_called_the_newest_is_forgotten_with_the_key(
    run: Run, restarted: bool
) -> None:
    # given a relay and a client that saw the highest of all versions, by a key that was stolen
    run.publish(MAX_VERSION - 1, weights())
    server = run.static()
    relay = run.relay(server.url)
    client = run.client(relay.url)
    assert client.latest(MAX_VERSION - 2, 10) is not None
    # when the key is revoked and the new one publishes
    if restarted:
        relay.stop()
    shutil.rmtree(run.store / "demo")
    run.key = SigningKey.generate()
    sign_new_roles(run, run.key)
    digest = run.publish(1, weights(seed=1))
    if restarted:
        relay = run.relay(server.url)
        client = run.client(relay.url)
    # then that is what the relay announces and the client goes on with
    announced = f"{relay.url}/demo/latest.json"
    eventually(lambda: b'"version":1}' in httpx.get(announced).content, "version 1 announced")
    latest = client.latest(None, 10)
    assert latest is not None and latest.version == 1
    assert contents(client.fetch(1, manifest_digest=digest, deadline_s=10)) == weights(seed=1)
    # and nothing of the thief's is left at the relay
    assert [p.name for p in (run.folder / "relay/demo/versions").iterdir()] == ["1"]


@pytest.mark.parametrize(
    ("document", "algorithm"),
    [
        *(("latest.json", name) for name in ("none", "ED25519", "")),
        *(("roles.json", "none"), ("versions/0/manifest.json", "none")),
    ],
)
def test_an_unknown_algorithm_is_refused(run: Run, document: str, algorithm: str) -> None:
    run.publish(0, weights())
    path = run.store / "demo" / document
    path.write_bytes(canonical_json(json.loads(path.read_bytes()) | {"algorithm": algorithm}))
    client = run.client(run.static().url)

    with pytest.raises(UserError, match=f"unknown algorithm '{algorithm}'"):
        if document.startswith("versions"):
            client.fetch(0, manifest_digest=None, deadline_s=0.7)
        else:
            client.latest(None, 0.7)
