"""`runspec lint` and its exit codes, as a shell sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import TARGET_SHORT, runspec


def test_a_clean_spec_exits_0() -> None:
    done = runspec("lint", TARGET_SHORT, "--profile", "laptop")
    assert (done.returncode, done.stdout) == (0, "")


def test_a_finding_exits_1_with_its_place(tmp_path: Path) -> None:
    spec = tmp_path / "broken.yaml"
    spec.write_text("version: runspec/v1\nname: broken\nsteps: 10\nsteeps: 3\n")
    done = runspec("lint", spec)
    assert done.returncode == 1
    assert f"{spec}:4:1" in done.stdout
    assert "steeps" in done.stdout
    assert "error" in done.stderr


def test_a_warning_is_shown_and_exits_0() -> None:
    recompute = ("--set", "algorithm.old_logprobs=recompute")
    done = runspec("lint", TARGET_SHORT, "--profile", "laptop", *recompute)
    assert done.returncode == 0
    assert "--set:1:" in done.stdout and "warning stale-pi-old" in done.stdout
    assert "0 errors, 1 warning" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["lint", "nowhere.yaml"],
        ["lint", TARGET_SHORT, "--profile", "mainframe"],
        ["lint", TARGET_SHORT, "--set", "steps"],
        ["lint"],
        ["lint", TARGET_SHORT, "--wrong"],
        ["apply", "nowhere.yaml"],
        ["brew"],
    ],
)
def test_what_cannot_be_read_and_bad_usage_exit_2(arguments: list[str | Path]) -> None:
    done = runspec(*arguments)
    assert done.returncode == 2, done
    assert done.stderr
    assert "Traceback" not in done.stderr
