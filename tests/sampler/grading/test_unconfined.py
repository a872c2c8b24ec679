"""Processes without a sandbox: they end with whoever started them, however that ends."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sampler.grading import unconfined
from sampler.sandbox import Limits
from tests.processes import alive
from tests.waiting import eventually

LIMITS = Limits(wall_s=None, cpu_s=None, memory_bytes=1 << 30)
PARENT = """
import os, signal, sys, tempfile
from sampler.grading import unconfined
from tests.sampler.grading.test_unconfined import LIMITS

tempfile.tempdir = sys.argv[1]
loop = [sys.executable, "-c", "print(0, flush=True)\\nwhile True: pass"]
process = unconfined.start(loop, limits=LIMITS)
process.stdout.readline()
print(process._process.pid, flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_grader_that_hangs_ends_with_a_validator_that_is_ended(tmp_path: Path, end: str) -> None:
    """Told to end, a validator gives back what it had and ends at once, whatever it was at."""
    done = subprocess.run(
        [sys.executable, "-c", PARENT.format(end=end), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout, done.stderr
    eventually(lambda: not alive(int(done.stdout)), "the end of the grader")
    eventually(lambda: not list(tmp_path.iterdir()), "the end of what it wrote")


def test_nothing_is_left_of_one_that_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = children()
    finished = unconfined.run([sys.executable, "-c", "print(7)"], limits=LIMITS)
    assert (finished.outcome, finished.stdout) == ("exit", b"7\n")
    assert list(tmp_path.iterdir()) == [] and children() == before


def children() -> set[str]:
    tasks = Path("/proc/self/task").iterdir()
    return {pid for task in tasks for pid in (task / "children").read_text().split()}
