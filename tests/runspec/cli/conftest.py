"""A run to look at."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import ROOT
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
