"""A run on a disk that fills up: a file system of its own, mounted for the supervisor alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runspec.local.children import birth
from tests.runspec.local.fake_run import ROOT
from tests.runspec.local.test_supervise import DEADLINE_S
from tests.waiting import eventually

pytestmark = pytest.mark.slow  # real processes, killed and waited for

STEPS = 3
SCRIPT = """
import runpy, sys
from runspec.local import apply
apply.STORAGE_S = float(sys.argv.pop())
runpy.run_module("tests.runspec.local.fake_run", run_name="__main__")
"""


class OnSmallDisk:
    """A supervised run of small roles, whose run directory is a file system of its own."""

    def __init__(self, process: subprocess.Popen[str], out: Path, disk: Path) -> None:
        self.process, self._out, self._mounted = process, out, disk
        self._disk = Path(f"/proc/{process.pid}/root{disk}")
        """As the supervisor sees it: other processes see an empty folder."""
        self.run_dir = self._disk / "small"
        self.hold = self.run_dir / "hold"

    def said(self) -> str:
        return self._out.read_text()

    def processes(self) -> dict[str, int]:
        """The process of each role that was started."""
        found = re.findall(r"(\w+): starting \(process (\d+)\)", self.said())
        return {name: int(pid) for name, pid in found}

    def fill(self) -> None:
        """It has 1 GiB, for `apply` asks for the room of checkpoints, and shrinks to 2 MiB."""
        enter = ["nsenter", "-t", str(self.process.pid), "-U", "-m"]
        shrink = ["mount", "-o", "remount,size=2m", self._mounted]
        subprocess.run([*enter, *shrink], check=True)
        with (self._disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        (self._disk / "filler").unlink()

    def says(self, words: str) -> None:
        found: Callable[[], object] = lambda: re.search(words, self.said())  # noqa: E731
        eventually(found, words, deadline_s=DEADLINE_S, context=self.said)


@contextmanager
def _held(tmp_path: Path, timeout_s: float) -> Iterator[OnSmallDisk]:
    """A run that is up, and whose learner trains once `hold` is gone."""
    disk, out = tmp_path / "disk", tmp_path / "out"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=1g tmpfs {disk} && mkdir {disk}/small"
    run = f'touch {disk}/small/hold && exec "$@"'
    command = ["sh", "-c", f"{mount} && {run}", "sh", sys.executable, "-c", SCRIPT]
    with out.open("w") as file:
        process = subprocess.Popen(
            ["unshare", "-Urm", *command, disk, str(STEPS), str(timeout_s)],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        held = OnSmallDisk(process, out, disk)
        held.says("worker: running")
        held.says("learner: running")
        yield held
    finally:
        process.kill()
        process.wait()


def test_a_run_waits_for_a_full_disk_and_goes_on(tmp_path: Path) -> None:
    # given a run on a full disk, and a worker that dies of it
    with _held(tmp_path, timeout_s=600.0) as run:
        worker = run.processes()["worker"]
        run.fill()
        run.says(r"supervisor: waits up to 600 s: .*state.db: cannot use the run's state: .*full")
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: birth(worker) is None, "the end of the worker")
        # when the disk has room again
        assert run.process.poll() is None
        run.free()
        # then the run goes on, with the worker, to its end
        run.says(r"supervisor: goes on after \d+ s")
        run.says(r"worker: starting \(process \d+, restart 1\)")
        run.hold.unlink()
        assert run.process.wait(DEADLINE_S) == 0, run.said()
    assert "worker: killed by SIGKILL, starts again" in run.said()
    assert f"step {STEPS}/{STEPS}" in run.said()


def test_a_run_ends_where_the_disk_stays_full(tmp_path: Path) -> None:
    with _held(tmp_path, timeout_s=2.0) as run:
        started = run.processes()
        run.fill()
        assert run.process.wait(DEADLINE_S) == 1, run.said()
    assert re.search(r"state.db: cannot use the run's state: .*full", run.said())
    assert "remedy: free disk space" in run.said()
    assert len(started) == 3 and not any(map(birth, started.values()))
