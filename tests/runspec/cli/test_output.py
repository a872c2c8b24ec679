"""A reader that goes away (`runspec ... | head`) changes nothing but what is printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import ROOT, TARGET_SHORT
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.slow


@pytest.fixture
def unread() -> Iterator[int]:
    """A pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("explain", "--list"), 0),
        (("lint", TARGET_SHORT, "--profile", "laptop"), 0),
        (("lint", TARGET_SHORT, "--set", "optimizer.lr=fast"), 1),
        (("render", TARGET_SHORT), 0),
        (("status", "small"), 0),
        (("logs", "small", "-f"), 0),
        (("events", "small", "-f"), 0),
    ],
)
def test_a_short_command_ends_quietly_by_its_own_code(
    finished: Path, unread: int, words: tuple[str | Path, ...], code: int
) -> None:
    runs = ("--runs-dir", finished) if "small" in words else ()
    command = [sys.executable, "-m", "runspec", *map(str, (*words, *runs))]
    done = subprocess.run(
        command, cwd=ROOT, stdout=unread, stderr=subprocess.PIPE, timeout=DEADLINE_S
    )
    assert done.returncode == code
    assert b"Error" not in done.stderr, "neither a traceback nor Python's word at exit"


def test_a_run_goes_on_when_nobody_reads_what_it_prints(tmp_path: Path, unread: int) -> None:
    # given `runspec apply ... 2>&1 | head -0`
    sets = ("--set", "name=small", "--set", "steps=5")
    words = ("apply", TARGET_SHORT, "--profile", "laptop", "--runs-dir", tmp_path, *sets)
    command = [sys.executable, "-m", "tests.runspec.local.fake_apply", *map(str, words)]
    # when it has ended
    done = subprocess.run(command, cwd=ROOT, stdout=unread, stderr=unread, timeout=DEADLINE_S)
    # then every step is trained
    assert done.returncode == 0
    assert json.loads((tmp_path / "small" / "summary.json").read_text())["steps"] == 5
