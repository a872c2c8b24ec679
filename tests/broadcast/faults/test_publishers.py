"""Two publishers on one store: one version, whole, whoever comes first."""

from __future__ import annotations

from pathlib import Path

import pytest

from broadcast.manifest import read_manifest
from runspec.core.hashing import digest_bytes

from ..conftest import Run, contents, weights
from ..processes import Processes


def directory_of(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def publish_arguments(run: Run, directory: Path, version: int) -> list[object]:
    said = ["publish", run.store, directory, "--run", "demo", "--version", version]
    return [*said, "--key", run.keys / "publisher.key"]


def fetched(run: Run, version: int) -> dict[str, bytes]:
    """What a client makes of the store; every chunk that it holds is what its name says."""
    path = run.client(run.static().url).fetch(version, manifest_digest=None, deadline_s=10)
    assert all(digest_bytes(p.read_bytes()) == p.name for p in run.chunks())
    assert read_manifest(path).version == version
    return contents(path)


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)], ids=["same contents", "different contents"])
def test_two_at_once_do_not_tear_the_store(
    run: Run, processes: Processes, tmp_path: Path, seeds: tuple[int, int]
) -> None:
    # given two directories of one version, a thousand chunks each
    both = [weights(200_000, seed=seed) for seed in seeds]
    folders = [directory_of(tmp_path / str(n), files) for n, files in enumerate(both)]
    # when two processes publish them at once
    started = [processes.start(*publish_arguments(run, folder, 0)) for folder in folders]
    codes = [process.wait(60) for process in started]
    # then equal contents are published twice without harm; of others one wins, whole
    said = [processes.said(process) for process in started]
    assert sorted(codes) == ([0, 0] if seeds == (0, 0) else [0, 1]), said
    winner = both[codes.index(0)]
    if 1 in codes:
        assert "published already" in said[codes.index(1)]
    assert fetched(run, 0) == winner
    latest = run.client(run.static().url, cache="news").latest(None, 10)
    assert latest is not None
    manifest = (run.store / "demo/versions/0/manifest.json").read_bytes()
    assert latest.manifest_digest == digest_bytes(manifest)


def test_two_publishers_of_different_versions_leave_the_newest_named(
    run: Run, processes: Processes, tmp_path: Path
) -> None:
    folders = [directory_of(tmp_path / str(n), weights(seed=n)) for n in range(2)]
    started = [
        processes.start(*publish_arguments(run, folder, n)) for n, folder in enumerate(folders)
    ]
    codes = [process.wait(60) for process in started]
    # A number below the newest is not taken up again: version 0 may have come too late.
    assert codes[1] == 0, processes.said(started[1])
    latest = run.client(run.static().url, cache="news").latest(None, 10)
    assert latest is not None and latest.version == 1
    assert fetched(run, 1) == weights(seed=1)
