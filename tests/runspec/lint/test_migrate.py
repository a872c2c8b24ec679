"""The engine of `migrate`, by a made-up history: the schema has one version so far."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runspec.cli.migrate import migrate_command
from runspec.core.errors import UserError
from runspec.core.spec.findings import Edit
from runspec.core.spec.schema import VERSION
from runspec.core.spec.yaml_nodes import MapNode, ScalarNode
from runspec.lint.migrate import MIGRATIONS, Migration, migrate_text


def renamed(root: MapNode) -> list[Edit]:
    """`rounds` becomes `steps`."""
    entry = root.entries.get("rounds")
    if entry is None:
        return []
    place = entry.key_place
    return [Edit(place.line, place.column, place.column + len("rounds"), "steps")]


def doubled(root: MapNode) -> list[Edit]:
    """Lengths are counted in halves."""
    node = root.entries["lengths"].value if "lengths" in root.entries else None
    if not isinstance(node, ScalarNode):
        return []
    place, value = node.place, int(str(node.value))
    return [Edit(place.line, place.column, place.column + place.width, str(2 * value))]


HISTORY = {
    "runspec/v-1": Migration("runspec/v0", "rounds are called steps", renamed),
    "runspec/v0": Migration(VERSION, "lengths are in half tokens", doubled),
}
OLD = """\
# Our run.
version: "runspec/v-1"   # when it was made
rounds: 3                # not many
lengths: 8

name: old
"""
NEW = """\
# Our run.
version: runspec/v1   # when it was made
steps: 3                # not many
lengths: 16

name: old
"""


def test_a_file_goes_from_version_to_version_and_keeps_its_comments() -> None:
    migrated = migrate_text(OLD, "old.yaml", HISTORY)
    assert migrated.text == NEW
    assert migrated.said == (
        "runspec/v-1 to runspec/v0: rounds are called steps",
        "runspec/v0 to runspec/v1: lengths are in half tokens",
    )


def test_the_newest_version_needs_nothing() -> None:
    assert migrate_text(NEW, "new.yaml", HISTORY).said == ()
    assert migrate_text(NEW, "new.yaml", HISTORY).text == NEW


def test_there_is_one_version_so_far() -> None:
    assert MIGRATIONS == {}
    assert migrate_text("version: runspec/v1", "x.yaml").said == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version: runspec/v9", "there are: runspec/v-1, runspec/v0, runspec/v1"),
        ("version: 1", "version '1' is not known"),
        ("name: x", "says no version"),
        ("version: [runspec/v1]", "says no version"),
        ("version: [", "cannot be migrated: broken YAML"),
        ("- 1", "no map"),
        ("", "no map"),
    ],
)
def test_what_cannot_be_migrated(text: str, said: str) -> None:
    with pytest.raises(UserError) as raised:
        migrate_text(text, "x.yaml", HISTORY)
    assert said in str(raised.value) and "x.yaml" in raised.value.place


def test_the_command_shows_and_then_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given an old file with a byte order mark, and one of the newest version
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_bytes(b"\xef\xbb\xbf" + OLD.encode())
    new.write_text(NEW)
    assert migrate_command([old, new], False, HISTORY) == 0
    shown = capsys.readouterr()
    assert "\n-rounds: 3                # not many\n" in shown.out
    assert "\n+steps: 3                # not many\n" in shown.out
    assert f"{new}: nothing to do" in shown.err
    assert old.read_bytes() == b"\xef\xbb\xbf" + OLD.encode()
    # when it may write
    assert migrate_command([old, new], True, HISTORY) == 0
    assert old.read_bytes() == b"\xef\xbb\xbf" + NEW.encode()
    assert new.read_text() == NEW


def test_one_file_that_cannot_be_migrated_keeps_all_from_being_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, odd = tmp_path / "old.yaml", tmp_path / "odd.yaml"
    old.write_text(OLD)
    odd.write_text("version: runspec/v9\n")
    assert migrate_command([old, odd], True, HISTORY) == 2
    assert old.read_text() == OLD
    assert f"{odd}:1:10: version 'runspec/v9' is not known" in capsys.readouterr().err
    assert migrate_command([tmp_path / "gone.yaml"], True, HISTORY) == 2


def test_a_link_stays_one_and_a_pipe_keeps_nobody_waiting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a link to a file of the oldest version
    (tmp_path / "old.yaml").write_text(OLD)
    (tmp_path / "old.yaml").chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to("old.yaml")
    # when it is migrated
    assert migrate_command([link], True, HISTORY) == 0
    # then the file behind it is, and has its permissions still
    assert link.is_symlink()
    assert "runspec/v1" in (tmp_path / "old.yaml").read_text()
    assert (tmp_path / "old.yaml").stat().st_mode & 0o777 == 0o640
    # and what is no file is bad usage
    os.mkfifo(tmp_path / "pipe")
    assert migrate_command([tmp_path / "pipe"], False, HISTORY) == 2
    assert "no regular file" in capsys.readouterr().err
