"""Which spec a run directory is of, and who holds it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.local.run_dir import (
    RunLocked,
    find_run,
    hold,
    holder,
    run_directory,
)
from tests.runspec.local.fake_run import prepared, small_spec


def test_a_held_run_names_its_holder_and_is_free_afterwards(tmp_path: Path) -> None:
    assert holder(tmp_path) is None
    with hold(tmp_path):
        assert f"process {os.getpid()} on" in str(holder(tmp_path))
        with pytest.raises(RunLocked, match=f"held by process {os.getpid()}"), hold(tmp_path):
            pytest.fail("held twice")
    assert holder(tmp_path) is None
    with hold(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    opened = prepared(small_spec(), tmp_path / "runs")
    with pytest.raises(UserError, match="directory cannot be written: Not a directory"), opened:
        pytest.fail("opened in a file")


def test_a_run_is_found_by_name_or_path_and_others_are_suggested(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "spec.json").write_text("{}")
    assert find_run("mine", tmp_path) == tmp_path / "mine"
    assert find_run(str(tmp_path / "mine"), tmp_path / "elsewhere") == tmp_path / "mine"
    with pytest.raises(UserError, match="one of: mine"):
        find_run("yours", tmp_path)


def test_a_run_lies_where_the_command_line_says_else_the_spec_else_under_runs(
    tmp_path: Path,
) -> None:
    plain, stored = small_spec(), small_spec("small", 5, f"storage.dir={tmp_path / 'stored'}")
    assert run_directory(plain, None) == Path("runs/small").absolute()
    assert run_directory(stored, None) == tmp_path / "stored" / "small"
    assert run_directory(stored, tmp_path / "said") == tmp_path / "said" / "small"
