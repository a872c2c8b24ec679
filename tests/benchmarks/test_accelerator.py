"""`make accelerator` without an accelerator: every part in small, and what goes wrong is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.accelerator.__main__ import PARTS, Part, main

ROOT = Path(__file__).resolve().parents[2]


def rows_of(printed: str) -> dict[str, list[list[str]]]:
    """The table's cells by part, without its head."""
    cells = [line.strip("| ").split(" | ") for line in printed.splitlines() if line[:2] == "| "]
    found: dict[str, list[list[str]]] = {}
    for row in cells[1:]:
        found.setdefault(row[0], []).append(row[1:])
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_part_runs_in_small_and_claims_no_speed() -> None:
    done = subprocess.run(
        ["make", "-s", "accelerator", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(done.stdout)
    assert list(rows) == [part.name for part in PARTS]
    for part in PARTS:
        verdicts = {row[3] for row in rows[part.name]}
        assert verdicts <= ({"not run"} if part.big_only else {"ok", "measured"}), rows[part.name]
    assert "CPU, in small: no figures of an accelerator" in done.stdout
    figures = [row[1] for part in PARTS for row in rows[part.name]]
    assert not re.search(r"tokens/s|TFLOP|MFU|\b[um]?s\b", " ".join(figures))


def test_a_wrong_kernel_fails_the_run_and_what_needs_it_is_not_timed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = Part("attention", "tests.benchmarks.wrong_attention", 1.0, ())
    after = Part("learner", "benchmarks.accelerator.mfu", 1.0, (), after=("attention",))

    assert main([wrong, after], 120.0) == 1

    rows = rows_of(capsys.readouterr().out)
    assert [row[3] for row in rows["attention"]] == ["WRONG", "ok"]
    assert rows["attention"][0][0].startswith("xla") and rows["learner"][0][3] == "not run"
    assert "attention" in rows["learner"][0][1]


def test_a_hanging_part_a_crash_and_a_missing_package_cost_a_row_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hangs = Part("hangs", "tests.benchmarks.hanging_part", 1.0, ())
    crashes = Part("crashes", "tests.benchmarks.no_such_module", 3.0, ())
    lacks = Part("lacks", "tests.benchmarks.hanging_part", 1.0, ("no_such_package",))
    begun = time.monotonic()

    assert main([hangs, crashes, lacks], 16.0) == 1

    assert time.monotonic() - begun < 14.0
    rows = rows_of(capsys.readouterr().out)
    assert rows["hangs"][0][0] == "before it hangs"
    assert rows["hangs"][1][1].startswith("cut off after 4 s")
    assert rows["crashes"][0][3] == "FAILED" and "no_such_module" in rows["crashes"][0][1]
    assert rows["lacks"][0][1:4] == ["no package no_such_package", "", "not run"]


def test_without_time_a_part_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([Part("late", "tests.benchmarks.hanging_part", 1.0, ())], 5.0) == 0

    assert "5 s of 5 were left" in rows_of(capsys.readouterr().out)["late"][0][1]


def test_a_library_that_does_not_see_the_gpu_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB, 580.1'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    assert main([Part("attention", "benchmarks.accelerator.attention", 1.0, ())], 60.0) == 1

    printed = capsys.readouterr().out
    assert "device: NVIDIA H100, 81559 MiB, driver 580.1;" in printed
    [row] = rows_of(printed)["attention"]
    assert row[3] == "FAILED" and "it sees no accelerator here" in row[1]
