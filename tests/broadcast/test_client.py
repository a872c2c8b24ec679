"""Ways to a version: anchors, deltas on what is here, both; and what is wrong on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from broadcast.assemble import delta_applier
from runspec.core.errors import UserError

from .conftest import Run, contents
from .counted import Counted, fetch, small_files, warnings
from .model_versions import ModelVersions

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def counted(run: Run) -> Counted:
    return Counted(run)


@pytest.mark.parametrize("files", [("model.safetensors",), SHARDS], ids=["one file", "shards"])
def test_a_joiner_takes_the_anchor_and_the_deltas(
    run: Run, counted: Counted, files: tuple[str, ...]
) -> None:
    versions = ModelVersions(run, files=files)
    versions.publish(0)
    for version in (1, 2, 3):
        versions.publish(version, base=version - 1)

    path = fetch(run.client(counted.url), 3)

    assert contents(path) == versions.files(3)
    deltas = sum(versions.delta_bytes(version) for version in (1, 2, 3))
    assert counted.moved() == versions.weights_bytes(0) + deltas + small_files(versions, 3)
    assert sorted(p.name for p in (run.folder / "cache").glob(".[pd]*")) == []


def test_a_follower_moves_the_delta_only(run: Run, counted: Counted) -> None:
    versions = ModelVersions(run)
    client = run.client(counted.url)
    versions.publish(0)
    fetch(client, 0)
    counted.moved()

    versions.publish(1, base=0)
    path = fetch(client, 1)

    assert contents(path) == versions.files(1)
    probe = len(versions.files(1)["probe.json"])  # config.json is the same: copied
    assert counted.moved() == versions.delta_bytes(1) + probe
    assert contents(run.folder / "cache" / "v0") == versions.files(0)  # untouched


def test_an_anchor_with_a_delta_is_a_delta_to_followers_and_whole_to_joiners(
    run: Run, counted: Counted
) -> None:
    # given an anchor that also says how it differs from version 0
    versions = ModelVersions(run)
    follower, joiner = run.client(counted.url), run.client(counted.url, cache="joiner")
    versions.publish(0)
    fetch(follower, 0)
    versions.publish(1, base=0, anchor=True)
    counted.moved()

    # when both fetch it, then each moves what it lacks
    assert contents(fetch(follower, 1)) == versions.files(1)
    assert counted.moved() < versions.weights_bytes(1) / 2
    assert contents(fetch(joiner, 1)) == versions.files(1)
    assert counted.moved() == sum(len(data) for data in versions.files(1).values())


def test_a_joiner_starts_from_the_newest_anchor_when_that_moves_less(
    run: Run, counted: Counted
) -> None:
    versions = ModelVersions(run)
    versions.publish(0)
    versions.publish(1, base=0)
    versions.publish(2, base=1, anchor=True)
    versions.publish(3, base=2)

    path = fetch(run.client(counted.url), 3)

    assert contents(path) == versions.files(3)
    manifests = [p for p in counted.server.paths if p.endswith("manifest.json")]
    assert manifests == [f"/demo/versions/{version}/manifest.json" for version in (3, 2)]


def test_a_server_that_is_down_does_not_hide_the_anchor(run: Run, counted: Counted) -> None:
    # given a client that holds version 0, a server that lost version 1, and one that is gone
    versions = ModelVersions(run)
    gone = run.static()
    gone.stop()
    client = run.client(counted.url, gone.url)
    versions.publish(0)
    fetch(client, 0)
    versions.publish(1, base=0)
    versions.publish(2, base=1, anchor=True)
    (run.store / "demo/versions/1/manifest.json").unlink()

    # when it fetches version 2, then it takes the files that it knows of
    assert contents(fetch(client, 2, deadline_s=60)) == versions.files(2)


def flip_a_bit(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_damaged_base_is_named_and_an_anchor_taken_instead(
    run: Run, counted: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    # given a held version with a bit flipped where no delta overwrites it
    versions = ModelVersions(run)
    client = run.client(counted.url)
    versions.publish(0)
    versions.publish(1, base=0)
    held = fetch(client, 1)
    versions.publish(2, base=1)
    flip_a_bit(held / "model.safetensors")
    counted.moved()

    # when the next version is fetched
    path = fetch(client, 2)

    # then it is right, by way of the anchor, and the log names what was wrong
    assert contents(path) == versions.files(2)
    assert counted.moved() > versions.weights_bytes(0)
    (said,) = warnings(caplog)
    assert str(held) in said and "tensor b" in said and "fetching an anchor" in said

    # and the damaged one is never built on again, though it would do for a version after it
    versions.publish(3, base=1)
    assert contents(fetch(client, 3)) == versions.files(3)
    assert len(warnings(caplog)) == 1


def test_a_damaged_base_is_fetched_anew_when_it_is_asked_for(run: Run, counted: Counted) -> None:
    # given a held version of which the next one has shown that it is damaged
    versions = ModelVersions(run)
    client = run.client(counted.url)
    versions.publish(0)
    versions.publish(1, base=0)
    held = fetch(client, 1)
    versions.publish(2, base=1)
    flip_a_bit(held / "model.safetensors")
    fetch(client, 2)
    # when a lease still names it, then what is handed out is right
    assert contents(fetch(client, 1)) == versions.files(1)
    # and it may be built on again
    counted.moved()
    versions.publish(3, base=1)
    fetch(client, 3)
    assert counted.moved() < versions.weights_bytes(0)


@pytest.mark.parametrize("anchor", [True, False])
def test_a_bad_delta_makes_no_version(
    run: Run, counted: Counted, anchor: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # given a publisher whose delta is from a version that was never published
    versions = ModelVersions(run)
    client = run.client(counted.url)
    versions.publish(0)
    fetch(client, 0)
    versions.write(99)
    versions.publish(1, base=0, anchor=anchor, delta_from=99)

    # when it is fetched, then an anchor is whole all the same, and without one there is nothing
    if anchor:
        assert contents(fetch(client, 1)) == versions.files(1)
    else:
        with pytest.raises(UserError, match="does not become version 1"):
            fetch(client, 1)
        assert not (run.folder / "cache" / "v1").exists()
    assert any("cache/v0: with deltas 1 does not become version 1" in w for w in warnings(caplog))


def test_what_applies_deltas_may_be_missing() -> None:
    with pytest.raises(UserError, match=r"pip install .*whl\[bridge\]"):
        delta_applier("runspec.nobody")
