"""Which versions an engine has on its device."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.prefill import LoadedVersions


class Shelves:
    """Stands for relays: every version is there, in files of 10 bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.closed = False

    def fetch(self, version: int, *, manifest_digest: str | None, deadline_s: float) -> Path:
        path = self._folder / f"v{version}"
        path.mkdir(exist_ok=True)
        for part in (1, 2):
            (path / f"model-{part}.safetensors").write_bytes(b"12345")
        return path

    def prune(self, keep: set[int]) -> None:
        for path in self._folder.glob("v*"):
            if int(path.name[1:]) not in keep:
                for file in path.iterdir():
                    file.unlink()
                path.rmdir()

    def close(self) -> None:
        self.closed = True


class Device:
    """A device of so many bytes that holds what its cache holds."""

    def __init__(self, size: int) -> None:
        self.size, self.loads = size, list[str]()
        self.versions: LoadedVersions[str] | None = None

    def load(self, path: Path) -> str:
        self.loads.append(path.name)
        return path.name

    def has_room(self, size: int) -> bool:
        assert self.versions is not None
        return len(self.versions._loaded) * 10 + size <= self.size


def versions_on(device: Device, folder: Path, count: int) -> LoadedVersions[str]:
    device.versions = LoadedVersions(
        Shelves(folder),  # type: ignore[arg-type]
        cache_dir=folder,
        count=count,
        load=device.load,
        has_room=device.has_room,
    )
    return device.versions


@pytest.mark.parametrize(
    ("size", "loads"),
    [
        # room for all: each is loaded once, but for the one dropped by the count
        (1000, ["v0", "v1", "v2", "v3", "v0"]),
        # room for two: the one that was used longest ago makes way
        (20, ["v0", "v1", "v2", "v1", "v3", "v0"]),
        # room for none beside another, and even then one is loaded
        (5, ["v0", "v1", "v0", "v2", "v1", "v3", "v0"]),
    ],
)
def test_versions_are_dropped_by_use_where_the_device_is_full(
    tmp_path: Path, size: int, loads: list[str]
) -> None:
    device = Device(size)
    versions = versions_on(device, tmp_path, count=3)
    for version in (0, 1, 0, 2, 1, 1, 3, 0):
        versions.ensure(version, "ab", deadline_s=1)
        assert versions.get(version) == f"v{version}"
    assert device.loads == loads


def test_one_version_more_than_the_count_stays_on_disk(tmp_path: Path) -> None:
    versions = versions_on(Device(1000), tmp_path, count=2)
    for version in range(5):
        versions.ensure(version, "ab", deadline_s=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v2", "v3", "v4"]
    # an older one that a lease names still is fetched, and costs no newer one its place
    assert versions.ensure(0, "ab", deadline_s=1).exists()
    assert (tmp_path / "v4").exists()
