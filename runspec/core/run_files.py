"""The layout of a run directory: where its database, versions, full states and rollouts lie."""

from __future__ import annotations

import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from runspec.core.files import remove_leftovers
from runspec.core.object_store import Folder, ObjectPath, folder_at
from runspec.core.spec.schema import RunSpec

STATE_FILE = "state.db"
"""SQLite database of the coordinator's ledger and the supervisor's tables."""
PARAMS_NAME = "params"
"""The Orbax checkpoint in v<N>/."""
PROBE_FILE = "probe.json"
"""Beside it: log-probs of fixed tokens, which a sampler compares with its engine after a load."""

FOLDERS = ("keys", "logs", "checkpoints", "weights", "store", "rollouts", "work")
"""Of a run directory; roles write there."""


def initial_model(run_dir: Path) -> Path:
    """The starting model, a Hugging Face directory."""
    return run_dir / "initial"


def warm_start_cache(run_dir: Path) -> Path:
    """Keeps what warm starts made, beside the runs: a second run finds the start of the first."""
    return run_dir.parent.parent / ".cache" / "warm_start"


def checkpoints_folder(run_dir: Path, spec: RunSpec) -> Folder:
    """Holds what every process of the learner writes: in `checkpoints.dir` where it is set."""
    if spec.checkpoints.dir is None:
        return run_dir / "checkpoints"
    return folder_at(spec.checkpoints.dir) / spec.name


def params_folder(run_dir: Path, spec: RunSpec) -> Folder:
    """Holds v<N>/: Orbax parameters of version N, until they are published."""
    return checkpoints_folder(run_dir, spec) / "params"


def state_folder(run_dir: Path, spec: RunSpec) -> Folder:
    """Holds step_<N>/: the full training state after N steps."""
    return checkpoints_folder(run_dir, spec) / "state"


def weights_folder(run_dir: Path) -> Path:
    """Holds v<N>/: the safetensors directory of version N."""
    return run_dir / "weights"


def versions_in(folder: Folder) -> list[int]:
    """The N of its directories v<N>, in order; empty where there is no such folder."""
    return numbered(folder, "v")


def numbered(folder: Folder, prefix: str) -> list[int]:
    """The N of the entries <prefix><N> of a folder, in order; in an object store the valid ones."""
    if isinstance(folder, ObjectPath):
        names = folder.entries()
    else:
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    matches = (re.fullmatch(rf"{prefix}(\d+)", name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def clear_unfinished(folder: Folder, log: logging.Logger) -> None:
    """Removes what a killed process had not finished writing, and says so."""
    if isinstance(folder, ObjectPath):
        for name in folder.unfinished():
            log.info("%s was never finished: removed", folder / name)
            (folder / name).remove()
        return
    for entry in sorted(folder.glob(".tmp-*")):
        log.info("%s was never finished: removed", entry)
    remove_leftovers(folder)


def remove_entry(path: Folder) -> None:
    """Removes a version or a full state; a removal cut short leaves nothing that looks like one."""
    if isinstance(path, ObjectPath):
        path.remove()
        return
    doomed = path.with_name(f".tmp-removed-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    # A learner that starts meanwhile clears unfinished things out of the same folder.
    shutil.rmtree(doomed, ignore_errors=True)


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
