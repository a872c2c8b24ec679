"""Roles away from the coordinator draw its problems: from equal files here, or from its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from runspec.core.process import RunStopped
from runspec.core.spec.schema import RunSpec
from runspec.core.spec.source_files import source_files
from tests.verify.coordinator.deployment import Site, tiny_spec
from verify.problem_files import problem_files

ROWS = b"rows" * 1000
LOG = logging.getLogger("test")


def reading(path: Path) -> RunSpec:
    """A spec whose only source is a file."""
    spec = tiny_spec()
    source = spec.data.sources[0].model_copy(update={"uri": str(path)})
    return spec.model_copy(update={"data": spec.data.model_copy(update={"sources": [source]})})


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A coordinator beside the file."""
    (tmp_path / "rows.parquet").write_bytes(ROWS)
    site = Site(tmp_path, reading(tmp_path / "rows.parquet"))
    with site.origin(), site.serving():
        yield site


def test_equal_files_are_used_where_they_are(site: Site, tmp_path: Path) -> None:
    _, client = site.worker()
    assert problem_files(client, reading(tmp_path / "rows.parquet"), tmp_path / "own", LOG) is None
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize("here", [None, b"other rows"])
def test_others_are_fetched_once_and_lie_where_the_sources_look(
    site: Site, tmp_path: Path, here: bytes | None
) -> None:
    # given a machine that has no file at the spec's path, or another one
    (tmp_path / "there").mkdir()
    spec = reading(tmp_path / "there" / "rows.parquet")
    if here is not None:
        (tmp_path / "there" / "rows.parquet").write_bytes(here)
    _, client = site.worker()
    # when it asks for the problems' files, twice
    folder = problem_files(client, spec, tmp_path / "own", LOG)
    (copy,) = source_files(spec.data.sources[0], folder).values()
    first = written(copy)
    assert problem_files(client, spec, tmp_path / "own", LOG) == folder
    # then it has the coordinator's, and they stayed as they were
    assert folder == tmp_path / "own"
    assert copy.read_bytes() == ROWS
    assert written(copy) == first


def test_a_changed_copy_is_fetched_again(site: Site, tmp_path: Path) -> None:
    spec, (_, client) = reading(tmp_path / "gone.parquet"), site.worker()
    folder = problem_files(client, spec, tmp_path / "own", LOG)
    (copy,) = source_files(spec.data.sources[0], folder).values()
    copy.write_bytes(b"damaged")
    problem_files(client, spec, tmp_path / "own", LOG)
    assert copy.read_bytes() == ROWS


def test_a_generator_of_another_version_ends_the_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a coordinator whose problems are generated
    spec = tiny_spec()
    source = spec.data.sources[0].model_copy(update={"uri": None, "kind": "reasoning_gym"})
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"sources": [source]})})
    site = Site(tmp_path, spec)
    with site.origin(), site.serving():
        _, client = site.worker()
        assert problem_files(client, spec, tmp_path / "own", LOG) is None
        # when the generator's package here is another
        monkeypatch.setattr("runspec.core.spec.source_files.version", lambda name: "0.0.1")
        # then the role says what to do, and does not try again
        with pytest.raises(RunStopped, match="the coordinator are made from other data") as caught:
            problem_files(client, spec, tmp_path / "own", LOG)
    assert "the same version of every generator's package" in (caught.value.remedy or "")


def written(path: Path) -> tuple[int, int]:
    """Which file it is, and when it was written; reading moves the time of access."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns
