"""Pins, shared between processes by files, with a clock of the test's own."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from broadcast.origin import StoredManifests
from broadcast.pins import TOUCH_EVERY_S, VALID_S, Pins
from runspec.core.files import write_atomic

from .conftest import LOG, Run, weights

NOW = 1_800_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def test_interest_ends_after_ten_minutes_without_any(tmp_path: Path) -> None:
    clock = Clock()
    pins = Pins(tmp_path, "demo", clock=clock)
    pins.touch(1)
    clock.now += VALID_S - 1
    pins.touch(2)
    assert pins.newest_first() == [2, 1]
    clock.now += 2
    assert pins.newest_first() == [2]


def test_a_pin_is_written_every_few_seconds_at_most(tmp_path: Path) -> None:
    clock = Clock()
    pins = Pins(tmp_path, "demo", clock=clock)
    file = tmp_path / "demo" / "pins" / "1"
    for _ in range(100):
        pins.touch(1)
        clock.now += TOUCH_EVERY_S / 101
    assert file.stat().st_mtime == NOW
    clock.now = NOW + TOUCH_EVERY_S
    pins.touch(1)
    assert file.stat().st_mtime == NOW + TOUCH_EVERY_S


def test_pins_of_versions_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    pins = Pins(tmp_path, "demo", clock=Clock())
    for version in range(5):
        pins.touch(version)
    (tmp_path / "demo" / "pins" / "stray").touch()
    pins.keep_only({1, 2})
    assert sorted(p.name for p in (tmp_path / "demo" / "pins").iterdir()) == ["1", "2"]


def test_where_nothing_can_be_noted_readers_are_served_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "demo").write_bytes(b"a file where the folder should be")
    pins = Pins(tmp_path, "demo")
    pins.touch(1)
    assert pins.newest_first() == []


# -- The origin notes what is read, so that the publisher does not prune it ------------------------


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


@pytest.fixture
def always_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of manifests is looked at for each question."""
    monkeypatch.setattr("broadcast.origin.MANIFESTS_EVERY_S", 0.0)


@pytest.mark.usefixtures("always_looked_at")
async def test_manifests_are_parsed_once_for_each_file(run: Run) -> None:
    # given what is known of a store with a version
    run.publish(0, weights())
    manifests = StoredManifests(run.store, run.name, LOG)
    first = await manifests.current()
    # when another is published, then it is known, and the first not read again
    own = only_in(run, 1)
    assert await manifests.owner(own.name) == 1
    second = await manifests.current()
    assert second[0] is first[0]
    assert sorted(second) == [0, 1]


@pytest.mark.usefixtures("always_looked_at")
async def test_a_damaged_manifest_is_left_out_and_said_once(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    for version in range(2):
        run.publish(version, weights(seed=version))
    damaged = run.store / "demo" / "versions" / "0" / "manifest.json"
    write_atomic(damaged, damaged.read_bytes()[:-1])
    manifests = StoredManifests(run.store, run.name, LOG)

    for _ in range(3):
        assert list(await manifests.current()) == [1]

    errors = [record.getMessage() for record in caplog.records]
    assert len(errors) == 1
    assert f"{damaged}: damaged" in errors[0]
