"""Where things lie in a run directory: its database, and the files of each submission."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runspec.core.errors import UserError

STATE_FILE = "state.db"
"""SQLite: the coordinator's ledger and the supervisor's tables, side by side."""


def refuse_older_run(run_dir: Path) -> None:
    """Checks that no version has worked here that wrote submissions and verdicts as Parquet.

    Raises:
        UserError: one has.
    """
    older = next(run_dir.glob("rollouts/step_*/*.parquet"), None)
    if older is not None:
        raise UserError(
            "this run was made by an older version, whose Parquet files are not read any more",
            place=str(older),
            remedy="finish it with the version that made it, or start a new run",
        )


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
        folder / f"{submission}.safetensors",
        folder / f"{submission}.json",
        folder / f"{submission}.verdict.safetensors",
        folder / f"{submission}.verdict.json",
    )
