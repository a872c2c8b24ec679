"""Pins, shared between processes by files, with a clock of the test's own."""

from __future__ import annotations

from pathlib import Path

from broadcast.manifest import Chunk, ObjectInfo, WeightsManifest
from broadcast.pins import TOUCH_EVERY_S, VALID_S, Pins, owners

NOW = 1_800_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def test_what_one_process_touches_another_sees_latest_interest_first(tmp_path: Path) -> None:
    clock = Clock()
    origin, publisher = (Pins(tmp_path, "demo", clock=clock) for _ in range(2))
    for version in (3, 1, 2):
        clock.now += 1
        origin.touch(version)
    assert publisher.newest_first() == [2, 1, 3]


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


def test_a_clock_that_was_set_back_stops_nothing(tmp_path: Path) -> None:
    clock = Clock()
    pins = Pins(tmp_path, "demo", clock=clock)
    pins.touch(1)
    clock.now = NOW - 1000
    pins.touch(1)
    assert (tmp_path / "demo" / "pins" / "1").stat().st_mtime == NOW - 1000


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


def test_a_chunk_that_versions_share_tells_of_none() -> None:
    def version(number: int, *digests: str) -> WeightsManifest:
        chunks = tuple(Chunk(digest, 1) for digest in digests)
        whole = {"w": ObjectInfo(len(chunks), "0" * 64, chunks)}
        return WeightsManifest("demo", number, None, None, {}, ("w",), whole, {})

    assert owners([version(1, "a", "s"), version(2, "b", "s", "b"), version(3, "s")]) == {
        "a": 1,
        "b": 2,
    }
