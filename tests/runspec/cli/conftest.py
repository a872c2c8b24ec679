"""Runs to look at."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import ROOT
from tests.runspec.local.fake_run import drive_roles, prepared, small_spec, usual_roles
from tests.runspec.local.test_supervise import Watch
from tests.waiting import DEADLINE_S, eventually


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run `small` that is being trained by fake roles."""
    command = [sys.executable, "-m", "tests.runspec.local.fake_run", str(tmp_path), "100000"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    eventually((tmp_path / "small" / "metrics.jsonl").exists, "a first step")
    yield tmp_path
    process.terminate()
    process.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run `small` of five steps."""
    runs_dir = tmp_path_factory.mktemp("runs")
    with prepared(small_spec(), runs_dir) as run:
        drive_roles(run, usual_roles(run), Watch())
    return runs_dir
