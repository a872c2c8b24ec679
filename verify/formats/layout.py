"""Where things lie in a run directory: its database, and the files of each submission."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STATE_FILE = "state.db"
"""SQLite: the coordinator's ledger and the supervisor's tables, side by side."""


def step_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "rollouts" / f"step_{step}"


@dataclass(frozen=True)
class SubmissionFiles:
    """The four files of one submission."""

    submission: Path
    submission_envelope: Path
    verdict: Path
    verdict_envelope: Path


def submission_files(run_dir: Path, step: int, submission: str) -> SubmissionFiles:
    """Paths for a submission digest (already checked to be one)."""
    folder = step_folder(run_dir, step)
    return SubmissionFiles(
        folder / f"{submission}.parquet",
        folder / f"{submission}.json",
        folder / f"{submission}.verdict.parquet",
        folder / f"{submission}.verdict.json",
    )
