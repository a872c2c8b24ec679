"""`runspec diff`: as `diff -u` of the run's spec and the file's."""

from __future__ import annotations

from pathlib import Path

import pytest

from runspec.cli.diff import diff_command
from runspec.local.apply import open_run
from runspec.spec.load import SpecFiles
from tests.harness import TARGET_SHORT
from tests.runspec.local.fake_run import small_spec


def diff(runs_dir: Path, *overrides: str) -> int:
    sets = ["name=small", "steps=5", *overrides]
    return diff_command(SpecFiles(TARGET_SHORT, "laptop", None, sets), runs_dir)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    with open_run(small_spec(), tmp_path):
        pass
    return tmp_path


def test_the_same_spec_prints_nothing(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(runs) == 0
    assert capsys.readouterr().out == ""


def test_a_difference_is_shown_as_lines(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(runs, "seed=7", "samplers.volunteers.replicas=2") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"--- {runs / 'small' / 'spec.json'}", f"+++ {TARGET_SHORT}"]
    changed = [line for line in lines[2:] if line[0] in "+-"]
    assert changed == ["-seed: 42", "+seed: 7", "-  replicas: 1", "+  replicas: 2"]


def test_without_a_run_everything_is_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff(tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "--- /dev/null"
    assert all(line.startswith("+") for line in lines[3:])


def test_what_cannot_be_read_is_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff(tmp_path, "steps=many") == 2
    assert "steps" in capsys.readouterr().err
    assert diff_command(SpecFiles(tmp_path / "none.yaml"), tmp_path) == 2
