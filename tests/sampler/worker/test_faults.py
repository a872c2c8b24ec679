"""A full disk, and a clock that is off: the worker's process says what is wrong, and with what."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sampler.worker.test_worker import ROOT, Run
from tests.waiting import eventually

pytestmark = pytest.mark.slow

DEADLINE_S = 120.0
LARGEST_FILE = 200_000
"""Less than a version of the small model."""
_SMALL_DISK = """
import resource, runpy, sys
largest = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
sys.argv = ["sampler", *sys.argv[2:]]
runpy.run_module("sampler", run_name="__main__")
"""
_SHIFTED = """
import runpy, sys, time
real, shift = time.time, float(sys.argv[1])
time.time = lambda: real() + shift
sys.argv = ["sampler", *sys.argv[2:]]
runpy.run_module("sampler", run_name="__main__")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("faults"))
    yield run
    run.close()


def arguments(run: Run, folder: Path) -> list[str]:
    return [
        *("work", "--run", run.spec.name, "--pool", "volunteers"),
        *("--coordinator", f"http://{run.coordinator}", "--weights", f"http://{run.origin}"),
        *("--public-key", run.identity.root_public_key),
        *("--key", str(run.identity.key("volunteers-0")), "--dir", str(folder)),
    ]


def test_a_full_disk_ends_the_worker_with_the_directorys_name(run: Run, tmp_path: Path):
    done = subprocess.run(
        [
            *(sys.executable, "-c", _SMALL_DISK, str(LARGEST_FILE)),
            *arguments(run, tmp_path / "worker"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert done.returncode == 1, done.stderr
    assert str(tmp_path / "worker" / "weights") in done.stderr
    assert run.submissions() == []


def test_a_clock_that_is_far_off_is_named_with_the_distance(run: Run, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", _SHIFTED, "900", *arguments(run, tmp_path / "worker")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert done.returncode == 1, done.stderr
    assert "clock is 900 s ahead of ours" in done.stderr or "clock is 899 s" in done.stderr


@pytest.mark.parametrize("shift", ["-240", "240"])
def test_a_clock_that_is_minutes_off_keeps_nobody_from_work(run: Run, tmp_path: Path, shift: str):
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", _SHIFTED, shift, *arguments(run, tmp_path / "worker")],
            cwd=ROOT,
            stderr=out,
        )
    try:
        eventually(
            lambda: "version 0 fetched" in log.read_text(),
            "it is registered and has its version",
            deadline_s=DEADLINE_S,
            context=log.read_text,
            hopeless=lambda: "" if process.poll() is None else "it ended",
        )
    finally:
        process.kill()
        process.wait()
