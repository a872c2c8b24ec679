"""The origin notes what is read, so that the publisher does not prune it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from broadcast.pins import Pins
from broadcast.stored_manifests import StoredManifests
from runspec.core.files import write_atomic

from .conftest import LOG, Run, weights


def pinned(run: Run) -> list[int]:
    return sorted(Pins(run.store, run.name).newest_first())


def only_in(run: Run, version: int) -> Path:
    """A full chunk that a version does not share with another."""
    known = set(run.chunks())
    run.publish(version, weights(seed=version))
    return max(set(run.chunks()) - known, key=lambda path: path.stat().st_size)


def test_a_manifest_that_is_asked_for_pins_its_version(run: Run) -> None:
    for version in range(3):
        run.publish(version, weights(seed=version))
    url = run.origin().url

    assert httpx.get(f"{url}/demo/versions/1/manifest.json").status_code == 200
    assert httpx.get(f"{url}/demo/versions/7/manifest.json").status_code == 404
    assert httpx.get(f"{url}/demo/latest.json").status_code == 200

    assert pinned(run) == [1]


def test_a_chunk_that_is_asked_for_pins_the_version_that_alone_has_it(run: Run) -> None:
    # given versions that share a chunk
    run.publish(0, weights())
    shared = min(run.chunks(), key=lambda path: path.stat().st_size)
    own = only_in(run, 1)
    url = run.origin().url
    # when the shared one is asked for, then it tells of no version
    assert httpx.get(f"{url}/demo/chunks/{shared.name}").status_code == 200
    assert pinned(run) == []
    # when one version's own is, then it does
    assert httpx.get(f"{url}/demo/chunks/{own.name}").status_code == 200
    assert pinned(run) == [1]


async def test_manifests_are_parsed_once_for_each_file(run: Run) -> None:
    # given what is known of a store with a version
    now = 0.0
    run.publish(0, weights())
    manifests = StoredManifests(run.store, run.name, LOG, clock=lambda: now)
    first = await manifests.current()
    # when another is published, then it is known a second later, and the first not read again
    own = only_in(run, 1)
    assert await manifests.owner(own.name) is None
    now = 1.0
    assert await manifests.owner(own.name) == 1
    second = await manifests.current()
    assert second[0] is first[0]
    assert sorted(second) == [0, 1]


async def test_a_damaged_manifest_is_left_out_and_said_once(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    for version in range(2):
        run.publish(version, weights(seed=version))
    damaged = run.store / "demo" / "versions" / "0" / "manifest.json"
    write_atomic(damaged, damaged.read_bytes()[:-1])
    manifests = StoredManifests(run.store, run.name, LOG, clock=lambda: now)

    for second in range(3):
        now = float(second)
        assert list(await manifests.current()) == [1]

    errors = [record.getMessage() for record in caplog.records]
    assert len(errors) == 1
    assert f"{damaged}: damaged" in errors[0]
