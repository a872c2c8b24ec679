"""Where the learner's files lie in a run directory. No JAX here: the publisher reads this too."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from runspec.common.files import remove_leftovers
from runspec.spec.schema import RunSpec

PARAMS_NAME = "params"
"""The Orbax checkpoint in v<N>/."""
PROBE_FILE = "probe.json"
"""Beside it."""
TENSORS_FILE = "tensors.json"


def initial_model(run_dir: Path) -> Path:
    """The starting model, a Hugging Face directory."""
    return run_dir / "initial"


def params_folder(run_dir: Path) -> Path:
    """Holds v<N>/: Orbax parameters of version N, until they are published."""
    return run_dir / "checkpoints" / "params"


def state_folder(run_dir: Path, spec: RunSpec) -> Path:
    """Holds step_<N>/: the full training state after N steps."""
    if spec.checkpoints.dir is None:
        return run_dir / "checkpoints" / "state"
    return Path(spec.checkpoints.dir) / spec.name / "state"


def weights_folder(run_dir: Path) -> Path:
    """Holds v<N>/: the safetensors directory of version N."""
    return run_dir / "weights"


def versions_in(folder: Path) -> list[int]:
    """The N of its directories v<N>, in order; empty where there is no such folder."""
    return numbered(folder, "v")


def numbered(folder: Path, prefix: str) -> list[int]:
    """The N of the entries <prefix><N> of a folder, in order."""
    if not folder.is_dir():
        return []
    matches = (re.fullmatch(rf"{prefix}(\d+)", entry.name) for entry in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def clear_unfinished(folder: Path, log: logging.Logger) -> None:
    """Removes what a killed process had not finished writing, and says so."""
    for entry in sorted(folder.glob(".tmp-*")):
        log.info("%s was never finished: removed", entry)
    remove_leftovers(folder)
