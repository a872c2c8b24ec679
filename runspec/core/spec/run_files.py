"""Where policy versions and full states lie in a run directory: for roles and commands alike."""

from __future__ import annotations

import re
from pathlib import Path

from runspec.core.object_store import Folder, ObjectPath, folder_at
from runspec.core.spec.schema import RunSpec

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
