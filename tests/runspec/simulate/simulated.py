"""Runs of `runspec simulate` for tests: the real command, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.runspec.cli.in_process import runspec
from tests.runspec.core.spec.spec_files import SPECS

LAPTOP = [SPECS / "target_short.yaml", "--profile", "laptop"]
"""Steps of 16 groups in leases of 8; a lease lasts 60 s; undisturbed a step takes 0.42 s."""


def simulated(*arguments: str | Path, swarm: str | None, folder: Path) -> dict[str, Any]:
    """The result as `--json` has it.

    Args:
        arguments: of the command: the spec and its options.
        swarm: text of a swarm file.
        folder: for that file.
    """
    if swarm is not None:
        (folder / "swarm.yaml").write_text(swarm)
        arguments = (*arguments, "--swarm", folder / "swarm.yaml")
    ended = runspec("simulate", *arguments, "--json")
    assert ended.returncode in (0, 1), ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout)
    assert ended.returncode == (result["ended"] == "stalled")
    return result


def group(result: dict[str, Any], name: str) -> dict[str, Any]:
    """The figures of a group of workers."""
    return next(group for group in result["groups"] if group["name"] == name)


def step_seconds(result: dict[str, Any], *, leave_out: int = 0) -> float:
    """Mean time of a step in the later half of the run, without the last `leave_out` steps."""
    ends = [step["trained_at"] for step in result["steps"] if step["trained_at"] is not None]
    settled = ends[len(ends) // 2 : len(ends) - leave_out]
    return (settled[-1] - settled[0]) / (len(settled) - 1)
